"""launch/benchmark.py: each variant is measured, and the reference is MeZO's algorithm."""

import copy

import pandas as pd
import pytest
import torch
from assets import write_recipe
from benchmark import measure, recipe_inputs
from commands import assert_one_error, run_forked, run_forked_well
from mezo_reference import MezoReference
from ranks import run_ranks
from tiny_runs import TINY_OPT, make_batch
from transformers import AutoModelForCausalLM

from lezo_ds import distributed
from lezo_ds.config import ZoConfig, load_config
from lezo_ds.data.objectives import classification_loss

pytestmark = pytest.mark.distributed


def test_the_reference_is_mezos_algorithm():
    distributed.init_distributed()
    model = AutoModelForCausalLM.from_config(TINY_OPT).eval().requires_grad_(False)
    (batch,) = make_batch(0, num_micro_batches=1)
    before = copy.deepcopy(model.state_dict())
    zo = ZoConfig(learning_rate=1e-2, perturbation_scale=1e-3, sparsity=0.0)
    steps = MezoReference(zo, model)
    gradient = steps.step(batch, classification_loss)
    after = {name: values.clone() for name, values in model.named_parameters()}
    generator = torch.Generator().manual_seed(steps._step_seed)
    noise = {n: torch.empty_like(v).normal_(generator=generator) for n, v in after.items()}

    def loss(multiple):
        for name, values in model.named_parameters():
            values.copy_(before[name] + multiple * noise[name])
        rows = model(**batch.inputs).logits[batch.selection.rows, batch.selection.positions]
        return classification_loss(rows[:, batch.selection.vocabulary], batch).mean().item()

    assert gradient == pytest.approx((loss(1e-3) - loss(-1e-3)) / 2e-3, rel=0.02)
    for name, values in after.items():
        expected = before[name] - 1e-2 * gradient * noise[name]
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-4)


def measured_rows(recipe):
    distributed.init_distributed()
    inputs = recipe_inputs(load_config(recipe, ["run_dir=none", "train.micro_batch_size=4"]))
    variants = ["mezo_reference", "ours:0.5", "recipe", "tensor_parallel:0.5"]
    return measure(inputs, variants, rounds=1)


def test_every_variant_is_measured_on_the_batches_of_a_recipe(tmp_path):
    rows, _ = run_ranks(measured_rows, 2, write_recipe(tmp_path))
    assert (rows["seconds"] > 0).all()
    published, ours, recipe, _ = rows.to_dict("records")
    assert published["ratio"] == 1.0
    assert published["tokens"] > ours["tokens"] == recipe["tokens"]


def test_two_ranks_measure_random_inputs_and_write_a_table(tmp_path):
    words = ["--shape", "opt-tiny", "--rounds", "1", "train.batch_size=4", "ours:0.75"]
    words += ["train.micro_batch_size=2", "tensor_parallel", "--out", tmp_path / "rows.csv"]
    finished = run_forked_well(words, program="benchmark.py", num_ranks=2)
    assert finished.out.startswith("opt-tiny, 32 tokens an example, 2 ranks\n")
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert list(rows["variant"]) == ["ours:0.75", "tensor_parallel"]
    assert list(rows["tokens"]) == [4 * 32, 4 * 32]


def test_the_benchmark_refuses_what_it_cannot_measure_in_one_line():
    refused = run_forked(["ours:0", "recipe"], program="benchmark.py")
    assert_one_error(refused, 2, "need --config")
