"""What only the extras of setup.py install: most runs do without it, and the others ask for it."""

from __future__ import annotations

import sys

import pytest
from commands import assert_one_error, run

pytestmark = pytest.mark.distributed

WITHOUT_EXTRAS = """
import sys
for name in ("mpi4py", "tensorboard", "gguf", "matplotlib", "torchft"):
    sys.modules[name] = None  # an import of it fails, as if it were not installed
from lezo_ds.__main__ import main
main("train")
"""


def train(recipe, run_dir, *overrides, **variables):
    command = [sys.executable, "-c", WITHOUT_EXTRAS, "--config", recipe, f"run_dir={run_dir}"]
    return run([*map(str, command), "train.steps=1", *overrides], **variables)


@pytest.mark.thorough
def test_training_needs_no_extra(recipe, tmp_path):
    finished = train(recipe, tmp_path / "run")
    assert finished.code == 0, finished.err[-5000:]
    assert (tmp_path / "run" / "results.json").is_file()


@pytest.mark.thorough
def test_a_monitor_without_its_package_is_refused(recipe, tmp_path):
    finished = train(recipe, tmp_path / "run", "train.report_to=tensorboard")
    assert_one_error(finished, 2, "a monitor cannot start: ", "tensorboard", "install its package")


@pytest.mark.thorough
def test_a_launch_by_mpirun_is_refused_with_its_extra(recipe, tmp_path):
    finished = train(recipe, tmp_path / "run", OMPI_COMM_WORLD_SIZE="2")
    assert_one_error(finished, 2, "mpirun needs mpi4py; fix: pip install 'lezo_ds[mpi]'")
