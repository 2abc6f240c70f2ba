"""The wheel: built from what the Dockerfile copies, installed, and run outside the clone."""

import shutil
import subprocess
import sys

import pytest
from assets import REPOSITORY
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
