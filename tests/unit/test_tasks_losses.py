"""Tokens, losses and scores of every task against the protocol written out: one full sequence a candidate."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from golden_tasks import GOLDEN
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from lezo_ds.data.encoding import (
    PromptTokenizer,
    encode_example,
    encode_examples,
    encode_null,
    encode_prompts,
)
from lezo_ds.data.generation import generation_settings, read_answers
from lezo_ds.data.objectives import training_objective
from lezo_ds.tasks import TASKS

BOS, PAD = 0, 1
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
MAX_LENGTH = 400
# How GPT-2, and so OPT, cuts text before it merges anything; here what it cuts is a token.
GPT2_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
PATTERNS = {"words": GPT2_PIECES, "characters": r"[\s\S]"}


class Cut:
    """A tokenizer of whole pieces, and what it does in plain Python."""

    def __init__(self, pattern):
        self.pattern = pattern
        texts = [
            (prompt + candidate).strip(" ")
            for golden in GOLDEN
            for prompt in (golden.prompt, golden.null_prompt or "")
            for candidate in golden.candidates
        ]
        pieces = sorted({piece for text in (*texts, "\n\n", "Rain") for piece in self.pieces(text)})
        self.vocabulary = [*SPECIAL, *pieces]
        words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(self.vocabulary)}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        words.decoder = decoders.Fuse()
        backend = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
        self.tokenizer = PromptTokenizer(backend, bos_id=BOS, pad_id=PAD, eos_id=2)

    def pieces(self, text):
        return re.findall(self.pattern, text)

    def ids(self, text):
        """BOS and the tokens of a text, worked out without the tokenizer."""
        return (BOS, *(self.vocabulary.index(piece) for piece in self.pieces(text)))


@pytest.fixture(scope="module", params=PATTERNS)
def cut(request):
    return Cut(PATTERNS[request.param])


@pytest.fixture(scope="module")
def model(cut):
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=len(cut.vocabulary),
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_LENGTH,
        init_std=0.4,
    )
    return OPTForCausalLM(config).eval()


def golden_of(task):
    return [golden for golden in GOLDEN if golden.task == task.name]


def build(task):
    return [task.build_example(golden.record, row) for row, golden in enumerate(golden_of(task))]


def protocol_sequences(cut, golden, prompt=None):
    """The tokens of each candidate's sequence, and how many of them at the end are the candidate's."""
    prompt = golden.prompt if prompt is None else prompt
    full = [cut.ids((prompt + candidate).strip(" ")) for candidate in golden.candidates]
    return [(ids, len(ids) - len(cut.ids(prompt.strip(" ")))) for ids in full]


def protocol_log_probabilities(model, ids, num_candidate_tokens):
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    log_probabilities = logits.double().log_softmax(-1)
    first = len(ids) - num_candidate_tokens
    return torch.stack([log_probabilities[place - 1, ids[place]] for place in range(first, len(ids))])


def protocol_scores(model, cut, golden):
    return torch.stack(
        [protocol_log_probabilities(model, *pair).mean() for pair in protocol_sequences(cut, golden)]
    )


def protocol_loss(model, cut, task):
    """The training loss of a batch of all golden records, as the protocol words it."""
    if task.kind == "classification":
        losses = [
            -protocol_scores(model, cut, golden).log_softmax(0)[golden.label] for golden in golden_of(task)
        ]
        return torch.stack(losses).mean()
    golds = [protocol_sequences(cut, golden)[golden.label] for golden in golden_of(task)]
    return -torch.cat([protocol_log_probabilities(model, *gold) for gold in golds]).mean()


def run(model, batch):
    """Return the logits the batch asks for."""
    logits = model(**batch.inputs).logits[batch.selection.rows, batch.selection.positions]
    return logits if batch.selection.vocabulary is None else logits[:, batch.selection.vocabulary]


@torch.inference_mode()
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_training_loss_is_the_protocols(cut, model, task):
    objective = training_objective(task.kind)
    batch = objective.build_batch(encode_examples(cut.tokenizer, build(task), MAX_LENGTH), PAD)
    loss = objective.loss(run(model, batch), batch).sum() / batch.weight
    assert loss.item() == pytest.approx(protocol_loss(model, cut, task).item(), abs=1e-5)


@pytest.mark.parametrize("task", [TASKS["squad"], TASKS["drop"]], ids=lambda task: task.name)
def test_a_prompt_to_continue_ends_where_the_answer_begins(cut, task):
    for golden, example in zip(golden_of(task), build(task), strict=True):
        (ids,) = encode_prompts(cut.tokenizer, [example], MAX_LENGTH, 50)
        assert ids == cut.ids(golden.prompt)
        whole = encode_example(cut.tokenizer, example, MAX_LENGTH)
        assert whole.sequences[0][: -whole.option_lengths[0]] == ids
        answer = whole.sequences[0][len(ids) :]
        assert answer[-1] in cut.tokenizer.stop_ids()
        settings = generation_settings(cut.tokenizer, max_new_tokens=50)
        assert read_answers(torch.tensor([answer]), settings, cut.tokenizer) == [golden.references[0]]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_demonstrations_stand_before_the_prompt_and_are_no_part_of_a_candidate(cut, task):
    golden, example = golden_of(task)[0], build(task)[0]
    before = "Rain\n\n"
    asked = replace(example, demonstrations=before)
    plain = encode_example(cut.tokenizer, example, MAX_LENGTH)
    assert list(zip(plain.sequences, plain.option_lengths, strict=True)) == protocol_sequences(cut, golden)
    encoded = encode_example(cut.tokenizer, asked, MAX_LENGTH)
    assert encoded.sequences == whole_sequences(cut, golden, before, golden.prompt)
    assert encoded.option_lengths == plain.option_lengths
    (prompt,) = encode_prompts(cut.tokenizer, [asked], MAX_LENGTH, 50)
    assert prompt == cut.ids(before + golden.prompt.strip(" "))
    if golden.null_prompt is not None:
        null = encode_null(cut.tokenizer, asked, MAX_LENGTH)
        assert null.sequences == whole_sequences(cut, golden, before, golden.null_prompt)
        assert null.option_lengths == plain.option_lengths


def whole_sequences(cut, golden, before, prompt):
    return tuple(cut.ids(before + (prompt + candidate).strip(" ")) for candidate in golden.candidates)
