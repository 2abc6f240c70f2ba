"""Following a run by its metrics, from another process; the monitors of DeepSpeed."""

from __future__ import annotations

import csv
import json
import sys
import time

import pytest
import yaml
from assets import REPOSITORY, write_recipe
from commands import python, run, run_well, start
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lezo_ds.errors import UserError
from lezo_ds.runs.metrics import Watcher, clock, follow, read_metrics
from lezo_ds.runs.run_directory import RunDirectory

RESULTS = {"finished": True, "steps": 4, "metric": "accuracy", "test": 0.9, "seconds": 75.0}
RESULTS |= {"best_step": 4, "zero_shot": 0.5, "majority_class": None}


def command(*arguments):
    return [sys.executable, str(REPOSITORY / "launch" / "watch.py"), *map(str, arguments)]


def step(number, loss=0.5, gradient=-1.25, applied=True):
    values = {"loss": loss, "projected_gradient": gradient, "applied": applied}
    return {"step": number, **values, "seconds": 2.0 * number}


def evaluation(number):
    return {"step": number, "dev_loss": 0.25, "dev_accuracy": 0.75, "seconds": 2.0 * number}


@pytest.fixture
def directory(tmp_path):
    """A run of 10 steps that has begun."""
    made = RunDirectory(tmp_path / "run")
    made.create()
    (made.path / "config.yaml").write_text(yaml.safe_dump({"train": {"steps": 10}}))
    return made


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("assets"))


def log(directory, *entries):
    for entry in entries:
        directory.log_metrics(entry)


def test_a_step_shows_loss_gradient_speed_and_the_time_left(directory):
    log(directory, *(step(number) for number in range(1, 5)))
    assert Watcher(directory.path).poll() == ["step 4/10  loss 0.5000  g -1.25  0.5 it/s  0:00:12 left"]


def test_a_skipped_step_an_evaluation_and_a_step_without_a_gradient_are_told_apart(directory):
    watcher = Watcher(directory.path)
    log(directory, {"step": 0, "test_loss": None, "test_accuracy": 0.5, "seconds": 0.0})
    assert watcher.poll() == ["step 0/10  test loss -  test accuracy 0.5000"]
    first_order = {"step": 2, "loss": 0.25, "learning_rate": 1e-5, "applied": True, "seconds": 3.0}
    log(directory, step(1, None, None, applied=False), first_order, evaluation(2))
    assert watcher.poll() == [
        "step 1/10  loss -  skipped",
        "step 2/10  loss 0.2500  1 it/s  0:00:08 left",
        "step 2/10  dev loss 0.2500  dev accuracy 0.7500",
    ]


def test_the_first_look_gives_evaluations_and_the_last_step_and_later_ones_what_is_new(directory):
    watcher = Watcher(directory.path)
    assert watcher.poll() == []
    log(directory, step(1), step(2), evaluation(2), step(3))
    assert [line.split("  ")[:2] for line in watcher.poll()] == [
        ["step 2/10", "dev loss 0.2500"],
        ["step 3/10", "loss 0.5000"],
    ]
    assert watcher.poll() == []
    log(directory, step(4), step(5))
    assert [line.split("  ")[0] for line in watcher.poll()] == ["step 4/10", "step 5/10"]


def test_a_line_that_is_being_written_waits_until_it_is_whole(directory):
    watcher = Watcher(directory.path)
    log(directory, step(1))
    text = json.dumps(step(2)) + "\n"
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write(text[:20])
        file.flush()
        assert [line.split("  ")[0] for line in watcher.poll()] == ["step 1/10"]
        assert [entry["step"] for entry in read_metrics(directory.path)] == [1]
        file.write(text[20:])
    assert [line.split("  ")[0] for line in watcher.poll()] == ["step 2/10"]


def test_a_resumed_run_is_followed_from_where_it_goes_on(directory):
    watcher = Watcher(directory.path)
    log(directory, *(step(number) for number in range(1, 6)))
    watcher.poll()
    directory.cut_metrics(3)
    assert [line.split("  ")[0] for line in watcher.poll()] == ["step 3/10"]
    log(directory, step(4, gradient=7.0))
    assert watcher.poll() == ["step 4/10  loss 0.5000  g +7  0.5 it/s  0:00:12 left"]


def test_a_run_has_ended_when_its_results_are_newer_than_its_metrics(directory):
    watcher = Watcher(directory.path)
    log(directory, step(4))
    assert watcher.results() is None
    time.sleep(0.02)  # file systems keep time in ticks
    directory.write_results(RESULTS)
    assert watcher.results() == RESULTS
    assert list(follow(directory.path, 0))[-1] == (
        "finished after 0:01:15  test accuracy 0.9000  at step 4  zero-shot 0.5000  majority class -"
    )
    time.sleep(0.02)
    directory.cut_metrics(4)  # it goes on
    assert watcher.results() is None
    time.sleep(0.02)
    directory.write_results({"finished": False, "steps": 4})
    assert list(follow(directory.path, 5))[-1] == "stopped at step 4; the same command again resumes it"


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no run in .*fix: "):
        Watcher(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3599, "0:59:59"), (360000, "100:00:00")]
)
def test_a_duration_is_written_as_a_clock_shows_it(seconds, text):
    assert clock(seconds) == text


@pytest.mark.distributed
def test_a_run_is_followed_while_it_goes_and_to_its_end(recipe, tmp_path):
    run_dir = tmp_path / "run"
    arguments = ("train.steps=60", "train.eval_every=20", "train.batch_size=2")
    with start(python("--config", recipe, f"run_dir={run_dir}", *arguments)) as trained:
        while not (run_dir / "config.yaml").is_file():
            assert trained.poll() is None, trained.communicate()[1][-3000:]
            time.sleep(0.05)
        lines = run_well(command(run_dir, "--every", "0.1")).out.splitlines()
        assert trained.wait(timeout=60) == 0
    results = json.loads((run_dir / "results.json").read_text())
    assert lines[-1].startswith(f"finished after {clock(results['seconds'])}  test accuracy")
    evaluations = [line.split("  ")[0] for line in lines if "dev loss" in line]
    assert evaluations == ["step 20/60", "step 40/60", "step 60/60"]
    shown = [int(line.split()[1].split("/")[0]) for line in lines if "  loss " in line]
    assert shown == list(range(shown[0], 61))
    once = run_well(command(run_dir, "--once")).out.splitlines()
    assert once[-1] == lines[-1]
    assert sum("  loss " in line for line in once) == 1
    refused = run(command(tmp_path))
    assert (refused.code, refused.err.count("error: ")) == (2, 1)


@pytest.mark.distributed
def test_deepspeeds_csv_and_tensorboard_monitors_get_every_step_and_evaluation(recipe, tmp_path):
    values = json.loads((REPOSITORY / "ds_configs" / "zero3_cpu.json").read_text())
    folder = {"output_path": str(tmp_path), "job_name": "job"}
    values["csv_monitor"] = {"enabled": True, **folder}
    values["tensorboard"] = {"enabled": True, "output_path": str(tmp_path / "board"), "job_name": "job"}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    run_dir = tmp_path / "run"
    run_well(python("--config", recipe, f"run_dir={run_dir}", f"deepspeed={tmp_path / 'ds.json'}"))
    entries = read_metrics(run_dir)
    for name in ("loss", "projected_gradient", "dev_loss", "dev_accuracy"):
        (path,) = tmp_path.rglob(f"train_{name}.csv")
        with path.open() as file:
            _, *rows = csv.reader(file)
        expected = [(entry["step"], entry[name]) for entry in entries if name in entry]
        assert [int(row[0]) for row in rows] == [number for number, _ in expected]
        assert [float(row[1]) for row in rows] == pytest.approx([value for _, value in expected])
    (events,) = (tmp_path / "board").rglob("events.out.tfevents.*")
    board = EventAccumulator(str(events.parent))
    board.Reload()
    losses = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    found = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert [number for number, _ in found] == [number for number, _ in losses]
    assert [value for _, value in found] == pytest.approx([value for _, value in losses])
