"""LoRA: where it starts, that it computes what its formula says, and that peft opens what is saved."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from ranks import run_ranks
from tiny_adapters import peft_config, start_engine, train, whole_batch, write_families
from tiny_models import tiny_model
from tiny_runs import full_weights
from torch import nn
from transformers import AutoModelForCausalLM

from lezo_ds.config import PeftConfig
from lezo_ds.errors import UserError
from lezo_ds.forward.adapters import make_adapter
from lezo_ds.forward.adapters.lora import matching_modules, uniform
from lezo_ds.forward.blocks import find_blocks
from lezo_ds.zo.keys import adapter_key

FAMILIES = ("opt", "llama", "gpt_neox", "gpt2")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCALE = 5.0 / 2  # alpha / r of the tiny adapters


# Where it starts.


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 60), st.integers(0, 60))
def test_a_slice_of_the_first_values_is_the_same_however_it_is_cut(seed, parameter_id, start, count):
    whole = uniform(seed, parameter_id, 0, 120)
    assert torch.equal(uniform(seed, parameter_id, start, count), whole[start : start + count])


def test_the_first_values_are_uniform_and_each_seed_and_parameter_has_its_own():
    values = uniform(adapter_key(3), 7, 0, 40_000)
    assert values.min() >= -1 and values.max() < 1
    assert len(values.unique()) > 39_800
    counts = torch.histc(values, 20, -1, 1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 43.8  # 19 degrees of freedom, once in a thousand
    for other in (uniform(adapter_key(4), 7, 0, 40_000), uniform(adapter_key(3), 8, 0, 40_000)):
        assert abs(float(torch.corrcoef(torch.stack([values, other]))[0, 1])) < 0.02


def _start(directory, dtype, num_ranks):
    engine = start_engine(directory, peft_config("lora"), dtype, num_ranks)
    return full_weights(engine), engine.forward(whole_batch())


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_starts_uniform_as_pefts_and_b_at_zero_so_that_the_model_starts_as_it_is(num_ranks, tmp_path):
    directory = write_families(["opt"], tmp_path)["opt"]
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    for weights, logits in run_ranks(_start, num_ranks, directory, "fp32", num_ranks):
        with torch.no_grad():
            torch.testing.assert_close(logits, model(**whole_batch().inputs).logits)
        down = [value for name, value in weights.items() if name.endswith(".lora_A.weight")]
        assert len(down) == 6 and all(value.shape == (2, 16) for value in down)
        bound = 1 / math.sqrt(16)  # kaiming_uniform_(a=sqrt(5)), as peft starts A
        assert 0.9 * bound < max(float(value.abs().max()) for value in down) <= bound
        assert all(not value.any() for name, value in weights.items() if name.endswith(".lora_B.weight"))


# What it computes, and peft's own format.


def _train_and_save(directory, family, dtype, root):
    engine = start_engine(directory, peft_config("lora", family), dtype, learning_rate=1.0)
    train(engine, 3)
    return full_weights(engine), engine.forward(whole_batch()), engine.save_checkpoint(root)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{family: (base directory, weights, the engine's logits, directory of its snapshot)}, after 3 steps."""
    root = tmp_path_factory.mktemp("lora")
    found = {}
    for family, directory in write_families(FAMILIES, root).items():
        dtype = "bf16" if family == "llama" else "fp32"
        found[family] = (directory, dtype, *_on_one_rank(directory, family, dtype, root / f"{family}_saved"))
    return found


def _on_one_rank(*arguments):
    return run_ranks(_train_and_save, 1, *arguments)[0]


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_those_of_the_weights_with_the_scaled_product_added(saved, family):
    directory, dtype, weights, logits, _ = saved[family]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    batch = whole_batch().inputs
    num_changed = 0
    with torch.no_grad():
        plain = model(**batch).logits
        for name, parameter in model.named_parameters():
            adapter = name.removesuffix(".weight")
            if f"{adapter}.lora_A.weight" in weights:
                down, up = (weights[f"{adapter}.lora_{side}.weight"].float() for side in "AB")
                product = SCALE * up @ down
                parameter += product.T if family == "gpt2" else product
                num_changed += 1
        expected = model(**batch).logits
    assert num_changed == (3 if family in ("gpt2", "gpt_neox") else 6)
    tolerance = 1e-4 if dtype == "fp32" else 0.05
    torch.testing.assert_close(logits.float(), expected, rtol=tolerance, atol=tolerance)
    assert float((expected - plain).abs().max()) > 5 * tolerance


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_opens_a_snapshot_on_the_base_model_and_gives_the_engines_logits(saved, family):
    directory, dtype, _, logits, snapshot = saved[family]
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype])
    model = PeftModel.from_pretrained(base, snapshot, autocast_adapter_dtype=False).eval()
    assert model.peft_config["default"].base_model_name_or_path == str(directory)
    with torch.no_grad():
        torch.testing.assert_close(model(**whole_batch().inputs).logits, logits)


# Which modules get one.


def test_the_models_own_parameters_are_frozen_and_keep_their_names():
    model = tiny_model("opt")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    adapter = make_adapter(peft_config("lora"))
    adapter.attach(model, find_blocks(model))
    names = {adapter.own_name(name): parameter for name, parameter in model.named_parameters()}
    assert {name: id(names[name]) for name in before} == before
    assert {name for name, p in names.items() if p.requires_grad} == names.keys() - before.keys()
    assert all(find_blocks(model).block_of(name) is not None for name in names.keys() - before.keys())


def test_a_whole_name_takes_one_module_and_the_end_of_a_name_all_of_them():
    model = tiny_model("llama")
    assert len(matching_modules(model, ["q_proj"])) == 3
    assert matching_modules(model, ["model.layers.1.mlp.up_proj"]) == [model.model.layers[1].mlp.up_proj]


@pytest.mark.parametrize(
    "targets", ["nowhere", "q_proj,nowhere", "self_attn", "proj", "norm", ",", "embed_tokens"]
)
def test_targets_that_match_nothing_or_no_linear_module_are_refused_with_those_there_are(targets):
    model = tiny_model("llama")
    adapter = make_adapter(PeftConfig(kind="lora", lora_targets=targets))
    with pytest.raises(UserError, match="some of down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj"):
        adapter.attach(model, find_blocks(model))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_without_linear_modules_is_refused():
    with pytest.raises(UserError, match="use another model"):
        matching_modules(nn.LayerNorm(3), ["q_proj"])
