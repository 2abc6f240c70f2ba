"""The monitors of DeepSpeed during a run."""

from __future__ import annotations

import csv
import json

import pytest
from assets import REPOSITORY, write_recipe
from commands import python, run_well
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


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
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
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
