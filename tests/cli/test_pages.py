"""What the pages show runs, shortened and on forked ranks, and what they name exists."""

import csv
import math
import re
import shlex
import subprocess
import sys
import textwrap

import pytest
from assets import REPOSITORY, write_data, write_reader
from commands import environment, run_forked_well, run_well, train
from own_data import write_chat_model, write_tickets
from run_ends import records_of, results_of
from thorough import thorough

from lezo_ds.zo.records import StepRecord

pytestmark = pytest.mark.distributed

TUTORIAL = "docs/tutorial.md"
MODEL = "runs/demo/assets/SmolLM2-135M-Instruct"
FILES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
PAGES = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in FILES}


def blocks(page, language):
    """Return the code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


def shown_files(page):
    """Return the files that a page shows: blocks whose first line is a comment with their name."""
    found = {}
    for block in (*blocks(page, "python"), *blocks(page, "yaml")):
        if name := re.match(r"# ([\w-]+\.(?:py|yaml))\b", block):
            found[name[1]] = block
    return found


def commands(page):
    """Return the commands of a page, each as one line."""
    joined = "".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = (" ".join(line.partition(" #")[0].split()) for line in joined.splitlines())
    return [line for line in lines if line]


HISTORY = "CHANGELOG.md"  # names what is gone
FEW_STEPS = "train.steps=4 train.eval_every=2 data.num_train=64 data.num_dev=16 data.num_test=16"
STARTED = re.compile(r"(.*?)(launch/\S+|--module lezo_ds|lezo-ds)(?: (.*))?")
"""A command: its launcher, what is started, and the arguments."""
KINDS = ("deepspeed ", "mpirun ", "python ", "lezo-ds ")
OTHERS = ("make ", ". .venv/bin/activate", "pip ")
WITH_COMMANDS = [page for page in PAGES if any(line.startswith(KINDS) for line in commands(page))]


@pytest.fixture
def root(tmp_path):
    """A clone after `make demo`, with a tiny model that reads any text, and a user's tables."""
    for name in ("launch", "ds_configs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    labels = (" great", " terrible")  # tokens of the demo's model, too
    write_chat_model(tmp_path / MODEL, num_blocks=4, num_positions=1024, added_words=labels)
    write_data(tmp_path / "runs/demo/assets/reviews", num_train=1200, num_validation=500)
    write_tickets(tmp_path / "tickets.csv")
    write_tickets(tmp_path / "new.csv", num_rows=9)
    return tmp_path


def write_files(page, root):
    for name, content in shown_files(page).items():
        (root / name).write_text(content)


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
    words = []
    for word in shlex.split(arguments):  # a shell expands *
        words += sorted(root.glob(word)) if "*" in word else [word]
    run_forked_well(words, program=program, num_ranks=ranks, directory=root)


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
    lines = [line for page in PAGES for line in commands(page)]
    assert [line for line in lines if not line.startswith((*KINDS, *OTHERS))] == []
    assert {"README.md", TUTORIAL} <= set(WITH_COMMANDS)


@pytest.mark.parametrize(
    "page", [page if page == "README.md" else thorough(page) for page in WITH_COMMANDS]
)
def test_the_commands_of_a_page_run_in_their_order(page, root):
    if page == TUTORIAL:  # which writes its own tables
        (root / "tickets.csv").unlink()
        (root / "new.csv").unlink()
    write_files(page, root)
    for line in commands(page):
        run_line(root, line)
    for name in ("labels.csv", "labels-trained.csv") if page == TUTORIAL else ():
        with (root / name).open(newline="") as file:
            predicted = [row["predicted"] for row in csv.DictReader(file)]
        assert len(predicted) == 20
        assert set(predicted) <= {"billing", "bug", "shipping"}


def test_make_knows_the_targets():
    lines = {line for page in PAGES for line in commands(page) if "make " in line}
    for line in lines:
        run_well(["make", "--dry-run", *line.split()[1:]])


def test_the_program_of_the_pages_trains(root):
    programs = [each for page in PAGES for each in blocks(page, "python")]
    (program,) = [each for each in programs if "train_batch" in each]
    write_reader(root / MODEL)  # its sentences have the same number of words
    (root / "program.py").write_text(program)
    out = run_forked_well([], program=root / "program.py", directory=root).out
    losses = [float(line.split()[1]) for line in out.splitlines() if re.match(r"\d+ ", line)]
    assert losses and all(map(math.isfinite, losses))


def test_the_components_of_the_pages_train_from_the_recipes_folder(root):
    page = "docs/layout.md"
    write_files(page, root)
    (recipe,) = blocks(TUTORIAL, "yaml")
    (root / "tickets.yaml").write_text(recipe)
    components = re.findall(r"`(zo\.\w+=(\w+):\w+)`", PAGES[page])
    assert {f"{module}.py" for _, module in components} == shown_files(page).keys()
    keys = ["train.steps=4", "train.eval_every=2", "zo.estimator_options.size=0.5"]
    run_dir = root / "runs" / "components"
    train(root / "tickets.yaml", run_dir, *keys, *(key for key, _ in components), directory=root)
    assert results_of(run_dir)["finished"]
    dropped = [record.dropped_layers for record in records_of(run_dir, StepRecord)]
    assert len(dropped) == 4 and len(set(dropped)) > 1


def anchors(text):
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY])
def test_every_file_and_heading_that_a_page_names_exists(page):
    names = re.findall(r"\b(?:docs|launch|ds_configs|lezo_ds|tests)/[\w./-]*[\w/]", PAGES[page])
    assert [name for name in names if not (REPOSITORY / name).exists()] == []
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", PAGES[page])
    lost = []
    for link, anchor in links:
        target = (REPOSITORY / page).parent.joinpath(link) if link else REPOSITORY / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
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
