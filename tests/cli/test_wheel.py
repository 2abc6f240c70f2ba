"""The wheel: built from what the Dockerfile copies, installed without network, run outside the clone."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys

import pytest
from assets import REPOSITORY, write_recipe
from commands import environment, run
from test_project_files import copied

from lezo_ds import __version__
from lezo_ds.cli import COMMANDS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The folder that the wheel is installed in."""
    directory = tmp_path_factory.mktemp("wheel")
    source, target = directory / "source", directory / "installed"
    source.mkdir()
    for name in copied():
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


@pytest.fixture
def elsewhere(wheel, tmp_path):
    """A function that runs a command of the installed package in an empty folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    variables = {"PYTHONPATH": str(wheel), "PATH": f"{wheel / 'bin'}:{environment()['PATH']}"}

    def run_there(*command):
        line = f"cd {shlex.quote(str(folder))} && exec {shlex.join(map(str, command))}"
        finished = run(["bash", "-c", line], **variables)
        assert finished.code == 0, finished.err[-3000:]
        return finished.out

    return run_there


def test_the_wheel_has_its_commands_and_every_file_of_launch_and_ds_configs(wheel, elsewhere):
    def files(root):
        paths = (path for folder in ("launch", "ds_configs") for path in (root / folder).rglob("*"))
        return {p.relative_to(root): p.read_bytes() for p in paths if p.is_file() and p.suffix != ".pyc"}

    assert files(wheel / "lezo_ds") == files(REPOSITORY)
    assert elsewhere("lezo-ds", "--version") == f"lezo_ds {__version__}\n"
    shown = elsewhere(sys.executable, "-m", "lezo_ds", "--help")
    assert [name for name in COMMANDS if f"  {name} " not in shown] == []
    assert "SmolLM2" in elsewhere("lezo-ds", "train", "--config", "demo", "--print-config")
    script = elsewhere("lezo-ds", "--path", "launch/mpi/one_node.sh").strip()
    assert script == str(wheel / "lezo_ds" / "launch" / "mpi" / "one_node.sh")


@pytest.mark.distributed
def test_a_sweep_starts_the_shipped_script_and_a_page_shows_its_runs(elsewhere, tmp_path):
    recipe = write_recipe(tmp_path)
    given = ["--config", recipe, "deepspeed=zero3_cpu", "train.steps=2", "train.eval_every=2"]
    printed = elsewhere("lezo-ds", "sweep", *given, "--out", "sweep", "--grid", "seed=0,1")
    assert [line.split()[:2] for line in printed.splitlines()[1:]] == [["2", "2"]]
    assert (
        elsewhere("lezo-ds", "sweep", *given, "--out", "sweep", "--grid", "seed=0,1", "--list").count("done")
        == 2
    )
    elsewhere("lezo-ds", "report", "sweep/*", "--html", "page.html")
    assert "validation loss" in (tmp_path / "elsewhere" / "page.html").read_text()
