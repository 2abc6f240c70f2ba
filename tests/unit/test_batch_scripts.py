"""Batch scripts, as far as they go without a cluster; the rest is in tests/cluster."""

from __future__ import annotations

import os
import re
import shlex
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


IMAGES = {
    (): "srun --kill-on-bad-exit=1 python launch/train.py --config c",
    ("--container-image", "here.sqsh"): "srun --kill-on-bad-exit=1 --container-image=HERE/here.sqsh "
    "--container-mounts=HERE:HERE,HERE/launch:HERE/launch --container-workdir=HERE "
    "python launch/train.py --config c",
    (
        "--container-mounts=/data:/data",
        "--container-image=my images/lezo_ds.sif",
    ): "srun --kill-on-bad-exit=1 "
    "apptainer exec --nv --bind HERE:HERE,HERE/launch:HERE/launch,/data:/data --pwd HERE "
    "my images/lezo_ds.sif "
    "python launch/train.py --config c",
}
"""Options of a batch script, and the command of its ranks in the folder HERE."""


@pytest.fixture
def submitted(tmp_path):
    """Run a batch script where `srun` and `python` only print their arguments, as neither runs here."""
    (tmp_path / "launch").symlink_to(REPOSITORY / "launch")
    for name in ("srun", "python"):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "here.sqsh").touch()
    (tmp_path / "squeue").symlink_to("/bin/true")
    variables = {"PATH": f"{tmp_path}:{os.defpath}", "VIRTUAL_ENV": "here", "SLURM_CPUS_PER_TASK": "1"}

    def run(name, *arguments):
        return subprocess.run(
            ["bash", REPOSITORY / "launch" / "slurm" / name, *arguments],
            cwd=tmp_path,
            env={**variables, "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "1"},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.parametrize("options", IMAGES)
@pytest.mark.parametrize("name", ["one_node.sbatch", "several_nodes.sbatch"])
def test_the_ranks_run_in_the_container_that_is_asked_for(name, options, submitted, tmp_path):
    words = submitted(name, *options, "--config", "c").stdout.splitlines()
    assert " ".join(words).replace(str(tmp_path.resolve()), "HERE") == IMAGES[options].replace(
        "HERE/launch", str((tmp_path / "launch").resolve())
    )


@pytest.mark.parametrize("options", IMAGES)
def test_a_sweep_starts_its_ranks_in_the_container(options, submitted, tmp_path):
    words = submitted("sweep.sbatch", *options, "--config", "c").stdout.splitlines()
    assert words[:-1] == ["python", "launch/sweep.py", "--config", "c", "--index", "3", "--launcher"]
    launcher = " ".join([*shlex.split(words[-1]), "launch/train.py --config c"])
    assert launcher.replace(str(tmp_path.resolve()), "HERE") == IMAGES[options].replace(
        "HERE/launch", str((tmp_path / "launch").resolve())
    )


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (["--container-image"], "the value of --container-image is missing"),
        (["--container-imgae=x"], "error: unknown option --container-imgae=x"),
    ],
)
def test_a_wrong_option_for_containers_ends_the_job(options, fragment, submitted):
    finished = submitted("one_node.sbatch", *options)
    assert finished.returncode != 0
    assert fragment in finished.stderr
    assert finished.stdout == ""


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.parent.name == "mpi"], ids=lambda p: p.name
)
def test_a_script_for_mpi_can_be_executed_and_says_what_it_misses(script):
    finished = subprocess.run([script], cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode != 0
    assert "1: the " in finished.stderr
