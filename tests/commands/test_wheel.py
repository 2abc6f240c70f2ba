"""The wheel: built from what the Dockerfile copies, installed without network, run outside the clone."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from assets import REPOSITORY
from commands import assert_one_error, environment, free_port, run
from test_project_files import copied

from lezo_ds import __version__
from lezo_ds.cli import COMMANDS
from lezo_ds.config import config_to_dict, load_config


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
    """A function that runs a command with the installed package, in an empty folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()

    def run_there(*command):
        line = f"cd {shlex.quote(str(folder))} && exec {shlex.join(map(str, command))}"
        return run(["bash", "-c", line], **variables)

    variables = {"PYTHONPATH": str(wheel), "PATH": f"{wheel / 'bin'}:{environment()['PATH']}"}
    return run_there


@pytest.fixture
def lezo_ds(elsewhere):
    """A function that runs `python -m lezo_ds` with the installed package and asserts that it goes well."""

    def run_well_there(*arguments, program=(sys.executable, "-m", "lezo_ds")):
        finished = elsewhere(*program, *arguments)
        assert finished.code == 0, finished.err[-5000:]
        return finished.out

    return run_well_there


def test_the_package_that_runs_is_the_installed_one(lezo_ds, wheel):
    shown = lezo_ds(program=(sys.executable, "-c", "import lezo_ds; print(lezo_ds.__file__)"))
    assert shown == f"{wheel / 'lezo_ds' / '__init__.py'}\n"


@pytest.mark.parametrize(
    "program", [("lezo-ds",), (sys.executable, "-m", "lezo_ds")], ids=["script", "module"]
)
def test_the_program_knows_its_version_and_its_commands(program, lezo_ds):
    assert lezo_ds("--version", program=program) == f"lezo_ds {__version__}\n"
    shown = lezo_ds("--help", program=program)
    assert [name for name in COMMANDS if f"  {name} " not in shown] == []


def test_every_file_of_launch_and_ds_configs_is_in_the_wheel(wheel):
    def files(root):
        paths = (path for folder in ("launch", "ds_configs") for path in (root / folder).rglob("*"))
        return {p.relative_to(root): p.read_bytes() for p in paths if p.is_file() and p.suffix != ".pyc"}

    assert files(wheel / "lezo_ds" / "shipped") == files(REPOSITORY)


@pytest.mark.parametrize("name", ["demo", "opt-13b-sst2-lezo"])
def test_recipes_are_found_by_name_and_path(name, lezo_ds):
    shown = lezo_ds("train", "--config", name, "seed=3", "--print-config")
    assert yaml.safe_load(shown) == config_to_dict(load_config(name, ["seed=3"]))


def test_bad_input_is_one_line(elsewhere):
    finished = elsewhere(sys.executable, "-m", "lezo_ds", "train", "--config", "dmo")
    assert_one_error(finished, 2, "there is no recipe of this name", "did you mean demo?")


def test_shipped_scripts_run_from_where_they_are(elsewhere, lezo_ds, wheel):
    script = lezo_ds("--path", "launch/mpi/one_node.sh").rstrip()
    assert script == str(wheel / "lezo_ds" / "shipped" / "launch" / "mpi" / "one_node.sh")
    assert "1: the number of ranks" in elsewhere("bash", script).err


def test_the_metadata_has_the_readme_the_license_and_the_extras(wheel):
    (distribution,) = importlib.metadata.distributions(name="lezo_ds", path=[str(wheel)])
    metadata = distribution.metadata
    assert (metadata["Name"], metadata["Version"]) == ("lezo_ds", __version__)
    assert metadata["Author"] == "the lezo_ds authors"
    assert "Apache-2.0" in (metadata["License-Expression"], metadata["License"])
    assert metadata.get_payload().strip() == (REPOSITORY / "README.md").read_text().strip()
    assert {"demo", "report"} <= set(metadata.get_all("Provides-Extra"))


@pytest.mark.long
@pytest.mark.distributed
def test_a_run_and_what_follows_it(recipe, lezo_ds, tmp_path):
    """`recipe` is a file outside the clone, with its model and data."""
    given = ["--config", recipe, "deepspeed=zero3_cpu", "train.steps=2", "train.eval_every=2"]
    assert "steps" in lezo_ds("train", *given, "run_dir=runs/first", "--dry-run")

    starter = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    starter += ["--master_port", free_port(), "--module", "lezo_ds"]
    lezo_ds("train", *given, "run_dir=runs/first", program=starter)
    results = json.loads((tmp_path / "elsewhere" / "runs" / "first" / "results.json").read_text())
    assert results["finished"]

    lezo_ds("export", "--run", "runs/first", "--step", "last", "--out", "exported")
    scores = json.loads(lezo_ds("evaluate", "--run", "runs/first", "--step", "best", "--json"))
    assert scores["score"] == results["test"]
    assert list((tmp_path / "elsewhere" / "exported").glob("*.safetensors"))

    # A sweep starts the shipped script, and a page needs a shipped template.
    lezo_ds("sweep", *given, "--out", "sweep", "--grid", "seed=0")
    lezo_ds("report", "sweep/*", "--html", "page.html")
    assert "<html" in (tmp_path / "elsewhere" / "page.html").read_text()
