"""Monitors: their sections of DeepSpeed's JSON, and how W&B and Comet know a run again."""

from __future__ import annotations

import os

import pytest

from lezo_ds.config import config_from_dict
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.monitors import events_of, identify, monitor_sections

VARIABLES = ("WANDB_NAME", "WANDB_RUN_ID", "WANDB_RESUME", "COMET_EXPERIMENT_KEY")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for variable in (*VARIABLES, "WANDB_PROJECT", "COMET_PROJECT_NAME"):
        monkeypatch.setenv(variable, "")  # what a test sets is taken back afterwards
        monkeypatch.delenv(variable)


def config(run_dir, *overrides):
    values = {
        "run_dir": str(run_dir),
        "model": {"path": "facebook/opt-1.3b", "dtype": "bf16"},
        "zo": {"learning_rate": 1e-6, "sparsity": 0.75},
        "train": {"steps": 100},
    }
    return config_from_dict(values, "the test", overrides)


def sections(*overrides):
    return monitor_sections(config("runs/x", *overrides), RunDirectory("runs/x"))


def test_report_to_names_sections_of_deepspeeds_json(monkeypatch):
    files = {"enabled": True, "output_path": "runs/x/monitors", "job_name": "x"}
    assert sections("train.report_to=[csv,tensorboard]") == {
        "csv_monitor": files,
        "tensorboard": files,
    }
    assert sections() == {}


def identified(run_dir, number=0):
    """Return the variables that a new process has after it identifies its run."""
    for variable in VARIABLES:
        os.environ.pop(variable, None)
    identify(RunDirectory(run_dir, number))
    return {variable: os.environ.get(variable) for variable in VARIABLES}


def test_a_resumed_run_has_the_id_of_its_first_process_and_a_new_run_another(tmp_path):
    first = identified(tmp_path)
    assert first["WANDB_NAME"] == tmp_path.name
    assert len(first["WANDB_RUN_ID"]) == 32  # Comet takes 32 to 50 letters and digits
    assert first["COMET_EXPERIMENT_KEY"] == first["WANDB_RUN_ID"]
    (tmp_path / "journal.jsonl").touch()
    assert identified(tmp_path) == first
    (tmp_path / "journal.jsonl").unlink()
    assert identified(tmp_path)["WANDB_RUN_ID"] != first["WANDB_RUN_ID"]


def test_each_replica_is_a_run_of_its_own(tmp_path):
    names = [identified(tmp_path, number=number)["WANDB_NAME"] for number in (0, 1)]
    assert names == [tmp_path.name, f"{tmp_path.name}-replica-1"]


def test_variables_of_the_user_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    identify(RunDirectory(tmp_path))
    assert os.environ["WANDB_RUN_ID"] == "mine"


def test_monitors_show_each_split_in_a_group_and_no_missing_number():
    metrics = {"loss": 0.5, "applied": True, "dev_f1": 0.25, "test_loss": None}
    assert events_of(metrics, 3) == [
        ("train/loss", 0.5, 3),
        ("train/applied", 1.0, 3),
        ("dev/f1", 0.25, 3),
    ]
