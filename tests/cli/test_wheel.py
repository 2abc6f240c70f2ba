"""The wheel: built from what the Dockerfile copies, installed without network, run outside the
clone."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys

import pytest
from assets import REPOSITORY, write_reader
from commands import environment, run_well
from test_project_files import copied_files

from lezo_ds import __version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The folder that the wheel is installed in."""
    directory = tmp_path_factory.mktemp("wheel")
    source, target = directory / "source", directory / "installed"
    source.mkdir()
    for name in copied_files():
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        copy(REPOSITORY / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", directory, source]
    subprocess.run([*pip, "wheel", *build], cwd=directory, check=True, timeout=120)
    (file,) = directory.glob("*.whl")
    install = ["--no-deps", "--no-index", "--target", target, file]
    subprocess.run([*pip, "install", *install], cwd=directory, check=True, timeout=120)
    shutil.rmtree(source)
    return target


@pytest.mark.thorough
def test_the_program_of_the_page_trains_from_a_wheel(wheel, tmp_path):
    """It names its model by a path, and DeepSpeed's JSON by its name."""
    write_reader(tmp_path / "runs" / "demo" / "assets" / "SmolLM2-135M-Instruct")
    page = (REPOSITORY / "docs" / "layout.md").read_text()
    (program,) = re.findall(r"```python\n([^`]*train_batch[^`]*)```", page)
    (tmp_path / "program.py").write_text(program)
    command = ["bash", "-c", f"cd {tmp_path} && exec {sys.executable} program.py"]
    out = run_well(command, PYTHONPATH=str(wheel)).out
    steps = [line.split() for line in out.splitlines() if re.match(r"\d+ [\d.]+ ", line)]
    assert [int(number) for number, *_ in steps] == [*range(len(steps))]
    assert 6 <= len(steps) <= 20 and all(math.isfinite(float(step[-1])) for step in steps)
    assert any((tmp_path / "runs" / "own-loop").iterdir())


@pytest.mark.thorough
def test_the_wheel_has_its_commands_and_every_file_of_launch_and_ds_configs(wheel, tmp_path):
    variables = {"PYTHONPATH": str(wheel), "PATH": f"{wheel / 'bin'}:{environment()['PATH']}"}

    def elsewhere(command):
        return run_well(["bash", "-c", f"cd {tmp_path} && exec {command}"], **variables).out

    def files(root):
        paths = (path for folder in ("launch", "ds_configs") for path in (root / folder).rglob("*"))
        return {
            p.relative_to(root): p.read_bytes() for p in paths if p.is_file() and p.suffix != ".pyc"
        }

    assert files(wheel / "lezo_ds") == files(REPOSITORY)
    assert elsewhere("lezo-ds --version") == f"lezo_ds {__version__}\n"
    assert "SmolLM2" in elsewhere("lezo-ds train --config demo --print-config")
    assert "ours:0.75" in elsewhere('python "$(lezo-ds --path launch/benchmark.py)" --help')
    script = elsewhere("lezo-ds --path launch/mpi/one_node.sh").strip()
    assert script == str(wheel / "lezo_ds" / "launch" / "mpi" / "one_node.sh")
