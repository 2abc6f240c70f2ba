from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from assets import REPOSITORY

from lezo_ds.errors import UserError
from lezo_ds.recipes.paper import PAPER_MODELS
from lezo_ds.sharding.checkpoint_files import build_on_meta
from lezo_ds.tasks import TASKS
from lezo_ds.tools import workloads
from lezo_ds.tools.benchmark import table
from lezo_ds.tools.benchmark.measure import time_columns
from lezo_ds.tools.benchmark.random_inputs import loss_function, plain_model, split_batch
from lezo_ds.tools.opt_shapes import SHAPES, opt_config
from lezo_ds.tools.workloads import WORKLOADS, Workload, typical_workload

ROW = {"measured": "step", "variant": "ours:0", "length": 32, "load": 0.5}


def test_rows_are_appended_to_a_table_and_read_back(tmp_path):
    path = tmp_path / "new" / "results.csv"
    table.append(path, table.to_frame([ROW, ROW | {"variant": "ours:0.75", "sparsity": 0.75}]))
    table.append(path, table.to_frame([]))
    table.append(path, table.to_frame([ROW | {"length": 64}]))
    found = table.read(path)
    assert list(found.columns) == list(table.COLUMNS)
    assert list(found.length) == [32, 32, 64]
    assert list(found.variant) == ["ours:0", "ours:0.75", "ours:0"]
    assert list(found.sparsity.isna()) == [True, False, True]
    assert found.length.dtype == "Int64"


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\x00"])
def test_another_file_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "results.csv"
    path.write_text(text)
    for action in (table.read, lambda path: table.append(path, table.to_frame([ROW]))):
        with pytest.raises(UserError, match="is not a table of benchmark results"):
            action(path)
    assert path.read_text() == text


def test_a_ratio_is_the_median_of_the_ratios_in_each_round():
    columns = time_columns([1.0, 2.0, 4.0], reference=[6.0, 8.0, 4.0])
    assert columns == {
        "rounds": 3,
        "seconds_min": 1.0,
        "seconds_median": 2.0,
        "seconds_max": 4.0,
        "ratio": 4.0,  # of 6, 4 and 1; the ratio of the medians is 3
    }


def test_the_committed_table_says_how_every_row_was_made():
    found = table.read(REPOSITORY / "launch" / "benchmark_results.csv")
    origin = ["date", "command", "machine", "torch", "deepspeed", "lezo_ds"]
    assert found[origin].notna().all(axis=None)
    steps = found[found.measured == "step"]
    references = steps[steps.variant == steps.reference]
    assert (references.ratio == 1).all()
    assert {"step", "replay", "noise"} <= set(found.measured) <= {"step", "replay", "noise", "until loss"}


@pytest.mark.parametrize("shape", PAPER_MODELS)
def test_a_shape_has_as_many_weights_as_the_published_model(shape):
    model = build_on_meta(opt_config(shape), torch.float16)
    assert sum(parameter.numel() for parameter in model.parameters()) == PAPER_MODELS[shape].num_parameters
    assert len(model.model.decoder.layers) == PAPER_MODELS[shape].num_blocks == SHAPES[shape].num_blocks


@pytest.mark.parametrize(("kind", "num_candidates"), [("classification", 2), ("generation", 1)])
def test_a_new_task_needs_no_typical_workload(kind, num_candidates):
    task = replace(TASKS["sst2"], name="mine", kind=kind)
    found = typical_workload(task)
    assert (found.length, found.num_candidates) == (workloads.DEFAULT_LENGTH, num_candidates)


@pytest.mark.parametrize("task", ["sst2", "cb", "squad"])
def test_our_layout_and_the_published_one_give_the_same_loss(task):
    workload = replace(WORKLOADS[task], length=24, batch_size=2)
    model = plain_model(opt_config("opt-tiny", 1), "fp32", torch.device("cpu"))

    @torch.no_grad()
    def loss(batch, vocabulary):
        logits = model(**batch.inputs).logits[batch.selection.rows, batch.selection.positions]
        wanted = logits if vocabulary is None else logits[:, vocabulary]
        return float(loss_function(workload)(wanted, batch).sum() / batch.weight)

    (published,), (ours,) = split_batch(workload, 1, published=True), split_batch(workload, 1)
    assert loss(ours, ours.selection.vocabulary) == pytest.approx(loss(published, None), rel=1e-5)


def test_parts_of_a_batch_are_the_whole_batch():
    workload = Workload(16, batch_size=4)
    for published in (False, True):
        (whole,) = split_batch(workload, 1, published=published)
        parts = split_batch(workload, 2, published=published)
        assert torch.equal(torch.cat([part.inputs["input_ids"] for part in parts]), whole.inputs["input_ids"])
    with pytest.raises(UserError, match="does not split into equal parts"):
        split_batch(workload, 3)
