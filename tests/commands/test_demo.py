"""The demonstration as make demo-offline runs it, with one seed and fewer steps; and its summary."""

from __future__ import annotations

import json
import sys

import pytest
from assets import REPOSITORY
from commands import run, run_well

from lezo_ds.journal import read_journal
from lezo_ds.runs.run_directory import RunDirectory
from lezo_ds.tools.demo.command import OFFLINE, summary
from lezo_ds.zo.records import StepRecord

LEAST_GAIN = 0.2
SHORTER = ("train.steps=240", "train.eval_every=80")


def demo(directory, *overrides, flags=("--offline",)):
    arguments = ("--directory", str(directory), *flags, "--num-seeds", "1", *overrides)
    return [sys.executable, str(REPOSITORY / "launch" / "demo.py"), *arguments]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished demonstration's directory, and what it printed."""
    directory = tmp_path_factory.mktemp("demo") / "demo-offline"
    return directory, run_well(demo(directory, *SHORTER), timeout=840)


def finished_run(directory, seed, test, answers):
    """Write the predictions of a run, and return its results."""
    run_directory = RunDirectory(directory / f"seed-{seed}")
    run_directory.create()
    for step, given in zip((0, 600), answers, strict=True):
        rows = [
            {"index": i, "prompt": f"sentence {i}", "right": ["great"], "predicted": answer}
            for i, answer in enumerate(given)
        ]
        run_directory.write_predictions(step, rows)
    scores = {"zero_shot": 0.5, "test": test, "majority_class": 0.52, "best_step": 600, "seconds": 71.2}
    sent = {"gathered": 1_234_567, "other": 104}
    return {**scores, "bytes_per_step": sent, "run_dir": str(run_directory.path)}


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.learning
@pytest.mark.distributed
def test_the_demonstration_drops_six_of_eight_blocks_in_every_step(finished):
    _, records = read_journal(finished[0] / "seed-0" / "journal.jsonl")
    dropped = [record.dropped_layers for record in records if isinstance(record, StepRecord)]
    assert len(dropped) == 240
    assert {len(set(blocks)) for blocks in dropped} == {6}
    assert set().union(*dropped) == set(range(8))


@pytest.mark.long
@pytest.mark.learning
@pytest.mark.distributed
def test_the_same_command_again_changes_no_journal_and_prints_the_same_table(finished):
    directory, first = finished
    journal = (directory / "seed-0" / "journal.jsonl").read_bytes()
    again = run_well(demo(directory, *SHORTER))
    assert (directory / "seed-0" / "journal.jsonl").read_bytes() == journal
    assert again.out == first.out


@pytest.mark.long
@pytest.mark.learning
@pytest.mark.distributed
def test_a_run_that_fails_fails_the_demonstration_and_names_its_log(finished):
    directory, _ = finished
    failed = run(demo(directory, *SHORTER, "data.path=nowhere"))
    assert failed.code == 1
    assert "seed 0 ended with exit code 2" in failed.err
    assert f"see {directory / 'seed-0.log'}" in failed.err
    assert "nowhere" in (directory / "seed-0.log").read_text()


def test_the_summary_has_every_run_their_mean_their_deviation_and_the_error_of_the_test_set(tmp_path):
    answers = (["bad", "bad", "great", "bad"], ["great", "bad", "bad", "great"])
    runs = {seed: finished_run(tmp_path, seed, test, answers) for seed, test in ((0, 0.9), (1, 0.94))}
    text = summary(OFFLINE, runs)
    rows = [
        line.split()
        for line in text.splitlines()
        if line.startswith(("seed", "mean", "deviation", "standard"))
    ]
    assert rows[0] == ["seed", "0", "0.500", "0.900", "0.520", "600", "71", str(tmp_path / "seed-0")]
    assert rows[1] == ["seed", "1", "0.500", "0.940", "0.520", "600", "71", str(tmp_path / "seed-1")]
    assert rows[2] == ["mean", "0.500", "0.920"]
    assert rows[3] == ["deviation", "0.000", "0.028"]
    assert rows[4] == ["standard", "error", "0.250", "0.136"]  # sqrt(.5 * .5 / 4) and sqrt(.92 * .08 / 4)
    assert "accuracy on 4 held-out sentences" in text
    assert "2 answers became right, 1 became wrong" in text
    assert [line.split() for line in text.splitlines() if line.startswith("  now ")] == [
        ["now", "right", "bad", "->", "great", "sentence", "0"],
        ["now", "right", "bad", "->", "great", "sentence", "3"],
        ["now", "wrong", "great", "->", "bad", "sentence", "2"],
    ]
    assert "1,234,567 bytes of weights" in text
    assert "is 104 bytes" in text
    assert "deviation" not in summary(OFFLINE, {0: runs[0]})


@pytest.mark.long
@pytest.mark.learning
@pytest.mark.distributed
def test_without_a_package_index_one_line_says_so_and_the_made_up_demonstration_runs(finished):
    directory, first = finished
    real = directory.with_name("demo")
    again = run_well(demo(real, *SHORTER, flags=()), PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
    (line,) = [line for line in again.err.splitlines() if "the made-up demonstration runs instead" in line]
    assert "cannot fetch vaderSentiment 0.5" in line
    assert again.out == first.out
    assert not real.exists() or not any(real.iterdir())
