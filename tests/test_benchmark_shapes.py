from __future__ import annotations

import pytest
import torch

from lezo_ds.errors import UserError
from lezo_ds.sharding.checkpoint_files import build_on_meta
from lezo_ds.tools.benchmark.shapes import SHAPES, TASKS, Workload, opt_config, plain_model, random_weights

CPU = torch.device("cpu")

# Zhang et al. 2022, table 1, by the published checkpoints' configs.
NUM_PARAMETERS = {
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
}


@pytest.mark.parametrize("shape", NUM_PARAMETERS)
def test_a_shape_has_as_many_weights_as_the_published_model(shape):
    model = build_on_meta(opt_config(shape), torch.float16)
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[shape]
    assert len(model.model.decoder.layers) == SHAPES[shape].num_blocks


def test_a_shape_can_be_scaled_down():
    assert len(build_on_meta(opt_config("opt-125m", 3), torch.float16).model.decoder.layers) == 3


def test_random_weights_do_not_depend_on_how_they_are_cut():
    whole = random_weights("fc.weight", 7, 0, 50, CPU)
    assert torch.equal(random_weights("fc.weight", 7, 13, 20, CPU), whole[13:33])
    assert whole.std() < 0.05
    assert random_weights("a.layer_norm.weight", 7, 0, 50, CPU).mean() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("task", TASKS)
def test_our_layout_and_the_published_one_give_the_same_loss(task):
    workload = Workload(
        2, 24, TASKS[task].num_candidates, TASKS[task].candidate_tokens - TASKS[task].candidate_tokens // 24
    )
    model = plain_model(opt_config("opt-tiny", 1), "fp32", CPU)

    @torch.no_grad()
    def loss(batch, vocabulary):
        logits = model(**batch.inputs).logits[batch.selection.rows, batch.selection.positions]
        wanted = logits if vocabulary is None else logits[:, vocabulary]
        return float(workload.loss(wanted, batch).sum() / batch.weight)

    published, (ours,) = workload.published_batch(0, 1), workload.micro_batches(1)
    assert loss(ours, ours.selection.vocabulary) == pytest.approx(loss(published, None), rel=1e-5)


def test_no_layout_pays_for_padding():
    for workload in TASKS.values():
        for batch in (workload.published_batch(0, 1), *workload.micro_batches(1)):
            assert batch.inputs["input_ids"].shape[1] <= workload.length
            assert (batch.inputs["input_ids"] == 1).sum() <= 7 * len(batch.inputs["input_ids"])


def test_micro_batches_and_ranks_share_the_same_examples():
    workload = Workload(4, 16)
    whole = workload.micro_batches(1)[0].inputs["input_ids"]
    assert torch.equal(torch.cat([b.inputs["input_ids"] for b in workload.micro_batches(2)]), whole)
    parts = [workload.published_batch(rank, 2).inputs["input_ids"] for rank in range(2)]
    assert torch.equal(torch.cat(parts), workload.published_batch(0, 1).inputs["input_ids"])


@pytest.mark.parametrize("length", [1, 2049])
def test_a_length_that_does_not_fit_is_refused(length):
    with pytest.raises(UserError, match="--length does not fit"):
        Workload(1, length)


def test_a_batch_that_does_not_split_is_refused():
    with pytest.raises(UserError, match="does not split into equal parts"):
        Workload(4, 16).micro_batches(3)
