"""Runs that are killed again and again, on changing numbers of ranks, end as if nothing had happened."""

from __future__ import annotations

import signal

import pytest
from commands import run_forked, run_forked_well, wait_until
from run_ends import STEP, end, reaches

LENGTH = [
    *("train.steps=30", "train.eval_every=10", "train.snapshot_every=6"),
    *("train.batch_size=4", "train.micro_batch_size=1"),  # one pass of each of four ranks
]
BF16 = ["model.dtype=bf16", "zo.learning_rate=1e-4"]
KINDS = {"fp32": [], "bf16": BF16, "bf16_stochastic": [*BF16, "zo.update_precision=stochastic"]}
MOMENTS = {
    "fp32": [
        (2, '"kind":"header"', 1),
        (2, STEP, 3),
        (1, STEP, 15),
        (2, STEP, 22),
        (1, '"split":"test"', 2),  # all is done except the results
    ],
    "bf16": [(2, STEP, 13), (1, '"split":"dev"', 2)],
    "bf16_stochastic": [(1, STEP, 2), (1, STEP, 27)],
}
"""When a run is killed, again and again: (number of ranks, text in the journal, how often)."""
LAST_RANKS = {"fp32": 4, "bf16": 1, "bf16_stochastic": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_again_and_again_ends_as_if_never_killed(kind, recipe, tmp_path):
    def arguments(run_dir):
        return ["--config", recipe, f"run_dir={run_dir}", *LENGTH, *KINDS[kind]]

    run_forked_well(arguments(tmp_path / "undisturbed"))
    run_dir = tmp_path / "killed"
    for num_ranks, text, count in MOMENTS[kind]:

        def kill(ranks, text=text, count=count):
            wait_until(lambda: reaches(run_dir, text, count), ranks[0])
            for rank in ranks:
                rank.kill()

        assert run_forked(arguments(run_dir), num_ranks=num_ranks, meanwhile=kill).code == -signal.SIGKILL
    run_forked_well(arguments(run_dir), num_ranks=LAST_RANKS[kind])
    assert end(run_dir) == end(tmp_path / "undisturbed")
