"""What the README shows is run as it stands there: its commands, shortened, and its program."""

from __future__ import annotations

import math
import re
import shlex

import pytest
from assets import REPOSITORY
from commands import MPI_ANYWHERE, free_port, run_well

from lezo_ds.model.snapshots import read_manifest, snapshot_path
from lezo_ds.tools.demo.pretrain import make_demo_assets

README = (REPOSITORY / "README.md").read_text()
SHORTENED = "train.steps=4 train.eval_every=2 data.num_dev=16 data.num_test=16"
MORE_STEPS = 6
PREPARED_RUN = "runs/first"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def command_lines():
    text = "".join(blocks("bash")).replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines()]


def lines_with(*beginnings):
    return [line for line in command_lines() if line.startswith(beginnings)]


RUN_HERE = lines_with("deepspeed ", "mpirun ", "python ")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory that looks like the repository's root after `make demo` with a model that cannot read."""
    directory = tmp_path_factory.mktemp("root")
    for name in ("launch", "ds_configs"):
        (directory / name).symlink_to(REPOSITORY / name)
    make_demo_assets(directory / "runs" / "demo" / "assets", steps=1)
    return directory


@pytest.fixture(scope="module")
def run_of_the_page(root):
    """The run that later commands of the page read."""
    command = next(line for line in RUN_HERE if f"run_dir={PREPARED_RUN}" in line)
    run_in(root, command)
    return root / PREPARED_RUN


def run_in(root, line):
    return run_well(["bash", "-c", f"cd {shlex.quote(str(root))} && {runnable(line)}"], **MPI_ANYWHERE)


def runnable(line):
    """Return a command that ends soon: few steps, or a dry run of what needs GPUs or the hub."""
    line = line.replace("deepspeed ", f"deepspeed --master_port {free_port()} ", 1)
    if "launch/train.py" not in line or "--help" in line or "--dry-run" in line:
        return line
    if "launch/evaluate.py --model" in line:
        return f"{line} data.num_test=16"
    if "--config opt-" in line:
        return f"{line.split(' model.path=')[0]} --dry-run"
    line = re.sub(r"train\.steps=\d+", f"train.steps={MORE_STEPS}", line)
    return re.sub(r"(--config \S+)", rf"\1 {SHORTENED}", line)


def test_every_command_is_of_a_kind_that_a_test_runs():
    known = ("make ", ". .venv/bin/activate", "deepspeed ", "mpirun ", "python ")
    assert lines_with(*known) == command_lines() != []


@pytest.mark.distributed
@pytest.mark.parametrize("line", RUN_HERE)
def test_a_command_of_the_page_runs(line, root, run_of_the_page):
    assert run_of_the_page.is_dir()
    run_in(root, line)


@pytest.mark.parametrize("line", lines_with("make "))
def test_make_knows_the_target(line):
    run_well(["make", "--dry-run", *line.split()[1:]])


def test_the_environment_that_is_activated_is_the_one_make_creates():
    assert lines_with(". ") == [". .venv/bin/activate"]
    assert "VENV := .venv\n" in (REPOSITORY / "Makefile").read_text()


def test_the_program_of_the_page_trains_and_saves(root):
    (program,) = [text for text in blocks("python") if "train_batch" in text]
    (root / "program.py").write_text(program)
    out = run_in(root, "python program.py").out
    losses = [float(line.split()[1]) for line in out.splitlines() if re.match(r"\d+ ", line)]
    assert len(losses) == 20
    assert all(map(math.isfinite, losses))
    manifest = read_manifest(snapshot_path(root / "runs" / "own-loop", 20))
    assert manifest["digest"] != manifest["base"]


def test_every_file_the_page_names_exists():
    names = set(re.findall(r"\b(?:launch|ds_configs|lezo_ds|tests)/[\w./-]*[\w/]", README))
    assert [name for name in sorted(names) if not (REPOSITORY / name).exists()] == []


def test_every_module_the_tree_names_exists():
    tree = next(block for block in blocks("text") if "perturbed_forward.py" in block)
    names = re.findall(r"\b\w+\.py\b", tree)
    modules = {path.name for path in (REPOSITORY / "lezo_ds").rglob("*.py")}
    assert set(names) - modules == set() != set(names)
