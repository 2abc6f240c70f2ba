"""train.report_to: what trackers get of a run, also when it resumes, and what happens where they fail."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
import sqlite3
from collections import Counter

import pytest
from commands import assert_one_error, run_forked, run_forked_well
from run_ends import results_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lezo_ds.errors import UserError
from lezo_ds.runs.tracking import Trackers, check_trackers
from lezo_ds.trackers import TRACKERS, RunFacts, Tracker
from lezo_ds.trackers.csv_file import CsvFile

TO_FILES = "train.report_to=[tensorboard, csv]"


@pytest.fixture(scope="module")
def reported(recipe, tmp_path_factory):
    """A run that reports to files."""
    run_dir = tmp_path_factory.mktemp("reported") / "run"
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", TO_FILES])
    return run_dir


def metrics_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def rows_of(run_dir):
    with (run_dir / "trackers" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_rows_are_the_metrics(run_dir):
    rows = [{name: float(cell) for name, cell in row.items() if cell} for row in rows_of(run_dir)]
    assert rows == [
        {name: float(value) for name, value in entry.items() if value is not None}
        for entry in metrics_of(run_dir)
    ]


def assert_board_is_the_metrics(run_dir):
    board = EventAccumulator(str(run_dir / "trackers" / "tensorboard"))
    board.Reload()
    for name in ("loss", "projected_gradient", "dev_loss", "test_accuracy"):
        expected = [(entry["step"], entry[name]) for entry in metrics_of(run_dir) if name in entry]
        found = [(event.step, event.value) for event in board.Scalars(name)]
        assert found == [(step, pytest.approx(value)) for step, value in expected]


@pytest.mark.distributed
def test_csv_and_tensorboard_get_what_metrics_jsonl_gets(reported):
    assert_rows_are_the_metrics(reported)
    assert_board_is_the_metrics(reported)
    assert next(iter(rows_of(reported)[0])) == "step"
    assert len(rows_of(reported)) == 8 + 4


@pytest.mark.distributed
def test_a_run_that_resumes_repeats_no_step_in_its_trackers(reported, recipe, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(reported, run_dir)
    journal = run_dir / "journal.jsonl"
    # Header, test score and 6 steps with an evaluation: the power went after step 6.
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:9]))
    with (run_dir / "trackers" / "metrics.csv").open("a") as file:
        file.write("5,0.")
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", TO_FILES], num_ranks=2)
    assert_rows_are_the_metrics(run_dir)
    assert max(Counter(row["step"] for row in rows_of(run_dir) if row["loss"]).values()) == 1
    assert_board_is_the_metrics(run_dir)
    losses = [[(row["step"], row["loss"]) for row in rows_of(d) if row["loss"]] for d in (run_dir, reported)]
    assert losses[0] == losses[1]


def test_a_tracker_can_join_a_run_that_resumes(reported, recipe, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(reported, run_dir)
    shutil.rmtree(run_dir / "trackers")
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", "train.report_to=csv", "train.steps=9"])
    assert [row["step"] for row in rows_of(run_dir) if row["loss"]] == ["9"]


@pytest.mark.parametrize("name", [name for name, tracker in TRACKERS.items() if tracker.library is not None])
def test_a_library_that_is_missing_is_refused_before_the_weights_load(name, recipe, tmp_path):
    if importlib.util.find_spec(TRACKERS[name].library) is not None:
        pytest.skip(f"{name} is installed")
    given = ["--config", recipe, f"run_dir={tmp_path / 'run'}", f"train.report_to=[csv, {name}]"]
    for more in ([], ["--dry-run"]):
        finished = run_forked([*given, *more])
        assert_one_error(finished, 2, f"names {name}, which is not installed", f"pip install {name}")
        assert "loading" not in finished.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("tensorbord", "did you mean tensorboard?"),
        ("[csv, 3]", "got: '3'"),
        ("[]", "expected: a list of csv, "),
    ],
)
def test_an_unknown_tracker_is_refused(value, expected, recipe):
    assert_one_error(run_forked(["--config", recipe, "run_dir=x", f"train.report_to={value}"]), 2, expected)


class Failing(Tracker):
    """Fails at its second step."""

    def __init__(self, run):
        self.steps = []

    def log(self, step, values):
        if self.steps:
            raise OSError("no space")
        self.steps.append(step)


class Broken(Failing):
    """Cannot be opened."""

    def __init__(self, run):
        raise RuntimeError("no key")


@pytest.fixture
def facts(tmp_path):
    return RunFacts(name="run", folder=tmp_path / "trackers", config={}, step=0)


def test_a_tracker_that_fails_is_dropped_and_the_others_go_on(facts, monkeypatch, caplog):
    monkeypatch.setitem(TRACKERS._entries, "failing", Failing)
    trackers = Trackers(["failing", "csv"], facts)
    for step in (1, 2, 3):
        trackers.log(step, {"loss": step / 2})
    trackers.close()
    assert caplog.messages == [
        "failing failed and gets no more metrics, which metrics.jsonl keeps: OSError: no space"
    ]
    assert (facts.folder / "metrics.csv").read_text() == "step,loss\n1,0.5\n2,1.0\n3,1.5\n"


def test_a_tracker_that_cannot_be_opened_is_an_error(facts, monkeypatch):
    monkeypatch.setitem(TRACKERS._entries, "broken", Broken)
    check_trackers(["broken", "csv", "tensorboard"])
    with pytest.raises(UserError, match=r"names broken, which cannot be opened; got: RuntimeError: no key"):
        Trackers(["broken"], facts)


def test_a_new_column_is_added_to_the_rows_before_it(facts):
    facts.folder.mkdir()
    table = CsvFile(facts)
    table.log(0, {"b": 1.0})
    table.log(1, {"a": 2.0})
    table.log(2, {"a": 3.0, "b": 4.0})
    assert (facts.folder / "metrics.csv").read_text() == "step,b,a\n0,1.0,\n1,,2.0\n2,4.0,3.0\n"


def test_weights_and_biases_gets_every_step_also_when_the_run_resumes(recipe, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed: its tracker is not tested")
    run_dir = tmp_path / "run"
    given = ["--config", recipe, f"run_dir={run_dir}", "train.report_to=wandb"]
    for length in ("train.steps=4", "train.steps=8"):
        run_forked_well([*given, length], WANDB_MODE="offline")
    folder = run_dir / "trackers" / "wandb"
    run_id = (run_dir / "trackers" / "wandb-id").read_text()
    assert len(list(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))) == 2
    finished = run_forked([*given, "--dry-run"])
    assert_one_error(finished, 2, "no API key; wandb login asks for it, and WANDB_MODE=offline needs none")
    assert results_of(run_dir)["finished"]


def test_trackio_gets_every_step_also_when_the_run_resumes(recipe, tmp_path):
    pytest.importorskip("trackio", reason="trackio is not installed: its tracker is not tested")
    run_dir = tmp_path / "run"
    given = ["--config", recipe, f"run_dir={run_dir}", "train.report_to=trackio"]
    for length in ("train.steps=4", "train.steps=8"):
        run_forked_well([*given, length], TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "lezo_ds.db") as database:
        rows = [
            (step, json.loads(text)) for step, text in database.execute("select step, metrics from metrics")
        ]
    losses = {step: values["loss"] for step, values in rows if "loss" in values}
    assert losses == {entry["step"]: entry["loss"] for entry in metrics_of(run_dir) if "loss" in entry}
    assert results_of(run_dir)["finished"]
