"""A sweep that is stopped goes on, and a run that fails is named while the others go on."""

from __future__ import annotations

import json
import signal
import sys
import time

import pandas as pd
import pytest
from assets import REPOSITORY, write_recipe
from commands import TIMEOUT_SECONDS, run, start


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_sweep_that_is_stopped_goes_on_and_a_run_that_fails_is_named(tmp_path):
    directory = tmp_path / "sweep"
    command = [
        sys.executable,
        REPOSITORY / "launch" / "sweep.py",
        "--config",
        write_recipe(tmp_path),
    ]
    command += ["--out", directory, "train.steps=150", "train.eval_every=150"]
    metrics = directory / "data.num_train=30" / "metrics.jsonl"
    with start([*command, "--grid", "data.num_train=30"]) as process:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (
            not (metrics.exists() and metrics.read_text().count("\n") > 5)
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 1
    assert "error: stopped by SIGTERM; the same command continues" in err
    assert json.loads((metrics.parent / "results.json").read_text())["finished"] is False
    finished = run([*command, "--grid", "data.num_train=3000,30"])
    assert finished.code == 1
    assert "error: 1 of 2 runs failed: data.num_train=3000 (exit code 2, see " in finished.err
    assert "data.num_train=30: output in " in finished.err
    assert "error: " in (directory / "data.num_train=3000.log").read_text()
    assert list(pd.read_csv(directory / "results.csv")["finished"]) == [False, True]
