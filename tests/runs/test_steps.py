from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch
from deepspeed.comm.comm import comms_logger
from ranks import run_ranks
from reference import ReferenceRun
from tiny_runs import (
    NUM_BLOCKS,
    SEED,
    VOCABULARY,
    full_weights,
    make_batch,
    start_engine,
    train,
    zo_config,
)

from lezo_ds.data.objectives import classification_loss
from lezo_ds.engine import LezoEngine, lezo_engine
from lezo_ds.errors import DesyncError, DivergenceError, UserError
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.journal import Header, Journal, read_journal
from lezo_ds.noise import UpdatePrecision
from lezo_ds.step import PlanFormat, scalar_bytes
from lezo_ds.zo.keys import step_key
from lezo_ds.zo.records import StepRecord

pytestmark = pytest.mark.distributed

NUM_STEPS = 12
MANY_STEPS = 50
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCKS = "model.decoder.layers"


@dataclass(frozen=True)
class Run:
    """What a training run left: its records, the digest of its weights, and the weights themselves."""

    records: list[StepRecord]
    digest: str
    weights: dict[str, torch.Tensor]


def finish(engine: LezoEngine, num_steps: int = NUM_STEPS) -> Run:
    return Run(train(engine, num_steps), engine.weights.digest(), full_weights(engine))


def attach_new_journal(engine: LezoEngine, path) -> None:
    if engine.global_rank == 0:
        facts = {"model_fingerprint": "f", "parameter_table_hash": "t", "config": {}, "libraries": {}}
        engine.attach_journal(Journal.create(path, Header(noise_version=1, **facts)))


def same_bits(left, right) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left
    )


def reference_run(directory, dtype):
    return ReferenceRun(
        directory, DTYPES[dtype], zo_config().learning_rate, zo_config().perturbation_scale, BLOCKS
    )


# Equality with the plain reference, on any number of ranks.


def _run_forwards(directory, dtype, num_ranks, forwards, num_steps):
    return {
        f: finish(start_engine(directory, dtype, num_ranks, probes_per_pass=f), num_steps) for f in forwards
    }


@pytest.fixture(
    scope="module",
    params=[
        *((dtype, NUM_STEPS) for dtype in DTYPES),
        *(pytest.param((dtype, MANY_STEPS), marks=pytest.mark.long) for dtype in DTYPES),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def runs(request, opt_directory):
    """dtype, the same steps as every rank of 1, 2 and 4 did them, and with two passes on 2 ranks."""
    dtype, num_steps = request.param
    dual, two_pass = [], []
    for num_ranks, forwards in ((1, [2]), (2, [2, 1]), (4, [2])):
        settings = (opt_directory, dtype, num_ranks, forwards, num_steps)
        results = run_ranks(_run_forwards, num_ranks, *settings)
        dual += [result[2] for result in results]
        two_pass += [result[1] for result in results if 1 in result]
    return dtype, dual, two_pass[0]


def test_one_two_and_four_ranks_give_the_same_records_and_weights_bit_for_bit(runs):
    _, runs, _ = runs
    assert len(runs) == 7
    for run in runs[1:]:
        assert run.records == runs[0].records
        assert run.digest == runs[0].digest
        assert same_bits(run.weights, runs[0].weights)


def test_two_passes_equal_the_plain_reference_bit_for_bit(runs, opt_directory):
    dtype, _, run = runs
    reference = reference_run(opt_directory, dtype)
    for step, record in enumerate(run.records):
        expected = reference.step(make_batch(step), record.key, record.dropped_layers)
        assert (record.loss, *record.projected_grads) == expected, step
    stored = {name: tensor for name, tensor in run.weights.items() if not name.endswith(".low")}
    assert same_bits(stored, reference.stored())


def test_the_dual_forward_equals_two_passes_over_a_whole_run(runs):
    dtype, (dual, *_), two_pass = runs
    # Dropped blocks run over the doubled batch: another shape of matrix product, so perhaps other last bits,
    # which the steps then amplify.
    tolerance = 1e-5 if dtype == "fp32" else 0.1
    for left, right in zip(dual.records, two_pass.records, strict=True):
        assert (left.key, left.dropped_layers) == (right.key, right.dropped_layers)
        assert left.loss == pytest.approx(right.loss, rel=tolerance)


def _mezo(directory):
    changes = {"sparsity": 0.0}
    return {f: finish(start_engine(directory, num_ranks=2, probes_per_pass=f, **changes)) for f in (2, 1)}


def test_sparsity_zero_is_plain_mezo(opt_directory):
    found = run_ranks(_mezo, 2, opt_directory)[0]
    reference = reference_run(opt_directory, "fp32")
    for step in range(NUM_STEPS):
        loss, gradient = reference.step(make_batch(step), step_key(SEED, step))
        exact, close = found[1].records[step], found[2].records[step]
        assert exact.dropped_layers == close.dropped_layers == ()
        assert (exact.loss, exact.projected_grads) == (loss, (gradient,))
        assert close.loss == pytest.approx(loss, rel=1e-5)
    assert same_bits(found[1].weights, reference.stored())
    for name, expected in reference.stored().items():
        torch.testing.assert_close(found[2].weights[name], expected, rtol=1e-4, atol=1e-5)


# What a step changes, and what it must not.


def _watch_steps(directory, dtype, num_ranks):
    """Return (record, full weights before, after, whether this rank's own shards changed) of some steps."""
    engine = start_engine(directory, dtype, num_ranks)
    watched = []
    for _ in range(4):
        before, mine = (
            full_weights(engine),
            [p.parameter.ds_tensor.clone() for p in engine.weights.parameters],
        )
        (record,) = train(engine, 1)
        changed = {
            p.name: not torch.equal(p.parameter.ds_tensor[: p.count], old[: p.count])
            for p, old in zip(engine.weights.parameters, mine, strict=True)
        }
        watched.append((record, before, full_weights(engine), changed))
    return watched


@pytest.mark.parametrize(("dtype", "num_ranks"), [("fp32", 1), ("fp32", 2), ("bf16", 2)])
def test_dropped_blocks_keep_every_bit_and_all_else_changes(opt_directory, dtype, num_ranks):
    dropped_names = set()
    for watched in run_ranks(_watch_steps, num_ranks, opt_directory, dtype, num_ranks):
        for record, before, after, changed in watched:
            dropped = tuple(f"{BLOCKS}.{block}." for block in record.dropped_layers)
            assert len(dropped) == 2
            for name, value in before.items():
                if name.startswith(dropped):
                    assert torch.equal(value, after[name]), name
                elif dtype == "fp32" or name.endswith(".low"):
                    assert not torch.equal(value, after[name]), name
            for name, has_changed in changed.items():
                if name.startswith(dropped):
                    dropped_names.add(name)
                    assert not has_changed, name
                elif dtype == "fp32":
                    # Under ZeRO-3 a careless loop changes gathered copies, which are thrown away.
                    assert has_changed, name
    assert dropped_names


def _steps_that_change_nothing(directory, dtype, num_ranks):
    digests = []
    for forward in (2, 1):
        engine = start_engine(directory, dtype, num_ranks, probes_per_pass=forward, learning_rate=0.0)
        digests += [engine.weights.digest()]
        records = train(engine, 5)
        digests += [engine.weights.digest()]
    return digests, records


@pytest.mark.parametrize(
    ("dtype", "num_ranks"),
    [("fp32", 2), ("bf16", 2), ("bf16", 1)],  # on one rank the gathered tensor IS the shard
)
def test_learning_rate_zero_changes_nothing_bit_for_bit(opt_directory, dtype, num_ranks):
    for digests, records in run_ranks(_steps_that_change_nothing, num_ranks, opt_directory, dtype, num_ranks):
        assert len(set(digests)) == 1
        assert all(record.applied and record.projected_grads[0] != 0 for record in records)


def _spoiled(engine, value, rank):
    """Return a loss function that gives `value` on one rank."""

    def loss(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        losses = classification_loss(logits, batch)
        return losses * value if engine.global_rank == rank else losses

    return loss


def _syncs_before_updates(directory, journal_path):
    """Return, for a step with its shards in memory and one with shards on a disk, what comes first."""
    engine = start_engine(directory)
    attach_new_journal(engine, journal_path)
    found = []

    def noted(name, action):
        def both(*arguments):
            result = action(*arguments)
            found.append(name)
            return result

        return both

    engine._apply = noted("update", engine._apply)
    engine._journal.sync = noted("sync", engine._journal.sync)
    train(engine, 1)
    in_memory, found[:] = found[:], []
    offload = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
    engine._sharded = replace(engine._sharded, ds_config=offload)
    train(engine, 1)
    return in_memory, found


def test_shards_on_a_disk_are_updated_only_after_the_sync_of_their_line(opt_directory, tmp_path):
    ((in_memory, on_disk),) = run_ranks(_syncs_before_updates, 1, opt_directory, tmp_path / "journal.jsonl")
    assert in_memory == ["sync", "update"]  # of the line before
    assert on_disk == ["sync", "sync", "update"]


def _skip_steps(directory, journal_path):
    lezo_engine.MAX_SKIPPED_STEPS = 4
    engine = start_engine(directory, num_ranks=2)
    attach_new_journal(engine, journal_path)
    train(engine, 1)
    before = engine.weights.digest()
    records = [
        engine.train_batch(make_batch(0), _spoiled(engine, value, rank))
        for value, rank in ((math.nan, 1), (math.inf, 0), (-math.inf, 1))
    ]
    after = engine.weights.digest()
    records += train(engine, 1)
    count_starts_again = [engine.train_batch(make_batch(0), _spoiled(engine, math.nan, 1)) for _ in range(3)]
    last = engine.weights.digest()
    try:
        engine.train_batch(make_batch(0), _spoiled(engine, math.nan, 1))
        error = None
    except DivergenceError as raised:
        error = (str(raised), raised.exit_code)
    return before, after, records + count_starts_again, last == engine.weights.digest(), error


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all_and_too_many_end_the_run(
    opt_directory, tmp_path
):
    journal = tmp_path / "journal.jsonl"
    results = run_ranks(_skip_steps, 2, opt_directory, journal)
    assert results[0] == results[1]
    before, after, records, unchanged, error = results[0]
    assert before == after
    assert unchanged
    assert [record.applied for record in records] == [False] * 3 + [True] + [False] * 3
    assert all(
        record.loss is None and record.projected_grads == () for record in records if not record.applied
    )
    assert error is not None and error[1] == 4
    assert "not finite in 4 steps in a row" in error[0]
    _, journaled = read_journal(journal)
    assert journaled[1:-1] == records
    assert [record.step for record in journaled] == list(range(9))
    assert not journaled[-1].applied


# Agreement and refusal.


def _share_three_micro_batches(directory):
    engine = start_engine(directory, num_ranks=2)
    before = engine.weights.digest()
    try:
        engine.train_batch(make_batch(0, num_micro_batches=3), classification_loss)
    except UserError as error:
        return str(error), engine.global_steps, before == engine.weights.digest()


def test_micro_batches_that_the_ranks_do_not_divide_are_refused(opt_directory):
    for message, steps, unchanged in run_ranks(_share_three_micro_batches, 2, opt_directory):
        assert "got: 3 forward passes on 2 ranks" in message
        assert steps == 0
        assert unchanged


def _train_with_other_settings(directory, other, num_micro_batches):
    """Return the error of a step for which rank 1 has other settings or another number of micro-batches."""
    is_other = os.environ["RANK"] == "1"
    engine = start_engine(directory, num_ranks=2, **(other if is_other else {}))
    try:
        train(engine, 1, num_micro_batches if is_other else 2)
    except DesyncError as error:
        return str(error), engine.global_steps


@pytest.mark.parametrize(
    ("other", "num_micro_batches", "expected"),
    [
        ({"directions": 2}, 2, "rank 1 has another zo.directions: 2, but most ranks have 1;"),
        ({"estimator": "one-sided", "directions": 3}, 2, "rank 1 has another zo.estimator: 'one-sided', but"),
        ({}, 3, "rank 1 has another number of micro-batches: 3, but most ranks have 2;"),
    ],
)
def test_a_rank_with_other_settings_is_named_before_the_first_step(
    opt_directory, other, num_micro_batches, expected
):
    """The messages of such ranks have other lengths, so that the facts of a step would not reach anyone."""
    for message, steps in run_ranks(_train_with_other_settings, 2, opt_directory, other, num_micro_batches):
        assert expected in message
        assert "last good step: none" in message
        assert steps == 0


# Traps of ZeRO-3.


def _forward_thrice(directory, num_ranks):
    engine = start_engine(directory, num_ranks=num_ranks, learning_rate=0.0)
    (batch,) = make_batch(0, num_micro_batches=1)
    batch = MicroBatch(batch.inputs, batch.weight)
    logits = [engine.forward(batch) for _ in range(3)]
    records = []
    for _ in range(3):
        records += train(engine.with_config(engine._config), 1)
    return logits, records


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_first_second_and_third_forward_are_equal(opt_directory, num_ranks):
    # Weights are gathered ahead from the second pass on, in the order of the first.
    for logits, records in run_ranks(_forward_thrice, num_ranks, opt_directory, num_ranks):
        assert logits[0].shape[-1] == VOCABULARY
        assert torch.equal(logits[0], logits[1]) and torch.equal(logits[1], logits[2])
        assert records[0] == records[1] == records[2]


def _tune_what_is_outside_the_blocks(directory, num_ranks):
    changes = {"sparsity": 1.0, "probes_per_pass": 1}
    return finish(start_engine(directory, num_ranks=num_ranks, **changes), 3)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tied_head_is_perturbed_and_updated_once(opt_directory, num_ranks):
    # It is visited twice in a forward pass, and kept gathered in between.
    run = run_ranks(_tune_what_is_outside_the_blocks, num_ranks, opt_directory, num_ranks)[0]
    assert not any(name.startswith("lm_head") for name in run.weights)
    reference = reference_run(opt_directory, "fp32")
    for step, record in enumerate(run.records):
        expected = reference.step(make_batch(step), record.key, range(NUM_BLOCKS))
        assert (record.loss, *record.projected_grads) == expected
    assert same_bits(run.weights, reference.stored())


def _leave_a_parameter_gathered(directory):
    engine = start_engine(directory, num_ranks=2)
    before, bias = engine.weights.digest(), engine.module.model.decoder.layers[0].fc1.bias
    engine.module.register_forward_hook(lambda *_: bias.all_gather())
    try:
        train(engine, 1)
    except RuntimeError as error:
        return str(error), before == engine.weights.digest()


def test_a_parameter_that_stays_gathered_is_noticed_before_any_update(opt_directory):
    # An update of its shards would leave the gathered copy stale.
    for message, unchanged in run_ranks(_leave_a_parameter_gathered, 2, opt_directory):
        assert message.endswith("still gathered after a forward pass: ['model.decoder.layers.0.fc1.bias']")
        assert unchanged


# Replay.

PRECISIONS = get_args(UpdatePrecision)
REPLAYED_STEPS = 40
MANY_REPLAYED_STEPS = 200


def _journaled_steps(engine, directory):
    return read_journal(directory / "journal.jsonl")[1] if engine.global_rank == 0 else ()


def _train_and_replay(model, dtype, precision, num_ranks, directory, num_steps):
    """Train with a journal and a snapshot in the middle; return digests (live, replayed) at some steps."""
    engine = start_engine(model, dtype, num_ranks, update_precision=precision)
    attach_new_journal(engine, directory / "journal.jsonl")
    live = {0: engine.weights.digest()}
    for step in (num_steps // 2, num_steps // 4 * 3, num_steps):
        train(engine, step - engine.global_steps, num_micro_batches=num_ranks)
        live[step] = engine.weights.digest()
        if step == num_steps // 2:
            engine.save_checkpoint(directory / "snapshots")
    return live, _replay(engine, directory, live)


def _replay(engine, directory, steps):
    """Return digests of the weights rebuilt from base and journal, and from snapshot and journal, by step."""
    records = _journaled_steps(engine, directory)
    found = []
    for root in (directory / "none", directory / "snapshots"):
        digests = {}
        for step in sorted(steps, reverse=True):  # each step back starts from base or snapshot again
            engine.load_checkpoint(root, records, step)
            assert engine.global_steps == step
            digests[step] = engine.weights.digest()
        found.append(digests)
    return found


def _replay_of_another(model, dtype, precision, num_ranks, directory, steps):
    engine = start_engine(model, dtype, num_ranks, update_precision=precision)
    return _replay(engine, directory, steps)


def _train_and_replay_another(model, dtype, precision, num_ranks, directory, num_steps, other, steps):
    own = _train_and_replay(model, dtype, precision, num_ranks, directory, num_steps)
    return *own, _replay_of_another(model, dtype, precision, num_ranks, other, steps)


@pytest.mark.parametrize(
    "num_steps", [REPLAYED_STEPS, pytest.param(MANY_REPLAYED_STEPS, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("dtype", "precision"), [("fp32", "nearest"), *(("bf16", precision) for precision in PRECISIONS)]
)
def test_the_replay_of_many_steps_equals_live_weights_bit_for_bit(
    opt_directory, tmp_path, dtype, precision, num_steps
):
    directories = {num_ranks: tmp_path / str(num_ranks) for num_ranks in (1, 2)}
    for directory in directories.values():
        directory.mkdir()
    settings = (opt_directory, dtype, precision)
    on_two = run_ranks(_train_and_replay, 2, *settings, 2, directories[2], num_steps)
    live_two = on_two[0][0]
    assert len(set(live_two.values())) == 4
    for live, replays in on_two:
        assert live == live_two
        assert replays == [live_two, live_two]
    ((live_one, own, other),) = run_ranks(
        _train_and_replay_another, 1, *settings, 1, directories[1], num_steps, directories[2], list(live_two)
    )
    assert own == [live_one, live_one]
    assert other == [live_two, live_two]
    if precision == "fp32_master":
        # Trained on one rank, replayed on four; base and snapshot, low bits included.
        for replays in run_ranks(_replay_of_another, 4, *settings, 4, directories[1], list(live_one)):
            assert replays == [live_one, live_one]


def _resume_after_skips(directory):
    lezo_engine.MAX_SKIPPED_STEPS = 3
    engine = start_engine(directory)
    records = [engine.train_batch(make_batch(0), _spoiled(engine, math.nan, 0)) for _ in range(2)]
    resumed = start_engine(directory)
    resumed.load_checkpoint(directory / "none", records)
    try:
        resumed.train_batch(make_batch(0), _spoiled(resumed, math.nan, 0))
    except DivergenceError:
        return True
    return False


def test_skipped_steps_in_a_row_are_counted_across_a_resumption(opt_directory):
    assert run_ranks(_resume_after_skips, 1, opt_directory) == [True]


def _ask_for_a_missing_step(directory):
    engine = start_engine(directory)
    try:
        engine.load_checkpoint(directory / "none", train(engine, 2), 3)
    except UserError as error:
        return str(error)


def test_a_step_that_the_journal_lacks_is_refused(opt_directory):
    (message,) = run_ranks(_ask_for_a_missing_step, 1, opt_directory)
    assert "expected: 0 to 2" in message


# Bytes between ranks, by DeepSpeed's own count.


def _count_bytes(directory, forward, num_micro_batches, directions):
    """Return {operation: (calls, bytes)} of two steps and of the ten after them, and the model's bytes.

    DeepSpeed's log holds the size of the tensor a rank puts in. For an all-gather that is its shard, padding
    included: the weights that are built have that size times the number of ranks.
    """
    changes = {
        "comms_logger": {"enabled": True, "prof_all": True, "verbose": False},
        # As for a large model: it fits in no bucket, and its head is far from its embedding.
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 1000,
            "stage3_prefetch_bucket_size": 5000,
            "memory_efficient_linear": False,
        },
    }
    engine = start_engine(
        directory, num_ranks=2, ds_changes=changes, probes_per_pass=forward, directions=directions
    )
    counts = []
    for num_steps in (2, 10):
        comms_logger.reset_data()
        train(engine, num_steps, num_micro_batches)
        counts.append(
            {
                operation: (
                    sum(entry[0] for entry in sizes.values()),
                    sum(s * e[0] for s, e in sizes.items()),
                )
                for operation, sizes in comms_logger.get_raw_data().items()
            }
        )
    model = sum(p.numel * p.parameter.element_size() for p in engine.weights.parameters)
    padding = sum(p.numel % 2 * p.parameter.element_size() for p in engine.weights.parameters)
    return counts, model, model + padding


@pytest.mark.parametrize(
    ("directions", "probes_per_pass", "passes", "num_micro_batches"),
    [(1, 2, 1, 2), (1, 1, 2, 4), (8, 16, 1, 2), (8, 4, 4, 2)],
)
def test_a_step_gathers_the_model_once_a_pass_and_sends_little_else(
    opt_directory, directions, probes_per_pass, passes, num_micro_batches
):
    own_passes = passes * num_micro_batches // 2
    for (first, ten), model, padded in run_ranks(
        _count_bytes, 2, opt_directory, probes_per_pass, num_micro_batches, directions
    ):
        gathers, shards = ten.pop("all_gather_into_tensor")
        gathered = shards * 2 / 10 / own_passes
        other = sum(size for _, size in ten.values()) / 10
        print(
            f"\n{directions} directions, {probes_per_pass} probes a pass, "
            f"{num_micro_batches} micro-batches on 2 ranks, {own_passes} passes of each: a pass "
            f"gathers {gathered:.0f} bytes = {gathered / model:.4f} x the model's {model}, in "
            f"{gathers / 10 / own_passes:.1f} calls; all else {other:.0f} bytes a step. "
            f"Ten steps: {ten}; the first two: {first}"
        )
        assert gathered == padded
        assert padded < 1.002 * model
        assert {name: calls for name, (calls, _) in ten.items()} == {"broadcast": 10, "all_reduce": 10}
        assert other == scalar_bytes(PlanFormat(NUM_BLOCKS, num_probes=2 * directions), num_micro_batches)
        assert other <= 232 + directions * (24 + 16 * num_micro_batches)
        _, first_shards = first.pop("all_gather_into_tensor")
        assert first_shards * 2 == 2 * own_passes * padded
        assert gathers == 10 * own_passes * (NUM_BLOCKS + 3)  # and both embeddings and the last norm
