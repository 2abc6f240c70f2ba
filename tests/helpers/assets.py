"""Small inputs of a real run: a random model, its tokenizer, data in SST-2's schema, a recipe."""

import json
import os
import random
from pathlib import Path

import pytest
import yaml
from tiny_runs import write_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, OPTConfig, PreTrainedTokenizerFast

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 4
NUM_POSITIONS = 64
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # by their ids, as in OPT's tokenizer


def _words(text):
    return tuple(text.split())


ASPECTS = _words("film movie story plot script cast ending score dialogue pacing music")
NEGATIVE = _words("terrible boring dull clumsy tedious weak stale lazy bland grim")
POSITIVE = _words("great superb charming moving funny clever warm brilliant fresh sharp rich")
ADJECTIVES = (NEGATIVE, POSITIVE)
LINKS = ("is", "was", "feels", "seems", "looks", "remains")


def shared_asset(name):
    """Return a file or folder that is too large to be part of the repository."""
    path = Path(os.environ.get("LEZO_TEST_ASSETS", REPOSITORY.parent / "shared")) / name
    if not path.exists():
        pytest.skip(f"{path} does not exist; set LEZO_TEST_ASSETS to the folder that holds {name}")
    return path


def labelled_reviews(rng, num_reviews):
    """Return different sentences of one to three clauses, in SST-2's schema."""
    reviews = {}
    while len(reviews) < num_reviews:
        label = rng.randrange(2)
        clauses = [
            f"the {rng.choice(ASPECTS)} {rng.choice(LINKS)} {rng.choice(ADJECTIVES[label])}"
            for _ in range(rng.randint(1, 3))
        ]
        reviews.setdefault(" and ".join(clauses) + " .", label)
    return [
        {"sentence": text, "label": label, "idx": index}
        for index, (text, label) in enumerate(reviews.items())
    ]


def tokenizer_of(words, split, decoder=None, adds_bos=True, without=(), **more):
    """Return a tokenizer whose tokens are SPECIAL_TOKENS and the words that `split` cuts."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL_TOKENS, *words))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = split
    if decoder is not None:
        backend.decoder = decoder
    if adds_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = ("bos_token", "pad_token", "eos_token", "unk_token")
    known = {n: token for n, token in zip(names, SPECIAL_TOKENS, strict=True) if n not in without}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **known, **more)


def sizes_of(tokenizer, num_blocks, num_positions, width=16, num_heads=4):
    """Return what the configs of all families need of a tiny model."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": num_heads,
        "max_position_embeddings": num_positions,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    }


def write_reader(directory, num_blocks=NUM_BLOCKS, seed=0, family="opt", odd=False):
    """Write a random model, of odd sizes so that shards are padded, and its word tokenizer."""
    words = sorted({*ASPECTS, *NEGATIVE, *POSITIVE, *LINKS, "It", "the", "and", "."})
    options = {"model_max_length": 128, "clean_up_tokenization_spaces": False}
    tokenizer = tokenizer_of(words, WhitespaceSplit(), **options)
    tokenizer.save_pretrained(directory)
    heads, width, inner = (3, 36 if family == "llama" else 33, 65) if odd else (4, 16, 32)
    sizes = sizes_of(tokenizer, num_blocks, NUM_POSITIONS, width, heads)
    if family == "llama":
        config = LlamaConfig(**sizes, intermediate_size=inner, num_key_value_heads=1)
    else:
        config = OPTConfig(**sizes, word_embed_proj_dim=width, ffn_dim=inner)
    return write_model(config, directory, seed=seed)


def write_records(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_lines(path):
    """Return the objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def change_json(path, **values):
    """Change keys of a JSON file, and return all of its values."""
    changed = json.loads(path.read_text()) | values
    path.write_text(json.dumps(changed))
    return changed


def write_data(directory, num_train=60, num_validation=30):
    rng = random.Random(0)
    write_records(directory / "train.jsonl", labelled_reviews(rng, num_train))
    write_records(directory / "validation.jsonl", labelled_reviews(rng, num_validation))
    return directory


def recipe_values(model, data):
    """Return a run of 8 steps on 4 micro-batches each, evaluated every 4."""
    return {
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"task": "sst2", "path": str(data), "num_train": 30, "num_dev": 11, "num_test": 13},
        "zo": {"learning_rate": 1e-3, "sparsity": 0.5},
        "train": {
            "steps": 8,
            "batch_size": 8,
            "micro_batch_size": 2,
            "eval_batch_size": 4,
            "eval_every": 4,
        },
        "deepspeed": str(REPOSITORY / "ds_configs" / "zero3_cpu.json"),
    }


def write_recipe(directory):
    """Write a model, data and a recipe that names them; return the recipe's path."""
    values = recipe_values(write_reader(directory / "model"), write_data(directory / "data"))
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
