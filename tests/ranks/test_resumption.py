"""A run comes back at any of its steps, on any number of ranks, whatever it trains and in any dtype."""

from __future__ import annotations

import pytest
import tiny_adapters
import tiny_runs
from ranks import run_ranks
from tiny_runs import train

pytestmark = pytest.mark.distributed

STEPS = 6
SAVED_AT = 2
POINTS = (0, 1, STEPS // 2, STEPS - 1, STEPS)
MORE_STEPS = 2  # that are done after each of them, as far as there are so many
KINDS, DTYPES = ("full", "blocks", "lora", "prefix"), ("fp32", "bf16", "fp16")
CASES = [(kind, dtype) for kind in KINDS for dtype in DTYPES]
FEW_CASES = list(zip(KINDS, (*DTYPES, "bf16"), strict=True))


def _engine(directory, kind, dtype, num_ranks):
    if kind in ("full", "blocks"):
        return tiny_runs.start_engine(directory, dtype, num_ranks, only_blocks=kind == "blocks")
    return tiny_adapters.start_engine(directory, tiny_adapters.peft_config(kind), dtype, num_ranks)


def _train(directory, root, num_ranks):
    """Return {case: (records, digests after 0, 1, ... steps)}; a snapshot of each lies below `root`."""
    found = {}
    for kind, dtype in CASES:
        engine = _engine(directory, kind, dtype, num_ranks)
        records, digests = [], [engine.weights.digest()]
        for step in range(1, STEPS + 1):
            records += train(engine, 1)
            digests.append(engine.weights.digest())
            if step == SAVED_AT:
                engine.save_checkpoint(root / f"{kind}-{dtype}")
        found[kind, dtype] = (records, digests)
    return found


def _resume(directory, root, num_ranks, undisturbed):
    """Return {(case, point): (the digest there, and some steps later; the records of these steps)}."""
    found = {}
    for (kind, dtype), (records, _) in undisturbed.items():
        engine = _engine(directory, kind, dtype, num_ranks)
        for point in reversed(POINTS):  # after the first, each means to go back
            engine.load_checkpoint(root / f"{kind}-{dtype}", records[:point])
            digest = engine.weights.digest()
            later = train(engine, min(MORE_STEPS, STEPS - point))
            found[kind, dtype, point] = (digest, engine.weights.digest(), later)
    return found


@pytest.fixture(scope="module")
def undisturbed(opt_directory, tmp_path_factory):
    """(The folder of snapshots, what `_train` returned), on two ranks."""
    root = tmp_path_factory.mktemp("snapshots")
    return root, run_ranks(_train, 2, opt_directory, root, 2)[0]


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [(1, CASES), (2, CASES), (4, FEW_CASES), pytest.param(4, CASES, marks=pytest.mark.long)],
)
def test_a_run_resumed_at_its_first_middle_and_last_steps_has_the_same_bits_and_goes_on_alike(
    num_ranks, cases, undisturbed, opt_directory
):
    root, all_runs = undisturbed
    runs = {case: all_runs[case] for case in cases}
    expected = {}
    for (kind, dtype), (records, digests) in runs.items():
        assert len(set(digests)) == STEPS + 1
        for point in POINTS:
            later = min(point + MORE_STEPS, STEPS)
            expected[kind, dtype, point] = (digests[point], digests[later], records[point:later])
    assert run_ranks(_resume, num_ranks, opt_directory, root, num_ranks, runs) == [expected] * num_ranks
