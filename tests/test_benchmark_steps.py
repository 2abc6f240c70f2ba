from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

from lezo_ds import distributed
from lezo_ds.tools.benchmark.results import ModelSettings, Settings
from lezo_ds.tools.benchmark.shapes import Workload
from lezo_ds.tools.benchmark.stages import STAGES, StageClock
from lezo_ds.tools.benchmark.steps import Models, fill_with_random_weights, measure_steps
from lezo_ds.tools.benchmark.variants import VariantName, ours_config

pytestmark = pytest.mark.distributed

NAMES = (
    "mezo_reference:0.5",
    "mezo_fused",
    "naive_zero3",
    "ours:0",
    "ours:0.5",
    "ours:0.5:two_pass",
    "ours:0.5:dual:2",
)
TINY = ModelSettings("opt-tiny", num_blocks=2)


def parsed(names):
    return [VariantName.parse(name) for name in names]


def settings(**changes):
    return Settings(**({"model": TINY, "workload": Workload(4, 8), "rounds": 2} | changes))


def _measure(entries, names, replay_steps):
    return list(measure_steps(entries, parsed(names), replay_steps))


@pytest.fixture(scope="module", params=[1, 2])
def cells(request):
    """Two lengths, as rank 0 measured them, and the number of ranks."""
    entries = [settings(), settings(workload=Workload(4, 16, num_candidates=1, candidate_tokens=3))]
    return run_ranks(_measure, request.param, entries, NAMES, 2)[0], request.param


def timings_of(cells, name):
    return [timing for cell in cells for timing in cell.timings if timing.name == name]


def test_every_variant_is_timed_on_every_workload(cells):
    found, num_ranks = cells
    assert [cell.num_ranks for cell in found] == [num_ranks, num_ranks]
    for cell in found:
        assert [timing.name for timing in cell.timings] == list(NAMES)
        assert all(len(timing.elapsed) == 2 and timing.seconds > 0 for timing in cell.timings)


def test_the_shares_of_the_stages_add_up_to_the_whole_step(cells):
    for cell in cells[0]:
        for timing in cell.timings:
            assert set(timing.stages) == set(STAGES)
            assert sum(timing.stages.values()) == pytest.approx(1)
            assert all(timing.stages[name] > 0 for name in ("forward", "perturb", "update"))
            assert (timing.stages["gather"] > 0) == (not timing.name.startswith("mezo"))


def test_our_step_gathers_the_model_once_and_the_naive_one_twice(cells):
    found, num_ranks = cells
    if num_ranks == 1:
        pytest.skip("one rank gathers nothing")
    model_bytes = 4 * found[0].num_parameters
    for timing in timings_of(found, "ours:0.5"):
        assert timing.gathered_bytes / model_bytes == pytest.approx(1, abs=0.01)
    for timing in timings_of(found, "naive_zero3"):
        assert timing.gathered_bytes / model_bytes == pytest.approx(2, abs=0.02)
    for timing in timings_of(found, "mezo_reference:0.5"):
        assert timing.gathered_bytes == 0


def test_replicas_gather_nothing():
    replicas = settings(model=ModelSettings("opt-tiny", num_blocks=2, partition_size=1))
    (cell,) = run_ranks(_measure, 2, [replicas], ["ours:0.5"], 0)[0]
    assert cell.timings[0].gathered_bytes == 0
    assert cell.timings[0].weight_bytes == 4 * cell.num_parameters


def test_all_else_a_step_sends_is_a_few_scalars(cells):
    for cell in cells[0]:
        assert all(0 < timing.other_bytes < 400 for timing in cell.timings)


def test_a_rank_holds_its_share_of_the_model_or_a_plain_one(cells):
    found, num_ranks = cells
    model_bytes = 4 * found[0].num_parameters
    assert {timing.weight_bytes for timing in timings_of(found, "mezo_fused")} == {model_bytes}
    for name in ("naive_zero3", "ours:0.5"):
        for timing in timings_of(found, name):
            assert timing.weight_bytes == pytest.approx(model_bytes / num_ranks, rel=0.01)


def test_every_variant_of_ours_is_replayed(cells):
    for cell in cells[0]:
        assert list(cell.replays) == [name for name in NAMES if name.startswith("ours")]
        assert all(replay.num_steps == 2 and replay.replay.seconds > 0 for replay in cell.replays.values())


def _digests_of_a_step(name):
    """Return the digest after a step of the variant, and after the same step by the engine itself."""
    distributed.init_distributed()
    (parsed_name,) = parsed([name])
    models = Models(TINY, [parsed_name])
    engine, workload = models.engine, Workload(4, 8)
    before = engine.weights.digest()
    models.variant(parsed_name, settings(), StageClock(engine.device)).step()
    by_variant = engine.weights.digest()
    fill_with_random_weights(engine)
    assert engine.weights.digest() == before != by_variant
    batch = workload.micro_batches(distributed.world_size())
    engine.with_config(ours_config(parsed_name)).train_batch(batch, workload.loss)
    return by_variant, engine.weights.digest()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_our_variant_is_the_step_of_the_engine(num_ranks):
    for by_variant, by_engine in run_ranks(_digests_of_a_step, num_ranks, "ours:0.5"):
        assert by_variant == by_engine


def _both_models(dtype):
    distributed.init_distributed()
    models = Models(ModelSettings("opt-tiny", 2, dtype), parsed(["mezo_reference", "ours"]))
    plain = {name: parameter.detach() for name, parameter in models.plain.named_parameters()}
    return plain, {parameter.name: parameter.gather() for parameter in models.engine.weights.parameters}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_plain_and_the_sharded_model_begin_with_the_same_weights(dtype):
    for plain, sharded in run_ranks(_both_models, 2, dtype):
        assert plain.keys() == sharded.keys()
        for name, values in sharded.items():
            # Low bits apart, a sharded 16-bit weight may be rounded another way where it lies half way.
            torch.testing.assert_close(values, plain[name], rtol=2**-7, atol=0)


def _bytes_held_after_freeing():
    distributed.init_distributed()
    models = Models(TINY, parsed(["ours"]))
    shards = [parameter.parameter.ds_tensor for parameter in models.engine.weights.parameters]
    before = sum(shard.untyped_storage().nbytes() for shard in shards)
    models.free()
    return before, sum(shard.untyped_storage().nbytes() for shard in shards)


def test_freed_models_hold_no_weights():
    ((before, after),) = run_ranks(_bytes_held_after_freeing, 1)
    assert before > 0
    assert after == 0
