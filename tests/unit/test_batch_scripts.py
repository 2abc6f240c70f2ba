"""Batch scripts, as far as they go without a cluster; the rest is in tests/cluster."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from assets import REPOSITORY

SCRIPTS = sorted(path for path in (REPOSITORY / "launch").rglob("*") if path.suffix in (".sh", ".sbatch"))
ENVIRONMENT = REPOSITORY / "launch" / "environment.sh"


def python_found_in(directory, **variables):
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source {ENVIRONMENT}; command -v python || true"],
        cwd=directory,
        env={"PATH": os.defpath, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.fixture
def own_python(tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    return python


def test_scripts_run_in_the_environment_that_make_made(own_python, tmp_path):
    assert python_found_in(tmp_path) == str(own_python)


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_environment_that_is_activated_stays(variable, own_python, tmp_path):
    assert python_found_in(tmp_path, **{variable: "/another"}) != str(own_python)


def test_without_an_environment_the_path_stays(tmp_path):
    assert python_found_in(tmp_path) == python_found_in(REPOSITORY, VIRTUAL_ENV="/another")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_a_script_and_what_it_sources_exists(script):
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    sourced = re.findall(r'^source "\$launch/(.*)"$', text, re.MULTILINE)
    assert len(sourced) == text.count("\nsource ")
    assert [name for name in sourced if not (REPOSITORY / "launch" / name).is_file()] == []


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.parent.name == "mpi"], ids=lambda p: p.name
)
def test_a_script_for_mpi_can_be_executed_and_says_what_it_misses(script):
    finished = subprocess.run([script], cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode != 0
    assert "1: the " in finished.stderr
