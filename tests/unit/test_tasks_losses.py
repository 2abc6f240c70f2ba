"""Tokens and losses of every task against the protocol written out: one full sequence a
candidate."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from golden_tasks import GOLDEN
from lezo_ds.data.encoding import PromptTokenizer, encode_example, encode_prompt
from lezo_ds.tasks import TASKS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from lezo_ds.config.schema import GenerationConfig
from lezo_ds.data.generation import generation_settings, read_answers
from lezo_ds.data.objectives import training_objective

BOS, PAD, EOS = 0, 1, 2
MAX_LENGTH = 400
# How GPT-2, and so OPT, cuts text before it merges anything; here what it cuts is a token.
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
TEXTS = [
    (golden.prompt + candidate).strip(" ") for golden in GOLDEN for candidate in golden.candidates
]
PIECES = {piece for text in (*TEXTS, "Rain\n\n") for piece in re.findall(PATTERN, text)}
VOCABULARY = ["<s>", "<pad>", "</s>", "<unk>", *sorted(PIECES)]


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    words.decoder = decoders.Fuse()
    backend = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    return PromptTokenizer(backend, begin_ids=(BOS,), pad_id=PAD, end_ids=(EOS,))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 2}
    config = OPTConfig(vocab_size=len(VOCABULARY), **sizes, num_attention_heads=2, init_std=0.4)
    return OPTForCausalLM(config).eval()


def ids_of(text):
    """BOS and the tokens of a text, worked out without the tokenizer."""
    return (BOS, *(VOCABULARY.index(piece) for piece in re.findall(PATTERN, text)))


def golden_of(task):
    return [golden for golden in GOLDEN if golden.task == task.name]


def build(task):
    return [task.example(golden.record) for row, golden in enumerate(golden_of(task))]


def sequences(golden, prompt, before=""):
    return tuple(
        ids_of(before + (prompt + candidate).strip(" ")) for candidate in golden.candidates
    )


def log_probabilities(model, golden):
    """Return those of the tokens of each candidate."""
    logs = []
    for ids in sequences(golden, golden.prompt):
        rows = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        first = len(ids_of(golden.prompt.strip(" ")))
        logs.append(torch.stack([rows[place - 1, ids[place]] for place in range(first, len(ids))]))
    return logs


def protocol_loss(model, task):
    """The training loss of a batch of all golden records, as the protocol words it."""
    pairs = [(log_probabilities(model, golden), golden.label) for golden in golden_of(task)]
    if task.kind != "classification":
        return -torch.cat([logs[label] for logs, label in pairs]).mean()
    scores = [
        torch.stack([log.mean() for log in logs]).log_softmax(0)[label] for logs, label in pairs
    ]
    return -torch.stack(scores).mean()


@torch.inference_mode()
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_training_loss_is_the_protocols(tokenizer, model, task):
    objective = training_objective(task)
    encoded = [encode_example(tokenizer, example, MAX_LENGTH) for example in build(task)]
    batch = objective.build_batch(encoded, PAD)
    logits = model(**batch.inputs).logits[batch.selection.rows, batch.selection.positions]
    if batch.selection.vocabulary is not None:
        logits = logits[:, batch.selection.vocabulary]
    loss = objective.loss(logits, batch).sum() / batch.weight
    assert loss.item() == pytest.approx(protocol_loss(model, task).item(), abs=1e-5)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_demonstrations_stand_before_prompts_and_are_no_part_of_a_candidate(tokenizer, task):
    golden, before = golden_of(task)[0], "Rain\n\n"
    asked = replace(build(task)[0], demonstrations=before)
    plain, encoded = (encode_example(tokenizer, e, MAX_LENGTH) for e in (build(task)[0], asked))
    assert encoded.sequences == sequences(golden, golden.prompt, before)
    assert encoded.option_lengths == plain.option_lengths
    prompt = encode_prompt(tokenizer, asked)
    assert prompt == ids_of(before + golden.prompt.strip(" "))
    if TASKS[golden.task].kind == "generation":  # what follows the prompt is read as the answer
        answer = torch.tensor([encoded.sequences[0][len(prompt) :]])
        settings = generation_settings(tokenizer, GenerationConfig())
        assert read_answers(answer, settings, tokenizer) == [golden.references[0]]
