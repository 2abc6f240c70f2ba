"""DeepSpeed's monitors: what they get, and how W&B and Comet know a run again."""

import os

import pytest
from ranks import run_ranks

from lezo_ds import distributed
from lezo_ds.distributed.monitors import Monitors

pytestmark = pytest.mark.distributed
VARIABLES = ("WANDB_NAME", "WANDB_RUN_ID", "WANDB_RESUME", "COMET_EXPERIMENT_KEY")


def _log(folder, names, ds_config, own):
    """Log a step. Return the variables by which a run is known, and what is left of the JSON."""
    for variable in VARIABLES:
        os.environ.pop(variable, None)
    os.environ.update(own)
    distributed.init_distributed()
    monitors = Monitors(names, ds_config, folder)
    monitors.log({"loss": 0.5, "applied": True, "test_loss": None}, 3)
    return [os.environ.get(variable) for variable in VARIABLES], ds_config


def log(folder, *names, ds_config=None, **own):
    (logged,) = run_ranks(_log, 1, folder, names, ds_config or {}, own)
    return logged


def test_a_monitor_gets_all_numbers_and_the_json_decides(tmp_path):
    folder = tmp_path / "first" / "monitors"
    assert log(folder)[0] == [None] * len(VARIABLES)
    assert not folder.exists()
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "own"}
    _, left = log(folder, "csv", ds_config={"csv_monitor": section, "wall_clock_breakdown": True})
    assert left == {"wall_clock_breakdown": True}
    log(folder, "csv")
    for directory in (tmp_path / "own", folder / "first"):
        files = sorted(path.read_text().split() for path in directory.iterdir())
        assert files == [["step,applied", "3,1.0"], ["step,loss", "3,0.5"]]


def test_a_resumed_run_keeps_its_id_and_the_variables_of_the_user_stay(tmp_path):
    names, _ = log(tmp_path / "first" / "monitors", "csv")
    run, run_id, resume, key = names
    assert (run, resume, key) == ("first", "allow", run_id)
    assert len(run_id) == 32  # Comet takes 32 to 50 letters and digits
    assert log(tmp_path / "first" / "monitors", "csv")[0] == names
    other, _ = log(tmp_path / "second" / "monitors", "csv", WANDB_RUN_ID="mine")
    assert other[1] == "mine"
    assert other[3] not in ("mine", run_id)
