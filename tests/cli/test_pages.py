"""What the pages show runs: the commands of a page in their order, in a directory like a fresh
clone after `make demo`, shortened and on forked ranks. What the pages name exists."""

from __future__ import annotations

import csv
import math
import re
import shlex
import subprocess
import sys
import textwrap

import pytest
from assets import REPOSITORY, write_data, write_reader
from commands import environment, run_forked_well, run_well
from own_data import write_chat_model, write_tickets
from page_commands import blocks, commands, shown_files, write_files
from run_ends import records_of, results_of
from thorough import thorough

from lezo_ds.zo.records import StepRecord

pytestmark = pytest.mark.distributed

TUTORIAL = "docs/tutorial.md"
MODEL = "runs/demo/assets/SmolLM2-135M-Instruct"
FILES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
PAGES = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in FILES}
HISTORY = "CHANGELOG.md"  # names what is gone
FEW_STEPS = "train.steps=4 train.eval_every=2 data.num_train=64 data.num_dev=16 data.num_test=16"
STARTED = re.compile(r"(.*?)(launch/\S+|--module lezo_ds|lezo-ds)(?: (.*))?")
"""A command: its launcher, what is started, and the arguments."""
KINDS = ("deepspeed ", "mpirun ", "python ", "lezo-ds ")
OTHERS = ("make ", ". .venv/bin/activate", "pip ")
WITH_COMMANDS = [
    page for page, text in PAGES.items() if any(line.startswith(KINDS) for line in commands(text))
]


@pytest.fixture
def root(tmp_path):
    """A directory like the root of a clone after `make demo`, with a tiny model that reads any
    text, and tables of a user's own."""
    for name in ("launch", "ds_configs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    write_chat_model(tmp_path / MODEL)
    write_data(tmp_path / "runs/demo/assets/reviews", num_train=1200, num_validation=100)
    write_tickets(tmp_path / "tickets.csv")
    write_tickets(tmp_path / "new.csv", num_rows=9)
    return tmp_path


def run_line(root, line):
    """Run a command of a page in a directory: its ranks as forks of this process."""
    if not line.startswith(KINDS):
        return
    started = STARTED.fullmatch(shortened(line))
    if started is None:  # a program of the page
        program = [sys.executable, *shlex.split(line)[1:]]
        subprocess.run(program, cwd=root, env=environment(), check=True)
        return
    launcher, started, arguments = started.groups(default="")
    num_ranks = re.search(r"(?:--num_gpus|-np) (\d+)", launcher)
    program = REPOSITORY / "lezo_ds" / "__main__.py"
    if started.startswith("launch/"):
        program = started.removeprefix("launch/")
    ranks = int(num_ranks[1]) if num_ranks else 1
    run_forked_well(shlex.split(arguments), program=program, num_ranks=ranks, directory=root)


def shortened(line):
    """Return a command that ends soon: few steps, or a dry run of what needs GPUs or the hub."""
    line = line.replace("=0.5,0.75 seed=0,1", "=0.5 seed=0")
    if not re.search(r"(launch/|lezo[-_]ds )(train|benchmark|sweep)", line) or "--help" in line:
        return line
    if re.search(r"--config (paper|\S*opt-)", line):
        is_plan = "--dry-run" in line or "--print-config" in line
        return line if is_plan else f"{line} --dry-run"
    line = re.sub(r"train\.steps=\d+", "train.steps=6", line)
    return re.sub(r"(--config \S+)", rf"\1 {FEW_STEPS}", line)


def test_every_command_is_of_a_kind_that_a_test_runs():
    lines = [line for text in PAGES.values() for line in commands(text)]
    assert [line for line in lines if not line.startswith((*KINDS, *OTHERS))] == []
    assert {"README.md", TUTORIAL} <= set(WITH_COMMANDS)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(thorough(page) for page in WITH_COMMANDS if page not in ("README.md", TUTORIAL)),
    ],
)
def test_the_commands_of_a_page_run_in_their_order(page, root):
    write_files(PAGES[page], root)
    for line in commands(PAGES[page]):
        run_line(root, line)


@pytest.mark.thorough
def test_the_tutorial_labels_its_own_table(root):
    (root / "tickets.csv").unlink()
    (root / "new.csv").unlink()
    write_files(PAGES[TUTORIAL], root)
    for line in commands(PAGES[TUTORIAL]):
        run_line(root, line)
    for name in ("labels.csv", "labels-trained.csv"):
        with (root / name).open(newline="") as file:
            predicted = [row["predicted"] for row in csv.DictReader(file)]
        assert len(predicted) == 20
        assert set(predicted) <= {"billing", "bug", "shipping"}


@pytest.mark.parametrize(
    "line", sorted({line for text in PAGES.values() for line in commands(text) if "make " in line})
)
def test_make_knows_the_target(line):
    run_well(["make", "--dry-run", *line.split()[1:]])


def test_the_program_of_the_pages_trains(root):
    programs = [each for text in PAGES.values() for each in blocks(text, "python")]
    (program,) = [each for each in programs if "train_batch" in each]
    write_reader(root / MODEL)  # its sentences have the same number of words
    (root / "program.py").write_text(program)
    out = run_forked_well([], program=root / "program.py", directory=root).out
    losses = [float(line.split()[1]) for line in out.splitlines() if re.match(r"\d+ ", line)]
    assert losses
    assert all(map(math.isfinite, losses))


def test_the_components_of_the_pages_train_from_the_recipes_folder(root):
    page = PAGES["docs/layout.md"]
    write_files(page, root)
    (recipe,) = blocks(PAGES[TUTORIAL], "yaml")
    (root / "tickets.yaml").write_text(recipe)
    arguments = ["--config", root / "tickets.yaml", "run_dir=runs/components", "train.steps=4"]
    arguments += ["train.eval_every=2", "zo.estimator_options.size=0.5"]
    components = re.findall(r"`(zo\.\w+=(\w+):\w+)`", page)
    assert {f"{module}.py" for _, module in components} == shown_files(page).keys()
    arguments += [key for key, _ in components]
    run_forked_well(arguments, directory=root)
    assert results_of(root / "runs" / "components")["finished"]
    dropped = [record.dropped_layers for record in records_of(root / "runs/components", StepRecord)]
    assert len(dropped) == 4 and len(set(dropped)) > 1


def anchors(text):
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY])
def test_every_file_and_heading_that_a_page_names_exists(page):
    names = set(
        re.findall(r"\b(?:docs|launch|ds_configs|lezo_ds|tests)/[\w./-]*[\w/]", PAGES[page])
    )
    assert [name for name in sorted(names) if not (REPOSITORY / name).exists()] == []
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", PAGES[page])
    lost = []
    for link, anchor in links:
        target = (REPOSITORY / page).parent.joinpath(link) if link else REPOSITORY / page
        is_found = target.exists()
        if is_found and anchor:
            is_found = anchor in anchors(target.read_text())
        if not is_found:
            lost.append(f"{link}#{anchor}")
    assert lost == []


def test_pages_that_everyone_reads_stay_short():
    start = PAGES["README.md"].partition("```bash")[0]
    lines = [textwrap.wrap(paragraph, 40) for paragraph in start.split("\n\n")]
    assert sum(len(wrapped) + 1 for wrapped in lines) <= 16  # a phone shows some 20 lines
    assert len(PAGES["README.md"].split()) <= 900
    assert len(PAGES["docs/results.md"].split()) <= 2500
    releases = re.split(r"^## ", PAGES[HISTORY], flags=re.MULTILINE)[1:]
    assert max(len(release.strip().splitlines()) for release in releases) <= 31
