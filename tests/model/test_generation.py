"""Answers written in batches are those of plain greedy decoding of one prompt without a cache."""

from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from assets import tokenizer_of
from family_models import small_config
from hypothesis import example, given
from hypothesis import strategies as st
from ranks import run_ranks
from test_perturbed_forward import (
    CPU,
    blocks_of,
    in_blocks,
    perturbation,
    record_rows,
    reference,
    wrapped,
)
from tiny_models import VOCABULARY, greedy, random_model, tiny_model, tunable
from tiny_runs import TINY_OPT, start_engine, write_model
from tokenizers import decoders, pre_tokenizers

from lezo_ds.config.schema import GenerationConfig
from lezo_ds.data import generation, packing
from lezo_ds.data.encode import PromptTokenizer
from lezo_ds.data.generation import generate, prompt_batch, read_answers
from lezo_ds.forward.answer_cache import RoomyLayer
from lezo_ds.forward.batch import GenerationSettings
from lezo_ds.noise import kernels_of

PAD = 1
MAX_NEW_TOKENS = 12
SCALE = 0.05


def prompts_of(lengths=(3, 9, 1, 6, 4)):
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
    return [tuple(ids.tolist()) for ids in drawn]


def plain(model, prompt, stop_ids=()):
    return greedy(model, prompt, MAX_NEW_TOKENS, stop_ids)


@cache
def writer(family):
    """Return the seed of a model whose rows end at different lengths, and the token that ends."""
    for seed in range(20):
        free = [plain(tiny_model(family, seed=seed), prompt) for prompt in prompts_of()]
        for stop_id in {token for ids in free for token in ids}:
            if len({(*ids, stop_id).index(stop_id) for ids in free}) >= 3:
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


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama", "mistral", "gemma2", "gpt_neox"])
def test_a_batch_is_continued_as_each_of_its_prompts_alone(family):
    (model, settings), prompts = start(family), prompts_of()
    expected = [plain(model, prompt, settings.stop_ids) for prompt in prompts]
    assert len(set(map(len, expected))) > 1
    tokens = generate(model, prompt_batch(prompts, settings))
    assert ended(tokens, settings) == expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [("bamba", {"mamba_proj_bias": True}), ("llama4_text", {"floor_scale": 2, "attn_scale": 2.0})],
)
def test_padding_is_not_read_by_a_bias_before_a_state_or_by_a_temperature(family, changes):
    config = small_config(family)
    config.update(changes)
    model, prompts = random_model(config), prompts_of()
    tokens = generate(model, prompt_batch(prompts, GenerationSettings(MAX_NEW_TOKENS, (), PAD)))
    assert tokens.tolist() == [plain(model, prompt) for prompt in prompts]


def test_what_a_models_own_settings_ask_for_does_not_change_greedy_decoding():
    (model, settings), prompts = start("llama"), prompts_of()
    expected = generate(model, prompt_batch(prompts, settings))
    own = {"do_sample": True, "repetition_penalty": 9.0, "num_beams": 4, "max_length": 5}
    model.generation_config.update(**own, eos_token_id=int(expected[3, 0]))
    tokens = generate(model, prompt_batch(prompts, settings))
    assert torch.equal(tokens, expected)


CASES = [("opt", False, 3), ("llama", True, 0), ("llama", True, 3), ("mistral", False, 3)]


@pytest.mark.parametrize(("family", "is_shared", "num_common"), [*CASES, ("gemma2", True, 3)])
def test_all_probes_are_decoded_as_by_perturbed_models(family, is_shared, num_common, monkeypatch):
    (model, settings), common = start(family), (7, 8, 9)[:num_common]
    prompts = [common + prompt for prompt in prompts_of()]
    trainable, dropped = tunable(model, in_blocks(model)) if is_shared else tunable(model), (0,)
    signs = ((1,), (-1,), (2,))
    sides = [reference(model, trainable, perturbation(sign, dropped, SCALE)) for sign in signs]
    expected = [[plain(side, prompt, settings.stop_ids) for prompt in prompts] for side in sides]
    assert expected[0] != expected[1] != expected[2]
    num_rows, made = [], Counter()
    perturbed = wrapped(model, trainable, shares_start=is_shared)
    batch, kernels = prompt_batch(prompts, settings, num_common), kernels_of(CPU)
    perturb = kernels.perturb
    record_rows(blocks_of(model)[0], num_rows)

    def counted(entries, weights, key, scale, *args):
        made.update((w.elements.parameter_id, key, scale) for w in weights if w.rows is None)
        return perturb(entries, weights, key, scale, *args)

    monkeypatch.setattr(kernels, "perturb", counted)
    write = partial(generate, model, batch)
    together = perturbed(batch, perturbation((1, -1, 2), dropped, SCALE), write)
    assert {*made.values()} == {1}  # once for all tokens
    shared = len(prompts)
    first = [shared]
    if num_common and family == "llama":  # the others have windows, or positions not rotated
        first = [1, 1]  # what prompts begin with, and their own parts in one row
    of_probe = len(num_rows) // 3  # which write one after the other
    assert num_rows == (first + [shared] * (of_probe - len(first))) * 3
    singles = [perturbed(batch, perturbation(sign, dropped, SCALE), write)[0] for sign in signs]
    assert [ended(tokens, settings) for tokens in together] == expected
    assert [ended(tokens, settings) for tokens in singles] == expected


@pytest.mark.parametrize("row_tokens", [512, 8, 1])
def test_prompts_that_share_rows_are_continued_as_each_of_them_alone(row_tokens, monkeypatch):
    monkeypatch.setattr(packing, "_ROW_TOKENS", row_tokens)
    (model, settings), common = start("llama"), (7, 8, 9)
    prompts = [common + prompt for prompt in prompts_of((3, 9, 1, 6, 4, 8))]
    expected = [plain(model, prompt, settings.stop_ids) for prompt in prompts]
    batch = prompt_batch(prompts, settings, len(common))
    for num_copies in (1, 2, 3, 6):  # prompts of several directions
        copies = batch.prompts.common_ids.expand(num_copies, -1)
        of_copies = replace(batch.prompts, common_ids=copies)
        tokens = generate(model, replace(batch, prompts=of_copies))
        assert ended(tokens, settings) == expected


def drawn(model, settings, prompts, keys, **sampling):
    batch = prompt_batch(prompts, replace(settings, **sampling))
    with_keys = replace(batch.prompts, sample_keys=torch.tensor(keys))
    tokens = generate(model, replace(batch, prompts=with_keys))
    return ended(tokens, settings)


def test_a_drawn_answer_depends_on_its_prompt_and_key_only():
    (model, settings), prompts = start("llama"), prompts_of()
    together = drawn(model, settings, prompts * 2, list(range(10, 20)), temperature=1.0)
    pairs = enumerate(prompts * 2, 10)
    assert together == [drawn(model, settings, [p], [key], temperature=1.0)[0] for key, p in pairs]
    assert together[:5] != together[5:]
    greedy = ended(generate(model, prompt_batch(prompts, settings)), settings)
    assert drawn(model, settings, prompts, [1, 2, 3, 4, 5], temperature=2.0, top_p=1e-6) == greedy


def test_drawn_tokens_have_the_models_probabilities():
    model, prompt, count = tiny_model("llama"), prompts_of()[1], 2000
    settings = GenerationSettings(1, (), PAD)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    expected = count * (logits / 0.5).softmax(dim=0)
    rows = drawn(model, settings, [prompt] * count, list(range(count)), temperature=0.5)
    counts = torch.bincount(torch.tensor([row[0] for row in rows]), minlength=len(expected))
    assert ((counts - expected).abs() < 4 * expected.sqrt() + 1).all()


def test_uniform_numbers_are_a_function_of_key_and_position_and_never_0_or_1():
    drawn = generation.uniforms(7, 3, 100_001)
    assert (generation.uniforms(7, 3, 5) == drawn[:5]).all()
    assert 0 < drawn.min() < 1e-4 < 1 - 1e-4 < drawn.max() < 1
    for key, position in ((8, 3), (7, 4)):
        assert (generation.uniforms(key, position, 100_001) != drawn).mean() > 0.99


def settings_of(tokenizer, max_new_tokens, *stops):
    config = GenerationConfig(max_new_tokens=max_new_tokens, stop=list(stops))
    return generation.generation_settings(tokenizer, config, in_chat=False)


ISOLATED = pre_tokenizers.Split("", "isolated")


def read_by(words, decoder, split=ISOLATED, begin_ids=(0,)):
    """Return a tokenizer with one token for each of the words, after the special ones."""
    fast = tokenizer_of(words, split, decoder, adds_bos=False)
    return PromptTokenizer(fast, begin_ids=begin_ids, pad_id=PAD, end_ids=(2,))


WORDS = ["a", "b", "ab", " a", "\u00e9"]
WORDS += [f"<0x{byte:02X}>" for byte in "\u00e9\U0001f600".encode()]
BYTES = read_by(WORDS, decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))
"""A tokenizer with tokens of words, letters and single bytes, as LLaMA's."""


@given(st.lists(st.integers(4, 14), max_size=40), st.sampled_from(["ba", "\u00e9", "b ab"]))
@example([9, 9, 10, 4], "\u00e9")  # bytes that are a character without the one before
def test_a_stop_of_several_tokens_is_found_at_the_token_that_completes_it(ids, stop):
    has_ended = settings_of(BYTES, 40, stop).has_ended
    expected = [stop in BYTES.decode(ids[:length]) for length in range(len(ids) + 1)]
    found = [has_ended(ids[:length]) for length in range(len(ids) + 1)]
    # What comes after a row has ended does not matter.
    assert [*found, True].index(True) == [*expected, True].index(True)


def passes_of_rank(directory, partition_size, numbers=(2, 6), lengths=(3, 3), num_common=0):
    """Return how many tokens this rank writes to a prompt of its length, and in how many passes."""
    engine, passes = start_engine(directory, num_ranks=2, partition_size=partition_size), []
    settings = GenerationSettings(numbers[engine.global_rank], (), PAD)
    engine.module.register_forward_pre_hook(lambda *_: passes.append(1))
    prompts = prompts_of((lengths[engine.global_rank],))
    tokens = engine.forward(prompt_batch(prompts, settings, num_common))
    return tokens.shape[1], len(passes)


@pytest.mark.distributed
def test_ranks_write_in_step_only_if_they_gather_weights_from_each_other(tmp_path):
    write_model(TINY_OPT, tmp_path)
    assert run_ranks(passes_of_rank, 2, tmp_path, None) == [(2, 6), (6, 6)]
    assert run_ranks(passes_of_rank, 2, tmp_path, 1) == [(2, 2), (6, 6)]


CHARACTERS = read_by(["\n", " ", "a", "b", "b\n"], decoders.Fuse())
"""One token holds a letter and a newline."""


@pytest.mark.parametrize(
    ("stops", "ids", "answer", "stop_ids"),
    [
        (("\n",), (5, 6, 8, 6, 6), "ab", (2, 4, 8)),
        (("\n",), (6, 5, 7, 2, 6), "a b", (2, 4, 8)),
        (("\n",), (4, 6, 6, 6, 6), "", (2, 4, 8)),
        (("ab",), (7, 6, 7, 5, 6), "b", (2,)),
        (("b", "\n"), (6, 6, 7, 6, 6), "aa", (2, 4, 7, 8)),
        (("a b", "ba"), (6, 5, 7, 6, 6), "", (2,)),
        (("a b", "ba"), (7, 6, 5, 7, 6), "", (2,)),  # one stop begins within the other
        ((), (6, 4, 7, 2, 6), "a\nb", (2,)),
    ],
)
def test_an_answer_is_read_up_to_the_first_of_its_stops(stops, ids, answer, stop_ids):
    settings = settings_of(CHARACTERS, 5, *stops)
    assert settings.stop_ids == stop_ids
    assert read_answers(torch.tensor([ids]), settings, CHARACTERS) == [answer]


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        (["\u2581\u2581\u2581\u2581x", "\n", "\u2581y"], "    x\n y"),  # indented code
        (["\n", "\u2581\u2581", "\n", "\u2581\u2581", "y", "\n"], "  y"),  # after blank lines
        (["\u2581y", "x"], "yx"),  # a space parts the word from the prompt
    ],
)
def test_the_first_line_of_an_answer_keeps_its_indentation(pieces, answer):
    """A decoder as Llama 2's strips a space at the start of all that it decodes."""
    split = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    spaces = decoders.Replace("\u2581", " ")
    decoder = decoders.Sequence([spaces, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = read_by(sorted({"\u2581a", *pieces}), decoder, split, begin_ids=())
    ids = tokenizer.backend.convert_tokens_to_ids(pieces)
    settings = settings_of(tokenizer, 8)
    assert read_answers(torch.tensor([[*ids, 2, 1]]), settings, tokenizer) == [answer]


def test_a_row_ends_with_a_stop_of_several_tokens_in_what_was_written():
    """The stop is two tokens that the model writes; the prompt's own tokens do not count."""
    model, prompt = tiny_model("llama"), prompts_of()[0]
    words = [f"w{token:02}" for token in range(4, VOCABULARY)]
    tokenizer = read_by(words, decoders.Fuse())
    free = plain(model, prompt)
    stop = tokenizer.decode(free[3:5])
    settings = settings_of(tokenizer, MAX_NEW_TOKENS, stop)
    # The second one ends with the first token of the stop.
    for ids in (prompt, (*prompt, *free[:4])):
        tokens = generate(model, prompt_batch([ids], settings))
        answer = tokenizer.decode(plain(model, ids)).split(stop)[0]
        assert read_answers(tokens, settings, tokenizer) == [answer]
        assert tokens.shape[1] == min(MAX_NEW_TOKENS, len(answer) // 3 + 2)


def test_a_layer_with_room_does_not_copy_what_it_holds_for_each_token():
    layer = RoomyLayer(num_new_tokens=4)

    def address(num_tokens):
        new = torch.zeros(2, 3, num_tokens, 5)
        layer.update(new, new)
        return layer.keys.data_ptr()

    first = address(6)
    assert {address(1) for _ in range(4)} == {first} != {address(1)}
