"""Answers written in batches are those of plain greedy decoding, one prompt at a time and without a cache."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from test_perturbed_forward import BOTH, MINUS, NOISE, PLUS, perturbation, reference, tunable
from tiny_models import FAMILIES, VOCABULARY, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lezo_ds.data.encoding import PromptTokenizer
from lezo_ds.data.generation import prompt_batch, read_answers, write_tokens
from lezo_ds.model.batch import GenerationSettings
from lezo_ds.model.perturbed_forward import PerturbedForward

PAD = 1
MAX_NEW_TOKENS = 12
SCALE = 0.05


def prompts_of(lengths=(3, 9, 1, 6, 4)):
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
    return [tuple(ids.tolist()) for ids in drawn]


@torch.no_grad()
def plain(model, prompt, stop_ids=(), max_new_tokens=MAX_NEW_TOKENS):
    """Decode one prompt greedily: every token from a full forward pass over all tokens before it."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_new_tokens:
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def length(ids, stop_id):
    return ids.index(stop_id) + 1 if stop_id in ids else len(ids)


@cache
def writer(family):
    """Return the seed of a model whose rows end at different lengths, and the token they end with.

    Most random models write the same to every prompt.
    """
    for seed in range(20):
        model = tiny_model(family, seed=seed)
        free = [plain(model, prompt) for prompt in prompts_of()]
        for stop_id in {token for ids in free for token in ids}:
            if len({length(ids, stop_id) for ids in free}) >= 3:
                return seed, stop_id
    raise AssertionError(f"no seed makes {family} end at different lengths")


def start(family):
    """Return a model and settings under which its rows end at different lengths."""
    seed, stop_id = writer(family)
    return tiny_model(family, seed=seed), GenerationSettings(MAX_NEW_TOKENS, (stop_id,), PAD)


def ended(tokens, settings):
    """Return the rows of new tokens up to their first stop, and check that only padding follows."""
    rows = []
    for ids in tokens.tolist():
        stops = [place for place, token in enumerate(ids) if token in settings.stop_ids]
        end = stops[0] + 1 if stops else len(ids)
        assert set(ids[end:]) <= {settings.pad_id}
        rows.append(ids[:end])
    return rows


def test_prompts_are_padded_on_the_left_and_the_mask_says_where():
    settings = GenerationSettings(4, (2,), PAD)
    batch = prompt_batch([(0, 5, 6), (0,)], settings)
    assert batch.inputs["input_ids"].tolist() == [[0, 5, 6], [PAD, PAD, 0]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert (batch.weight, batch.generation, batch.selection) == (2, settings, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_continued_as_each_of_its_prompts_alone(family):
    (model, settings), prompts = start(family), prompts_of()
    expected = [plain(model, prompt, settings.stop_ids) for prompt in prompts]
    assert len(set(map(len, expected))) > 1
    tokens = write_tokens(model, settings, **prompt_batch(prompts, settings).inputs)
    assert ended(tokens, settings) == expected


def test_a_batch_ends_when_all_its_rows_have():
    model, (prompt, *_) = tiny_model("llama"), prompts_of()
    first, second, *_ = plain(model, prompt)
    assert first != second
    settings = GenerationSettings(MAX_NEW_TOKENS, (second,), PAD)
    tokens = write_tokens(model, settings, **prompt_batch([prompt], settings).inputs)
    assert tokens.tolist() == [[first, second]]


def test_what_a_models_own_settings_ask_for_does_not_change_greedy_decoding():
    (model, settings), prompts = start("llama"), prompts_of()
    expected = write_tokens(model, settings, **prompt_batch(prompts, settings).inputs)
    model.generation_config.do_sample = True
    model.generation_config.repetition_penalty = 9.0
    model.generation_config.num_beams = 4
    model.generation_config.max_length = 5
    model.generation_config.eos_token_id = int(expected[3, 0])
    tokens = write_tokens(model, settings, **prompt_batch(prompts, settings).inputs)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("dropped", [(), (1,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_signs_are_decoded_as_by_models_with_perturbed_weights(family, dropped):
    (model, settings), prompts = start(family), prompts_of()
    trainable = tunable(model)
    signs = (PLUS, MINUS)
    sides = [reference(model, trainable, perturbation(sign, dropped, SCALE)) for sign in signs]
    expected = [[plain(side, prompt, settings.stop_ids) for prompt in prompts] for side in sides]
    assert expected[0] != expected[1]
    perturbed, batch = PerturbedForward(model, trainable, NOISE), prompt_batch(prompts, settings)

    def write(**inputs):
        return write_tokens(model, settings, **inputs)

    both = perturbed(batch, perturbation(BOTH, dropped, SCALE), write)
    singles = [perturbed(batch, perturbation(sign, dropped, SCALE), write)[0] for sign in signs]
    assert [ended(tokens, settings) for tokens in both] == expected
    assert [ended(tokens, settings) for tokens in singles] == expected


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer of characters, but for one token that holds a letter and a newline."""
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "\n", " ", "a", "b", "b\n"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    return PromptTokenizer(fast, bos_id=0, pad_id=PAD, eos_id=2)


@pytest.mark.parametrize(
    ("ids", "answer"),
    [
        ((5, 6, 7, 4, 6, 6), "ab"),
        ((6, 5, 7, 2, 6, 6), "a b"),
        ((5, 6, 8, 6, 6, 6), "ab"),
        ((6, 7, 6, 7, 6, 7), "ababab"),
        ((4, 6, 6, 6, 6, 6), ""),
        ((2, 1, 1, 1, 1, 1), ""),
    ],
    ids=["newline", "end of sequence", "newline in a token", "neither", "newline first", "end first"],
)
def test_an_answer_ends_at_a_newline_or_the_end_of_sequence_and_is_stripped(tokenizer, ids, answer):
    settings = GenerationSettings(6, tokenizer.stop_ids(), PAD)
    assert settings.stop_ids == (2, 4, 8)
    assert read_answers(torch.tensor([ids, ids]), settings, tokenizer) == [answer, answer]
