"""What the README and docs/ show runs: commands, shortened, and a program. Files that they name exist.

The commands run on forked ranks here; `make test-all` also starts them by their launchers.
"""

from __future__ import annotations

import math
import re
import shlex
import sys

import pytest
import yaml
from assets import REPOSITORY, write_data, write_reader
from commands import MPI_ANYWHERE, free_port, run_forked_well, run_well
from own_data import write_tickets

from lezo_ds.model.snapshots import read_manifest, snapshot_path

PATHS = [
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    REPOSITORY / "SECURITY.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "ds_configs").glob("*.json")),
]
"""The pages whose names of files are checked. The changelog also names files that are gone."""
PAGES = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in PATHS}
SHOWN = "".join(text for name, text in PAGES.items() if name == "README.md" or name.startswith("docs/"))
"""The pages whose commands run."""
SHORTENED = "train.steps=4 train.eval_every=2 data.num_train=64 data.num_dev=16 data.num_test=16"
MORE_STEPS = 6
PREPARED_RUN = "runs/first"
WRITTEN = "written.yaml"
"""What `lezo-ds init` writes here; the recipe that the page shows is there before."""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", SHOWN, re.MULTILINE | re.DOTALL)


def command_lines():
    text = "".join(blocks("bash")).replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines()]


def lines_with(*beginnings):
    return [line for line in command_lines() if line.startswith(beginnings)]


STARTED = re.compile(r"(.*?)(launch/\S+|--module lezo_ds|lezo-ds)(?: (.*))?")
"""A command: its launcher, what is started, and the arguments."""
TRAINS = re.compile(r"launch/(train|benchmark)\.py|lezo[-_]ds (train|benchmark)")
RUN_HERE = list(dict.fromkeys(lines_with("deepspeed ", "mpirun ", "python ", "lezo-ds ")))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory that looks like the repository's root after `make demo` with a model that cannot read."""
    directory = tmp_path_factory.mktemp("root")
    for name in ("launch", "ds_configs"):
        (directory / name).symlink_to(REPOSITORY / name)
    real = directory / "runs" / "demo" / "assets"
    write_reader(real / "SmolLM2-135M-Instruct")
    write_data(real / "reviews", num_train=600, num_validation=500)
    (recipe,) = [text for text in blocks("yaml") if "tickets.csv" in text]
    (directory / "tickets.yaml").write_text(recipe)
    write_tickets(directory / "tickets.csv")
    train = real / "reviews" / "train.jsonl"
    train.write_text(train.read_text() * 2)  # as many as the recipe asks for
    return directory


@pytest.fixture(scope="module")
def run_of_the_page(root):
    """The run that later commands of the page read."""
    command = next(line for line in RUN_HERE if f"run_dir={PREPARED_RUN}" in line)
    run_on_forked_ranks(root, command)
    return root / PREPARED_RUN


def run_on_forked_ranks(root, line):
    launcher, started, arguments = STARTED.fullmatch(shortened(line)).groups(default="")
    num_ranks = re.search(r"(?:--num_gpus|-np) (\d+)", launcher)
    is_script = started.startswith("launch/")
    program = started.removeprefix("launch/") if is_script else REPOSITORY / "lezo_ds" / "__main__.py"
    run_forked_well(
        shlex.split(arguments),
        program=program,
        num_ranks=int(num_ranks[1]) if num_ranks else 1,
        directory=root,
    )


def shortened(line):
    """Return a command that ends soon: few steps, or a dry run of what needs GPUs or the hub."""
    line = line.replace(" seed=0,1", " seed=0").replace("--out tickets.yaml", f"--out {WRITTEN}")
    if not TRAINS.search(line) or "--help" in line or "--dry-run" in line:
        return line
    if "launch/evaluate.py --model" in line:
        return f"{line} data.num_test=16"
    if re.search(r"--config (\S*/)?opt-", line):
        return f"{line.split(' model.path=')[0]} --dry-run"
    line = re.sub(r"train\.steps=\d+", f"train.steps={MORE_STEPS}", line)
    return re.sub(r"(--config \S+)", rf"\1 {SHORTENED}", line)


def test_the_recipe_of_the_page_is_the_one_that_init_writes(root):
    (root / WRITTEN).unlink(missing_ok=True)
    (line,) = [line for line in RUN_HERE if line.startswith("lezo-ds init runs")]
    run_on_forked_ranks(root, line)
    shown, written = (yaml.safe_load((root / name).read_text()) for name in ("tickets.yaml", WRITTEN))
    (root / WRITTEN).unlink()
    assert {name: keys.keys() for name, keys in shown.items() if isinstance(keys, dict)} == {
        name: keys.keys() for name, keys in written.items() if isinstance(keys, dict)
    }
    written["data"]["max_length"] = 2048  # that model has fewer positions
    assert shown["data"] == written["data"]
    assert (shown["run_dir"], shown["model"]["path"]) == (written["run_dir"], written["model"]["path"])


def test_every_command_is_of_a_kind_that_a_test_runs():
    known = ("make ", ". .venv/bin/activate", "deepspeed ", "mpirun ", "python ", "lezo-ds ")
    assert lines_with(*known) == command_lines() != []


@pytest.mark.parametrize("line", RUN_HERE)
def test_a_command_of_the_page_runs(line, root, run_of_the_page):
    assert run_of_the_page.is_dir()
    run_on_forked_ranks(root, line)


@pytest.mark.long
@pytest.mark.parametrize("line", RUN_HERE)
def test_a_command_of_the_page_runs_under_its_launcher(line, root, run_of_the_page):
    assert run_of_the_page.is_dir()
    line = shortened(line).replace("deepspeed ", f"deepspeed --master_port {free_port()} ", 1)
    line = re.sub("^lezo-ds", f"{shlex.quote(sys.executable)} -m lezo_ds", line)
    run_well(["bash", "-c", f"cd {shlex.quote(str(root))} && {line}"], **MPI_ANYWHERE)


@pytest.mark.parametrize("line", lines_with("make "))
def test_make_knows_the_target(line):
    run_well(["make", "--dry-run", *line.split()[1:]])


def test_the_environment_that_is_activated_is_the_one_make_creates():
    assert lines_with(". ") == [". .venv/bin/activate"]
    assert "VENV := .venv\n" in (REPOSITORY / "Makefile").read_text()


def test_the_program_of_the_page_trains_and_saves(root):
    (program,) = [text for text in blocks("python") if "train_batch" in text]
    (root / "program.py").write_text(program)
    out = run_forked_well([], program=root / "program.py", directory=root).out
    losses = [float(line.split()[1]) for line in out.splitlines() if re.match(r"\d+ ", line)]
    assert len(losses) == 20
    assert all(map(math.isfinite, losses))
    manifest = read_manifest(snapshot_path(root / "runs" / "own-loop", 20))
    assert manifest["digest"] != manifest["base"]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page):
    names = set(re.findall(r"\b(?:docs|launch|ds_configs|lezo_ds|tests)/[\w./-]*[\w/]", PAGES[page]))
    links = {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[page]) if "://" not in link}
    assert [name for name in sorted(names) if not (REPOSITORY / name).exists()] == []
    assert [link for link in sorted(links) if not (REPOSITORY / page).parent.joinpath(link).exists()] == []


SELECTIONS = sorted(
    {
        (files, words)
        for text in PAGES.values()
        for files, words in re.findall(r"`(?:[^`\n]*? )??((?:tests/[\w/]+\.py ?)+)-k (\w+|\"[^\"]+\")`", text)
    }
)


def test_pages_select_tests():
    assert len(SELECTIONS) > 10


@pytest.mark.parametrize(("files", "words"), SELECTIONS)
def test_a_selection_of_tests_that_a_page_names_finds_one_for_each_word(files, words):
    found = [*files.split()]
    for name in files.split():
        found += re.findall(r"^def (test_\w+)", (REPOSITORY / name).read_text(), re.MULTILINE)
    wanted = set(re.findall(r"\w+", words)) - {"or", "not"}
    assert {word for word in wanted if not any(word in name for name in found)} == set()


def test_the_layout_names_every_room_of_the_package():
    rooms = {path.stem for path in (REPOSITORY / "lezo_ds").glob("[a-z]*") if path.suffix in ("", ".py")}
    described = re.findall(r"^\| \d+ \| `(\w+)` \|", PAGES["docs/layout.md"], re.MULTILINE)
    assert set(described) == rooms
