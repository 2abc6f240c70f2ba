"""The files that other programs read: the Dockerfile, pages that name code, batch scripts."""

import os
import re
import shlex
import subprocess

import pytest
from assets import REPOSITORY

from lezo_ds.data.metrics import METRICS
from lezo_ds.data.mezo import TASKS
from lezo_ds.zo.estimators import ESTIMATORS
from lezo_ds.zo.layers import LAYER_POLICIES
from lezo_ds.zo.schedules import SCHEDULES


def copied_files():
    """Return what the Dockerfile copies from the repository."""
    lines = re.findall(r"^COPY (.+)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    return [name for line in lines for name in line.split()[:-1]]


def test_the_image_has_the_files_that_the_package_is_built_from():
    image, setup = (REPOSITORY.joinpath(n).read_text() for n in ("Dockerfile", "setup.py"))
    copied = copied_files()
    read = {*re.findall(r'Path\("([\w./]+)"\)', setup), "setup.py", "pyproject.toml", "LICENSE"}
    needed = {name.partition("/")[0] for name in read} | {"launch", "ds_configs", "constraints.txt"}
    assert set(copied) == needed
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []
    assert "\nFROM python:3.11-slim" in image  # as .ci/run and constraints.txt
    ((options, extras),) = re.findall(r'pip install (.+) "\.\[([\w,]+)\]"', image)
    assert "--constraint constraints.txt" in options
    assert [extra for extra in extras.split(",") if f'"{extra}": [' not in setup] == []


def test_the_facts_about_deepspeed_are_those_of_the_version_that_is_pinned_and_name_real_tests():
    page = (REPOSITORY / "docs" / "deepspeed.md").read_text()
    pins = (REPOSITORY / "constraints.txt").read_text().splitlines()
    version = re.search(r"DeepSpeed ([\d.]*\d)", page)[1]
    assert f"deepspeed=={version}" in pins
    named = set(re.findall(r"`(test_\w+)", page))
    sources = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert named
    assert named <= set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))


def test_pages_name_all_recipes_and_all_keys_that_take_code():
    configuration, layout = (
        (REPOSITORY / "docs" / f"{name}.md").read_text() for name in ("configuration", "layout")
    )
    recipes = {path.stem for path in (REPOSITORY / "launch" / "recipes").glob("*.yaml")}
    assert [name for name in recipes if f"`{name}`" not in configuration] == []
    registries = (ESTIMATORS, LAYER_POLICIES, SCHEDULES, TASKS, METRICS)
    assert [each._key for each in registries if f"`{each._key}`" not in layout] == []


SRUN = "srun --kill-on-bad-exit=1 "
MOUNTS = "HERE:HERE,LAUNCH:LAUNCH"
PYTHON = "python launch/train.py --config c"
IMAGES = {
    (): SRUN + PYTHON,
    ("--container-image", "here.sqsh"): f"{SRUN}--container-image=HERE/here.sqsh "
    f"--container-mounts={MOUNTS} --container-workdir=HERE {PYTHON}",
    ("--container-mounts=/data:/data", "--container-image=a b.sif"): f"{SRUN}apptainer exec "
    f"--nv --bind {MOUNTS},/data:/data --pwd HERE a b.sif {PYTHON}",
}
"""Options of a batch script, and the command of its ranks in the folder HERE."""


@pytest.mark.parametrize("options", IMAGES)
@pytest.mark.parametrize("name", ["one_node", "several_nodes", "sweep", "elastic"])
def test_a_batch_script_starts_its_ranks_in_the_container(name, options, tmp_path):
    """srun and python, which would not run here, print their arguments."""
    (tmp_path / "launch").symlink_to(REPOSITORY / "launch")
    for program in ("srun", "python"):
        (tmp_path / program).write_text(f'#!/bin/sh\nprintf "%s\\n" {program} "$@"\n')
        (tmp_path / program).chmod(0o755)
    (tmp_path / "here.sqsh").touch()
    (tmp_path / "squeue").symlink_to("/bin/true")
    variables = {"PATH": f"{tmp_path}:{os.defpath}", "VIRTUAL_ENV": "here", "SLURM_JOB_ID": "1"}
    variables |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "1"}
    (tmp_path / "lighthouse-1").write_text("http://h:1")
    command = ["bash", f"{REPOSITORY}/launch/slurm/{name}.sbatch", *options, "--config", "c"]
    words = subprocess.check_output(command, cwd=tmp_path, env=variables, text=True).splitlines()
    if name == "sweep":
        *sweep, ranks = words
        assert " ".join(sweep) == "python launch/sweep.py --config c --index 3 --launcher"
        words = [*shlex.split(ranks), "launch/train.py", "--config", "c"]
    if name == "elastic":
        assert words.pop() == "elastic.lighthouse=http://h:1"
    launch = str((tmp_path / "launch").resolve())
    expected = IMAGES[options].replace("HERE", str(tmp_path.resolve())).replace("LAUNCH", launch)
    assert " ".join(words) == expected
