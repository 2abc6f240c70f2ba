"""Two processes that train in one directory: the second is refused, and the first is not harmed."""

from __future__ import annotations

import pytest
from commands import assert_one_error, run_forked, run_forked_well, wait_until
from run_ends import STEP, end, reaches

LENGTH = ["train.eval_every=20", "train.snapshot_every=0"]


@pytest.mark.parametrize("method", ["lezo", "adamw"])
def test_a_second_process_is_refused_and_the_first_finishes(method, recipe, tmp_path):
    def given(run_dir, num_steps):
        keys = [f"run_dir={run_dir}", f"train.steps={num_steps}", f"method={method}"]
        return ["--config", recipe, *keys, *LENGTH, "adamw.learning_rate=1e-3"]

    def start_another(ranks):
        wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), ranks[0])
        second = run_forked(given(tmp_path / "run", 20), num_ranks=2)
        fragments = ["is in use; got: ", f"process {ranks[0].pid} on ", "expected: one process"]
        assert_one_error(second, 2, *fragments)
        assert ranks[0].is_alive()
        (tmp_path / "run" / "STOP").touch()

    run_forked_well(given(tmp_path / "run", 1_000_000), meanwhile=start_another)
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_lock_ends_with_its_process(recipe, tmp_path):
    def given(run_dir):
        return ["--config", recipe, f"run_dir={run_dir}", "train.steps=20", *LENGTH]

    def kill(ranks):
        wait_until(lambda: reaches(tmp_path / "run", STEP, 4), ranks[0])
        ranks[0].kill()

    run_forked_well(given(tmp_path / "undisturbed"))
    run_forked(given(tmp_path / "run"), meanwhile=kill)
    assert (tmp_path / "run" / ".lock").exists()
    run_forked_well(given(tmp_path / "run"))
    assert end(tmp_path / "run") == end(tmp_path / "undisturbed")
    assert not (tmp_path / "run" / ".lock").exists()
