"""What only the extras of setup.py install: most runs do without it, and the others ask for it."""

import sys

import pytest
from commands import assert_one_error, run, run_words

pytestmark = pytest.mark.distributed

WITHOUT_EXTRAS = """
import sys
for name in ("mpi4py", "tensorboard", "gguf", "matplotlib", "torchft"):
    sys.modules[name] = None  # an import of it fails, as if it were not installed
from lezo_ds.__main__ import main
main("train")
"""


@pytest.mark.thorough
def test_training_needs_no_extra_and_names_the_one_that_a_key_or_a_launcher_needs(recipe, tmp_path):
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    command += run_words(str(recipe), tmp_path / "run", "train.steps=1")
    finished = run(command)
    assert finished.code == 0, finished.err[-5000:]
    assert (tmp_path / "run" / "results.json").is_file()
    monitored = run([*command, "train.report_to=tensorboard"])
    assert_one_error(monitored, 2, "a monitor cannot start: ", "tensorboard", "its package")
    launched = run(command, OMPI_COMM_WORLD_SIZE="2")
    assert_one_error(launched, 2, "mpirun needs mpi4py; fix: pip install 'lezo_ds[mpi]'")
