"""Made-up records of tasks of every kind, and a random model that reads and writes characters."""

import copy
import random
import string

import torch
from assets import tokenizer_of, write_records
from tiny_models import FAMILIES
from tiny_runs import DS_CONFIG, write_model
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM

from lezo_ds.config import config_from_dict

NUM_POSITIONS = 256
WRITTEN = "\n xyz"
_NAMES = ("Rome", "Oslo", "Ada", "Bonn", "Lima", "Cairo", "Eve", "Kiev", "Dora")
_THINGS = ("a red boat", "the rain", "two goats", "an old song", "bread", "the sea", "42 lamps")
_DEEDS = ("fell asleep", "saw", "ate", "lost", "sang of", "ran from")


def write_writer(directory, family="opt", seed=0, has_pad=True):
    """Write a random model whose answers, of few characters, end now and then and its tokenizer."""
    characters = ("\n", *string.digits, *string.ascii_letters, *string.punctuation, " ")
    split = pre_tokenizers.Split("", "isolated")
    without = () if has_pad else ("pad_token",)
    tokenizer = tokenizer_of(characters, split, decoders.Fuse(), without=without)
    tokenizer.save_pretrained(directory)
    vocabulary = tokenizer.get_vocab()
    config = copy.deepcopy(FAMILIES[family][0])
    config.vocab_size, config.max_position_embeddings = len(vocabulary), NUM_POSITIONS
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_pretrained(write_model(config, directory, seed=seed))
    silent = torch.ones(len(vocabulary), dtype=torch.bool)
    silent[[vocabulary[token] for token in WRITTEN]] = False
    model.get_output_embeddings().weight.data[silent] = 0.0
    model.save_pretrained(directory)
    return directory


def _sentence(rng):
    return f"{rng.choice(_NAMES)} {rng.choice(_DEEDS)} {rng.choice(_THINGS)}"


def _sst2(rng):
    return {"sentence": _sentence(rng), "label": rng.randrange(2)}


def _cb(rng):
    premise = f"{_sentence(rng)}."
    return {"premise": premise, "hypothesis": _sentence(rng), "label": rng.randrange(3)}


def _copa(rng):
    choices = {"choice1": f"{_sentence(rng)}.", "choice2": f"{_sentence(rng)}."}
    question = rng.choice(("cause", "effect"))
    texts = {"premise": f"{_sentence(rng)}.", "question": question}
    return {**texts, **choices, "label": rng.randrange(2)}


def _record(rng):
    entities = rng.sample(_NAMES, rng.randint(2, len(_NAMES)))
    answers = rng.sample(entities, rng.randint(1, 2))
    query = f"@placeholder {rng.choice(_DEEDS)} {rng.choice(_THINGS)}"
    return {"passage": _sentence(rng), "query": query, "entities": entities, "answers": answers}


def _squad(rng):
    answers = [" ".join(rng.choices("xyz", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
    texts = {"context": _sentence(rng), "question": f"What of {rng.choice(_NAMES)}?"}
    return {"title": rng.choice(_NAMES), **texts, "answers": {"text": answers}}


_RECORDS = {"sst2": _sst2, "cb": _cb, "copa": _copa, "record": _record, "squad": _squad}
TASKS = tuple(_RECORDS)


def write_tasks(directory, num_records=24):
    """Write training and validation records of each of TASKS into a folder of its name."""
    for task, make in _RECORDS.items():
        rng = random.Random(task)
        for split in ("train", "validation"):
            records = [make(rng) for _ in range(num_records)]
            write_records(directory / task / f"{split}.jsonl", records)
    return directory


def task_config(model, data, task, run_dir="", **changes):
    """Return the configuration of a run of 4 steps; keys of `changes` have __ for the dot."""
    values = {
        "run_dir": str(run_dir),
        "model.path": str(model),
        "model.dtype": "fp32",
        "data.task": task,
        "data.path": str(data / task),
        "data.max_length": NUM_POSITIONS,
        "data.num_train": 12,
        "data.num_dev": 5,
        "data.num_test": 7,
        "zo.learning_rate": 1e-3,
        "zo.perturbation_scale": 1e-2,
        "zo.sparsity": 0.5,
        "train.steps": 4,
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
        "train.eval_batch_size": 3,
        "train.eval_every": 2,
        "deepspeed": str(DS_CONFIG),
    }
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return config_from_dict(values | dotted, "the test")
