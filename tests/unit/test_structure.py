"""What holds of the source as a whole: who may import what, how short commands are, what never occurs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
from assets import REPOSITORY
from packaging.version import Version

PACKAGE = sorted((REPOSITORY / "lezo_ds").rglob("*.py"))
COMMANDS = sorted(
    path for path in (REPOSITORY / "lezo_ds" / "commands").glob("*.py") if path.stem != "__init__"
)
SCRIPTS = sorted((REPOSITORY / "launch").glob("*.py"))

KNOW_DEEPSPEED = {
    "lezo_ds/sharding/zero3.py",
    "lezo_ds/distributed/accelerator.py",
    "lezo_ds/distributed/collectives.py",
    "lezo_ds/distributed/heartbeat.py",
    "lezo_ds/distributed/rendezvous.py",
    "lezo_ds/distributed/start.py",
}
"""The modules whose job it is: ZeRO-3's internals, what the ranks exchange, and where they meet."""

DISTRIBUTED_LIBRARIES = ("deepspeed", "torch.distributed", "mpi4py")
MAX_COMMAND_LINES = 60
SAFE_YAML_LOADERS = {"safe_load"}
OWN_PATTERNS = "tests/unit/test_structure.py"
BINARY = (".png", ".gz", ".safetensors")


def name_of(path):
    return path.relative_to(REPOSITORY).as_posix()


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_part_of(module, library):
    return module == library or module.startswith(library + ".")


def tracked_texts():
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path = REPOSITORY / name
        if path.is_file() and path.suffix not in BINARY and name not in ("LICENSE", OWN_PATTERNS):
            yield name, path.read_text(encoding="utf-8")


def tracked_lines_with(pattern):
    return [
        f"{name}: {line.strip()}"
        for name, text in tracked_texts()
        for line in text.splitlines()
        if re.search(pattern, line)
    ]


def calls_in(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}


def test_only_the_modules_whose_job_it_is_import_a_distributed_library():
    importers = {
        name_of(path)
        for path in PACKAGE + SCRIPTS
        for module in imported_modules(ast.parse(path.read_text()))
        if any(is_part_of(module, library) for library in DISTRIBUTED_LIBRARIES)
    }
    assert importers == KNOW_DEEPSPEED


FLOORS = (
    {"errors"},
    {"registry", "files", "shipped"},
    {"zo"},
    {"noise", "tasks", "journal", "trackers"},
    {"config"},
    {"recipes"},
    {"distributed"},
    {"sharding"},
    {"forward"},
    {"model"},
    {"data"},
    {"engine"},
    {"runs"},
    {"command_line"},
    {"tools"},
    {"commands"},
)
"""The rooms of the package from the ground up; a room uses those below it, and none above or next to it."""


def rooms_used_by(path):
    for module in imported_modules(ast.parse(path.read_text())):
        parts = module.split(".")
        if parts[0] == "lezo_ds" and len(parts) > 1 and parts[1] != "__version__":
            yield parts[1]


def room_of(path):
    return path.relative_to(REPOSITORY / "lezo_ds").with_suffix("").parts[0]


@pytest.mark.parametrize(
    "path",
    [path for path in PACKAGE if path.parent.name != "lezo_ds" or not path.stem.startswith("__")],
    ids=name_of,
)
def test_arrows_point_down(path):
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    room = room_of(path)
    for used in set(rooms_used_by(path)) - {room}:
        assert floor_of[used] < floor_of[room], f"{room} uses {used}"


def test_every_room_has_its_floor():
    assert {room_of(path) for path in PACKAGE} - {"__init__", "__main__"} == set().union(*FLOORS)


LIGHT_ROOMS = ("errors", "registry", "zo", "tasks", "journal", "trackers", "config", "recipes")
HEAVY_LIBRARIES = ("torch", "deepspeed", "transformers", "datasets", "pandas")


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_a_light_room_loads_no_heavy_library(room):
    code = f"import sys, lezo_ds.{room}; print([name for name in {HEAVY_LIBRARIES} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_no_module_reaches_torch_distributed_through_torch():
    users = [
        name_of(path)
        for path in PACKAGE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed")
    ]
    assert users == []


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_command_only_parses_builds_and_runs(path):
    text = path.read_text()
    body = ast.parse(text).body
    definitions = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert [node.name for node in definitions] == ["main"]
    assert len(text.splitlines()) < MAX_COMMAND_LINES


@pytest.mark.parametrize("path", PACKAGE + SCRIPTS, ids=name_of)
def test_nothing_that_could_run_foreign_code_is_loaded(path):
    modules = set(imported_modules(ast.parse(path.read_text())))
    assert not [m for m in modules if any(is_part_of(m, unsafe) for unsafe in ("pickle", "dill", "marshal"))]
    for function, keywords in calls_in(path):
        assert keywords.get("trust_remote_code", "False") == "False", function
        if function == "torch.load":
            assert keywords.get("weights_only") == "True"
        if function.startswith("yaml.") and function.endswith("load"):
            assert function.removeprefix("yaml.") in SAFE_YAML_LOADERS


def test_no_tracked_file_names_a_package_index():
    assert tracked_lines_with(r"index[-_]url|find[-_]links|trusted[-_]host|file://|pypi\.|pythonhosted") == []


def test_no_tracked_file_names_a_private_path():
    assert tracked_lines_with(r"(?<![\w.}\])])/(?:home|root|Users|work|tmp|opt|mnt)/") == []


def test_every_requirement_is_pinned_to_one_version():
    pins = dict(
        line.lower().replace("_", "-").split("==")
        for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    setup = ast.parse((REPOSITORY / "setup.py").read_text())
    call = next(node for node in ast.walk(setup) if isinstance(node, ast.Call))
    keywords = {word.arg: word.value for word in call.keywords}
    extras = ast.literal_eval(keywords["extras_require"])
    wanted = [*ast.literal_eval(keywords["install_requires"]), *extras["dev"]]
    names = {re.split(r"[ ;>]", name)[0].lower().replace("_", "-") for name in wanted}
    assert names <= pins.keys()
    bounded = [
        *ast.literal_eval(keywords["install_requires"]),
        *extras["demo"],
        *extras["docs"],
        *extras["report"],
    ]
    for name, bound in (requirement.lower().replace("_", "-").split(">=") for requirement in bounded):
        assert Version(bound) <= Version(pins[name]), f"{name} was never tried at {bound}"
