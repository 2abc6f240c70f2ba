"""Prefix tuning: where it starts, and that it equals keys and values put before the text by hand."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny_adapters import PREFIX_LENGTH, peft_config, start_engine, train, whole_batch, write_families
from tiny_models import FAMILIES, VOCABULARY, tiny_model
from tiny_runs import SEED, full_weights, write_model
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig

from lezo_ds.data.generation import prompt_batch
from lezo_ds.errors import UserError
from lezo_ds.forward.adapters import load_prefix, make_adapter
from lezo_ds.forward.adapters.prefix import initial_ids
from lezo_ds.forward.batch import GenerationSettings, MicroBatch
from lezo_ds.forward.blocks import find_blocks
from lezo_ds.forward.perturbed_forward import KeyedProbe, Perturbation

FAMILIES_TESTED = ("opt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt2", "phi", "gemma")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPTS = [(0, 5, 9, 30), (0, 7), (0, 11, 12, 13, 14, 15, 16, 17)]
SETTINGS = GenerationSettings(max_new_tokens=6, stop_ids=(2,), pad_id=1)


def _run(directory, family, dtype, num_ranks, root):
    """Return the first values, the values after 3 steps, logits, new tokens and the snapshot's directory."""
    engine = start_engine(directory, peft_config("prefix", family), dtype, num_ranks, learning_rate=3.0)
    first = _prefix(engine)
    train(engine, 3)
    logits = engine.forward(whole_batch())
    tokens = engine.forward(prompt_batch(PROMPTS, SETTINGS))
    return first, _prefix(engine), logits, tokens, engine.save_checkpoint(root)


def _prefix(engine):
    """Return [(keys, values)] of each block."""
    weights = full_weights(engine)
    keys, values = (
        [tensor for name, tensor in weights.items() if name.endswith(f".prefix.{kind}")]
        for kind in ("key", "value")
    )
    return list(zip(keys, values, strict=True))


def _load(directory, dtype):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype]).eval()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{family: (base directory, dtype, what `_run` returned)}; a window that never closes for mistral."""
    root = tmp_path_factory.mktemp("prefix")
    found = {}
    for family in FAMILIES_TESTED:
        dtype = "bf16" if family == "llama" else "fp32"
        num_ranks = 2 if family in ("opt", "llama") else 1
        config = FAMILIES[family][0]
        if family == "mistral":
            config = MistralConfig(**(config.to_dict() | {"sliding_window": None}))
        directory = write_model(config, root / family)
        results = run_ranks(_run, num_ranks, directory, family, dtype, num_ranks, root / f"{family}_saved")
        found[family] = (directory, dtype, results[-1])
    return found


# Where it starts.


def test_the_first_tokens_follow_from_the_seed_alone():
    assert initial_ids(0, 5, 50272) == [31280, 569, 31140, 33440, 12490]
    assert initial_ids(0, 3, 50272) == initial_ids(0, 5, 50272)[:3]
    assert initial_ids(1, 5, 50272) != initial_ids(0, 5, 50272)
    assert len(set(initial_ids(0, 1000, 10))) == 10


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES_TESTED)
def test_the_first_values_are_the_keys_and_values_of_a_real_forward_pass(runs, family):
    directory, dtype, (first, *_) = runs[family]
    ids = torch.tensor([initial_ids(SEED, PREFIX_LENGTH, VOCABULARY)])
    with torch.no_grad():
        cache = _load(directory, dtype)(ids, use_cache=True).past_key_values
    assert len(first) == len(cache.layers) == 3
    for (key, value), layer in zip(first, cache.layers, strict=True):
        torch.testing.assert_close(key, layer.keys[0])
        torch.testing.assert_close(value, layer.values[0])


# What it computes.


def hand_filled_cache(model, prefix, rows):
    cache = DynamicCache(config=model.config)
    for block, (key, value) in enumerate(prefix):
        cache.update(key.expand(rows, -1, -1, -1), value.expand(rows, -1, -1, -1), block)
    return cache


def logits_by_hand(model, prefix, ids):
    """Return the logits of right-padded text behind a prefix in the cache, the text's positions from 0."""
    rows, tokens = ids.shape
    with torch.no_grad():
        return model(
            ids,
            past_key_values=hand_filled_cache(model, prefix, rows),
            attention_mask=torch.ones(rows, PREFIX_LENGTH + tokens, dtype=torch.int64),
            position_ids=torch.arange(tokens).expand(rows, -1),
        ).logits


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES_TESTED)
def test_the_logits_equal_those_of_a_key_value_cache_filled_by_hand(runs, family):
    directory, dtype, (first, prefix, logits, *_) = runs[family]
    model = _load(directory, dtype)
    expected = logits_by_hand(model, prefix, whole_batch().inputs["input_ids"])
    tolerance = 1e-5 if dtype == "fp32" else 0.03
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    before = logits_by_hand(model, first, whole_batch().inputs["input_ids"])
    assert float((expected - before).abs().max()) > 2 * tolerance


def continue_by_hand(model, prefix, prompt):
    """Write greedily, the whole text anew for each token."""
    ids = list(prompt)
    while len(ids) - len(prompt) < SETTINGS.max_new_tokens and (len(ids) == len(prompt) or ids[-1] != 2):
        ids.append(int(logits_by_hand(model, prefix, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.distributed
@pytest.mark.parametrize("family", [family for family in FAMILIES_TESTED if family != "llama"])  # bf16 ties
def test_answers_written_behind_a_prefix_equal_those_written_by_hand(runs, family):
    directory, dtype, (_, prefix, _, tokens, _) = runs[family]
    model = _load(directory, dtype)
    for prompt, row in zip(PROMPTS, tokens.tolist(), strict=True):
        expected = continue_by_hand(model, prefix, prompt)
        assert row[: len(expected)] == expected
        assert all(token == SETTINGS.pad_id for token in row[len(expected) :])


def _tokens_at_both_signs(directory):
    engine = start_engine(directory, peft_config("prefix"))
    batch = prompt_batch(PROMPTS, SETTINGS)
    probes = (KeyedProbe(5, 0.3), KeyedProbe(5, -0.3))
    both = Perturbation(probes, frozenset({0}))
    one = [Perturbation((probe,), frozenset({0})) for probe in probes]
    with torch.no_grad():
        return engine._run(batch, both), [engine._run(batch, sign)[0] for sign in one]


@pytest.mark.distributed
def test_answers_at_both_signs_at_once_equal_those_at_each(runs):
    ((dual, single),) = run_ranks(_tokens_at_both_signs, 1, runs["opt"][0])
    for left, right in zip(dual, single, strict=True):
        assert left[:, : right.shape[1]].tolist() == right.tolist()


def _sliding_logits(directory):
    engine = start_engine(directory, peft_config("prefix"))
    ids = torch.arange(3, 23).unsqueeze(0)
    first = engine.forward(MicroBatch({"input_ids": ids}, 1))
    for parameter in engine.weights.adapter_parameters:
        with parameter.shard(write=True) as shard:
            shard.mul_(2)
    return first, engine.forward(MicroBatch({"input_ids": ids}, 1))


@pytest.mark.distributed
def test_a_prefix_is_seen_past_a_sliding_window(tmp_path):
    directory = write_families(["mistral"], tmp_path)["mistral"]  # its window: 8 tokens, 3 blocks
    ((before, after),) = run_ranks(_sliding_logits, 1, directory)
    assert ((before - after).abs().amax(-1) > 1e-3).all()


# Saved and opened again.


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES_TESTED)
def test_a_snapshot_loaded_into_a_plain_model_gives_the_engines_logits_and_answers(runs, family):
    directory, dtype, (_, _, logits, tokens, snapshot) = runs[family]
    model = _load(directory, dtype)
    load_prefix(model, snapshot)
    with torch.no_grad():
        torch.testing.assert_close(model(**whole_batch().inputs).logits, logits)
    written = model.generate(
        **prompt_batch(PROMPTS, SETTINGS).inputs, max_new_tokens=6, do_sample=False, pad_token_id=1
    )[:, max(map(len, PROMPTS)) :]
    width = min(written.shape[1], tokens.shape[1])
    assert written[:, :width].tolist() == tokens[:, :width].tolist()


@pytest.mark.distributed
def test_a_prefix_of_another_model_is_refused(runs):
    snapshot = runs["opt"][2][-1]
    with pytest.raises(UserError, match="does not fit LlamaForCausalLM"):
        load_prefix(tiny_model("llama"), snapshot)


# Which models can have one.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_lies_in_every_block_and_is_all_that_is_trained(family):
    model = tiny_model(family)
    layout = find_blocks(model)
    if family == "gemma2":
        with pytest.raises(
            UserError, match="does not support the attention of Gemma2ForCausalLM; got: eager"
        ):
            make_adapter(peft_config("prefix")).attach(model, layout)
        return
    make_adapter(peft_config("prefix")).attach(model, layout)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(name.endswith((".prefix.key", ".prefix.value")) for name in trained)
    assert [layout.block_of(name) for name in trained] == [0, 0, 1, 1, 2, 2]
    heads = 4 if family in ("opt", "opt_projected", "gpt_neox", "gpt2", "phi") else 2
    assert {p.shape for p in trained.values()} == {(heads, PREFIX_LENGTH, 4)}
