"""The demonstration, as make demo runs it, with one seed and fewer steps; and its table."""

from __future__ import annotations

import json
import sys

import pytest
from assets import REPOSITORY
from commands import run, run_well

from lezo_ds.errors import UserError
from lezo_ds.journal import read_journal
from lezo_ds.tools.demo.command import demonstrate, report
from lezo_ds.zo.records import StepRecord

LEAST_GAIN = 0.2
SHORTER = ("train.steps=240", "train.eval_every=80")


def demo(directory, *overrides):
    arguments = ("--directory", str(directory), "--num-seeds", "1", *SHORTER, *overrides)
    return [sys.executable, str(REPOSITORY / "launch" / "demo.py"), *arguments]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished demonstration's directory, and what it printed."""
    directory = tmp_path_factory.mktemp("demo")
    return directory, run_well(demo(directory), timeout=840)


def results_of(seed, test):
    scores = {"zero_shot": 0.5, "test": test, "majority_class": 0.52, "best_step": 600, "seconds": 71.2}
    sent = {"gathered": 1_234_567, "other": 104}
    return {**scores, "bytes_per_step": sent, "run_dir": f"runs/demo/seed-{seed}"}


@pytest.mark.learning
@pytest.mark.distributed
def test_fine_tuning_beats_zero_shot_and_the_majority_class(finished):
    directory, command = finished
    results = json.loads((directory / "seed-0" / "results.json").read_text())
    assert results["world_size"] == 2
    assert results["test"] >= results["zero_shot"] + LEAST_GAIN
    assert results["test"] >= results["majority_class"] + LEAST_GAIN
    assert f"{results['zero_shot']:.3f} {results['test']:.3f}" in command.out
    assert str(directory / "seed-0") in command.out


@pytest.mark.learning
@pytest.mark.distributed
def test_the_demonstration_drops_six_of_eight_blocks_in_every_step(finished):
    _, records = read_journal(finished[0] / "seed-0" / "journal.jsonl")
    dropped = [record.dropped_layers for record in records if isinstance(record, StepRecord)]
    assert len(dropped) == 240
    assert {len(set(blocks)) for blocks in dropped} == {6}
    assert set().union(*dropped) == set(range(8))


@pytest.mark.learning
@pytest.mark.distributed
def test_the_same_command_again_changes_no_journal_and_prints_the_same_table(finished):
    directory, first = finished
    journal = (directory / "seed-0" / "journal.jsonl").read_bytes()
    again = run_well(demo(directory))
    assert (directory / "seed-0" / "journal.jsonl").read_bytes() == journal
    mean = next(line for line in first.out.splitlines() if line.split()[:1] == ["mean"])
    assert mean in again.out


@pytest.mark.learning
@pytest.mark.distributed
def test_a_run_that_fails_fails_the_demonstration_and_names_its_log(finished):
    directory, _ = finished
    failed = run(demo(directory, "data.path=nowhere"))
    assert failed.code == 1
    assert "seed 0 ended with exit code 2" in failed.err
    assert f"see {directory / 'seed-0.log'}" in failed.err
    assert "nowhere" in (directory / "seed-0.log").read_text()


def test_started_elsewhere_it_says_where_to_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the root of the repository"):
        demonstrate(tmp_path / "demo", [0])
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_every_run_their_mean_and_their_deviation():
    table = report({0: results_of(0, 0.9), 1: results_of(1, 0.94)})
    rows = [line.split() for line in table.splitlines()]
    assert rows[1] == ["seed", "0", "0.500", "0.900", "0.520", "600", "71", "runs/demo/seed-0"]
    assert rows[2] == ["seed", "1", "0.500", "0.940", "0.520", "600", "71", "runs/demo/seed-1"]
    assert rows[3] == ["mean", "0.500", "0.920"]
    assert rows[4] == ["deviation", "0.000", "0.028"]
    assert "1,234,567 bytes of weights" in table
    assert "is 104 bytes" in table
    assert "deviation" not in report({0: results_of(0, 0.9)})
