"""Before its first step, a run compares a training pass with the model alone, and may refuse."""

from dataclasses import replace

import pytest
import torch
from assets import write_records
from family_models import small_config
from ranks import run_ranks
from tiny_runs import write_model
from tiny_tasks import task_config, write_tasks, write_writer
from transformers import AutoTokenizer

from lezo_ds import distributed
from lezo_ds.data.rewards import reward
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.runs.cross_check import cross_check, read_twice
from lezo_ds.runs.trainer import make_engine

LOW_RANK = {"zo__noise_rank": 1, "zo__examples_per_direction": 1}
LOW_RANK |= {"zo__estimator": "grzo", "zo__directions": 2}


@reward
def length_of(answers, records):
    return [len(answer) / 10 for answer in answers]


ANSWERS = {
    "train__objective": "test_cross_check:length_of",
    "generation__max_new_tokens": 12,
    "generation__temperature": 1.0,
}
ONE_TOKEN = {
    "data__task": "custom",
    "data__prompt": "{sentence}\n",
    "data__label_field": "label",
    "data__labels": {"0": "x", "1": "y"},
}
RUNS = {
    "labels": ("sst2", {}),
    "labels of one token": ("sst2", ONE_TOKEN),
    "choices": ("copa", {"zo__sparsity": 0}),
    "texts": ("squad", {}),
    "groups of directions of rank 1": ("sst2", LOW_RANK),
    "an adapter on a base in 4 bits": ("sst2", {"peft__kind": "lora", "model__bits": 4}),
    "groups of directions of an adapter": ("sst2", {"peft__kind": "lora", **LOW_RANK}),
    "drawn answers": ("squad", ANSWERS),
    "drawn answers at rank 1": ("squad", {**ANSWERS, **LOW_RANK}),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    write_writer(root / "writer", "llama", seed=10)
    write_tasks(root / "data")
    sentences = ["Eve slept" * (1 + 9 * (number % 2)) for number in range(24)]
    for split in ("train", "validation"):
        records = [{"sentence": text, "label": len(text) % 2} for text in sentences]
        write_records(root / "uneven" / "sst2" / f"{split}.jsonl", records)
    return root


def inputs_of(assets, run, model="writer", data="data", **more):
    task, changes = RUNS[run]
    sizes = {"train__batch_size": 8, "train__micro_batch_size": 4}
    config = task_config(assets / model, assets / data, task, **{**sizes, **changes, **more})
    return make_engine(config), load_task_data(config), config


def rows_of(data, config):
    return data.step_rows(config, 0)[: config.train.micro_batch_size]


def check(engine, data, config):
    cross_check(engine, data, config, data.step_rows(config, 0))


@pytest.mark.parametrize("run", sorted(RUNS))
def test_a_training_pass_scores_records_as_the_model_alone(assets, run):
    engine, data, config = inputs_of(assets, run)
    readings = read_twice(engine, data, rows_of(data, config))
    assert len(readings) == 2
    assert max(reading.difference for reading in readings) < 1e-5
    assert all(reading.alone.abs().max() > 0.1 for reading in readings)  # something is compared
    check(engine, data, config)


def differences(assets, changes):
    distributed.init_distributed()
    found = []
    for run in ("choices", "drawn answers"):
        engine, data, config = inputs_of(assets, run, **changes)
        readings = read_twice(engine, data, rows_of(data, config))
        found.append([reading.difference for reading in readings])
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("changes", [{}, {"tensor_parallel": 2, "deepspeed": None}])
def test_ranks_that_share_the_weights_compare_the_same_records(assets, changes):
    first, second = run_ranks(differences, 2, assets, changes)
    assert first == second
    assert all(len(of_run) == 2 and max(of_run) < 1e-5 for of_run in first)


@pytest.mark.parametrize("run", ["labels of one token", "labels"])
def test_a_model_whose_records_reach_each_other_in_a_row_is_refused(assets, run):
    # Linear attention reads every token before it in the row, whatever the mask says.
    tokenizer = AutoTokenizer.from_pretrained(assets / "writer")
    model = small_config("qwen3_5_text")
    model.vocab_size = len(tokenizer)
    tokenizer.save_pretrained(write_model(model, assets / "linear" / run))
    changes = {"model": f"linear/{run}", "data": "uneven", "train__micro_batch_size": 8}
    engine, data, config = inputs_of(assets, run, **changes)
    assert not data.packed
    check(engine, data, config)
    with pytest.raises(UserError, match=r"is more than rounding in fp32 explains; fix: set"):
        check(engine, replace(data, packed=True), config)


@pytest.mark.parametrize("run", ["labels", "drawn answers"])
def test_a_pass_that_is_not_that_of_the_model_is_refused(assets, run):
    engine, data, config = inputs_of(assets, run)
    layer = engine.module.model.layers[1].mlp.down_proj
    own_forward = layer.forward

    def break_passes(broken):
        """Let passes at probes run the layer in another way than the model alone."""
        state = engine._perturbed._state
        layer.forward = lambda hidden: (broken if state.current.probes else own_forward)(hidden)

    for broken, message in (
        (lambda hidden: -own_forward(hidden), r"record \d+ has a mean log-probability of"),
        (lambda hidden: own_forward(hidden) * float("nan"), "is more than rounding"),
        (lambda hidden: own_forward(hidden[:, :, 1:]), "does not run in a training pass: Runtime"),
    ):
        break_passes(broken)
        with pytest.raises(UserError, match=message):
            check(engine, data, config)
    engine.sharded.ds_config["tensor_parallel"] = {"autotp_size": 2}
    with pytest.raises(UserError, match="; fix: remove tensor_parallel"):
        check(engine, data, config)
    del engine.sharded.ds_config["tensor_parallel"]
    layer.forward = lambda hidden: own_forward(hidden) * float("nan")
    with pytest.raises(UserError, match=r"record \d+ values that are not finite in fp32; fix: "):
        check(engine, data, config)
    layer.forward = own_forward
    check(engine, data, config)


def test_a_row_that_meets_the_weights_of_another_probe_is_refused(assets):
    engine, data, config = inputs_of(assets, "labels")

    def exchange(_, __, hidden):
        """Exchange the first rows of the two copies of a pass."""
        order = torch.arange(len(hidden))
        order[0] = second = len(hidden) // 2
        order[second] = 0
        return hidden[order]

    check(engine, data, config)
    engine.module.model.layers[1].register_forward_hook(exchange)
    with pytest.raises(UserError, match=r"record \d+ has a mean log-probability of"):
        check(engine, data, config)
