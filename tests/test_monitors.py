"""What a run notes while it goes: metrics.jsonl, and the monitors of DeepSpeed."""

from __future__ import annotations

import csv
import json

import pytest
from assets import REPOSITORY, write_recipe
from commands import python, run_well
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lezo_ds.runs.metrics import clock, read_metrics


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3599, "0:59:59"), (360000, "100:00:00")]
)
def test_a_duration_is_written_as_a_clock_shows_it(seconds, text):
    assert clock(seconds) == text


@pytest.mark.distributed
def test_deepspeeds_csv_and_tensorboard_monitors_get_every_step_and_evaluation(tmp_path):
    recipe = write_recipe(tmp_path / "assets")
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
