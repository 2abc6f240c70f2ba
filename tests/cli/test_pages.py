"""What the pages show runs: commands, shortened, on forked ranks, and a program. What they name
exists."""

from __future__ import annotations

import math
import re
import shlex

import pytest
from assets import REPOSITORY, write_data, write_reader
from commands import run_forked_well, run_well
from own_data import PLAIN, write_tickets
from run_ends import records_of, results_of

from lezo_ds.zo.records import StepRecord

pytestmark = pytest.mark.distributed

FILES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FILES += [REPOSITORY / name for name in ("SECURITY.md", "CONTRIBUTING.md")]
PAGES = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in FILES}
SHOWN = "".join(PAGES.values())
FEW_STEPS = "train.steps=4 train.eval_every=2 data.num_train=64 data.num_dev=16 data.num_test=16"
PREPARED_RUN = "runs/first"
STARTED = re.compile(r"(.*?)(launch/\S+|--module lezo_ds|lezo-ds)(?: (.*))?")
"""A command: its launcher, what is started, and the arguments."""
KINDS = ("deepspeed ", "mpirun ", "python ", "lezo-ds ")
OTHERS = (
    "make ",
    "git ",
    "cd ",
    ". .venv/bin/activate",
    "pip ",
    "sbatch ",
    "docker ",
    "apptainer ",
    "#",
)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", SHOWN, re.MULTILINE | re.DOTALL)


def command_lines():
    text = "".join(blocks("bash")).replace("\\\n", " ")
    return list(dict.fromkeys(" ".join(line.split()) for line in text.splitlines() if line.strip()))


RUN_HERE = [line.partition(" #")[0].strip() for line in command_lines() if line.startswith(KINDS)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory that looks like the repository's root after `make demo` with a model that
    cannot read."""
    directory = tmp_path_factory.mktemp("root")
    for name in ("launch", "ds_configs"):
        (directory / name).symlink_to(REPOSITORY / name)
    real = directory / "runs" / "demo" / "assets"
    vocabulary = write_reader(real / "SmolLM2-135M-Instruct") / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace('"grim"', '"\\n"'))  # which ends answers
    (real / "SmolLM2-135M-Instruct" / "chat_template.jinja").write_text(PLAIN)
    write_data(real / "reviews", num_train=1200, num_validation=100)
    for text in blocks("yaml"):
        if "tickets.csv" in text:
            (directory / "tickets.yaml").write_text(text)
        if "objective: verdict:" in text:
            (directory / "verdict.yaml").write_text(text)
    for text in blocks("python"):
        if "@reward" in text:
            (directory / "verdict.py").write_text(text)
    write_tickets(directory / "tickets.csv")
    write_tickets(directory / "new.csv", num_rows=9)
    return directory


@pytest.fixture(scope="module")
def run_of_the_page(root):
    """The run that later commands of the pages read."""
    run_on_forked_ranks(root, next(line for line in RUN_HERE if f"run_dir={PREPARED_RUN}" in line))
    return root / PREPARED_RUN


def run_on_forked_ranks(root, line):
    launcher, started, arguments = STARTED.fullmatch(shortened(line)).groups(default="")
    num_ranks = re.search(r"(?:--num_gpus|-np) (\d+)", launcher)
    is_script = started.startswith("launch/")
    program = (
        started.removeprefix("launch/") if is_script else REPOSITORY / "lezo_ds" / "__main__.py"
    )
    ranks = int(num_ranks[1]) if num_ranks else 1
    run_forked_well(shlex.split(arguments), program=program, num_ranks=ranks, directory=root)


def shortened(line):
    """Return a command that ends soon: few steps, or a dry run of what needs GPUs or the hub."""
    line = line.replace("=0.5,0.75 seed=0,1", "=0.5 seed=0").replace(
        "--out tickets.yaml", "--out written.yaml"
    )
    if not re.search(r"(launch/|lezo[-_]ds )(train|benchmark|sweep)", line):
        return line
    if "--help" in line or ("--config paper" in line and "--dry-run" in line):
        return line
    if re.search(r"--config (paper|\S*opt-)", line):
        return f"{line.split(' model.path=')[0]} --dry-run"
    line = re.sub(r"train\.steps=\d+", "train.steps=6", line)
    return re.sub(r"(--config \S+)", rf"\1 {FEW_STEPS}", line)


def test_every_command_is_of_a_kind_that_a_test_runs():
    assert [line for line in command_lines() if not line.startswith((*KINDS, *OTHERS))] == []
    assert RUN_HERE


@pytest.mark.thorough
@pytest.mark.parametrize("line", RUN_HERE)
def test_a_command_of_the_pages_runs(line, root, run_of_the_page):
    run_on_forked_ranks(root, line)


@pytest.mark.parametrize("line", [line for line in command_lines() if line.startswith("make ")])
def test_make_knows_the_target(line):
    run_well(["make", "--dry-run", *line.split()[1:]])


def test_the_program_of_the_pages_trains(root):
    (program,) = [text for text in blocks("python") if "train_batch" in text]
    (root / "program.py").write_text(program)
    out = run_forked_well([], program=root / "program.py", directory=root).out
    losses = [float(line.split()[1]) for line in out.splitlines() if re.match(r"\d+ ", line)]
    assert losses
    assert all(map(math.isfinite, losses))


def test_the_components_of_the_pages_train_from_the_recipes_folder(root):
    arguments = ["--config", root / "tickets.yaml", "run_dir=runs/components", "train.steps=4"]
    arguments += ["train.eval_every=2", "zo.estimator_options.size=0.5"]
    for key, module, name in re.findall(r"`(zo\.\w+)=(\w+):(\w+)`", SHOWN):
        (code,) = [text for text in blocks("python") if f"class {name}(" in text]
        (root / f"{module}.py").write_text(code)
        arguments.append(f"{key}={module}:{name}")
    assert len(arguments) == 8
    run_forked_well(arguments, directory=root)
    assert results_of(root / "runs" / "components")["finished"]
    dropped = [record.dropped_layers for record in records_of(root / "runs/components", StepRecord)]
    assert len(dropped) == 4 and len(set(dropped)) > 1


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page):
    names = set(
        re.findall(r"\b(?:docs|launch|ds_configs|lezo_ds|tests)/[\w./-]*[\w/]", PAGES[page])
    )
    links = {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[page]) if "://" not in link}
    assert [name for name in sorted(names) if not (REPOSITORY / name).exists()] == []
    assert [
        link for link in sorted(links) if not (REPOSITORY / page).parent.joinpath(link).exists()
    ] == []
