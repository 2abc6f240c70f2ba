"""What holds of the source as a whole: its size, who may import what, and what never occurs."""

import ast
import re
import subprocess
import sys
import tokenize

import pytest
from assets import REPOSITORY
from packaging.version import Version

PACKAGE = sorted((REPOSITORY / "lezo_ds").rglob("*.py"))
SCRIPTS = sorted((REPOSITORY / "launch").rglob("*.py"))

CODE_TOKENS = 145_000
"""Most code tokens of Python in lezo_ds. Comments, docstrings, layout and lines are free."""

FLOORS = "errors | files user_code | registry | zo | noise journal | config | distributed"
FLOORS += " | replicas | sharding | forward | checkpoints | data | agreement | engine"
FLOORS += " | runs | tools | cli"
"""The rooms of the package from the ground up. A room uses only those below it."""

KNOW_DEEPSPEED = {"config", "sharding", "distributed"}
DISTRIBUTED_LIBRARIES = ("deepspeed", "torch.distributed", "mpi4py")
LIGHT_ROOMS = ("errors", "registry", "user_code", "zo", "journal", "config", "cli")
HEAVY_LIBRARIES = ("torch", "deepspeed", "transformers", "datasets", "pandas")
BINARY = (".png", ".gz", ".safetensors")


def name_of(path):
    return path.relative_to(REPOSITORY).as_posix()


def room_of(path):
    return path.relative_to(REPOSITORY / "lezo_ds").with_suffix("").parts[0]


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_part_of(module, library):
    return module == library or module.startswith(library + ".")


def num_code_tokens(path):
    """Count tokens as a reader does: without comments, docstrings and layout."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))[1:-1]
    counted = [token for token in tokens if token.type not in layout]
    return sum(not re.match(r"[rbuRBU]*(\"\"\"|''')", token.string) for token in counted)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 counts parts of f-strings")
def test_the_package_keeps_its_size():
    assert sum(map(num_code_tokens, PACKAGE)) <= CODE_TOKENS


def test_a_statement_does_one_thing():
    for path in PACKAGE + SCRIPTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                is_packed = any(isinstance(target, ast.Tuple) for target in node.targets)
                assert not is_packed, f"{name_of(path)} line {node.lineno} assigns several values"
            if isinstance(node, ast.IfExp):
                inner = [each for each in ast.walk(node) if isinstance(each, ast.IfExp)]
                assert inner == [node], f"{name_of(path)} line {node.lineno} nests conditionals"


def test_arrows_point_down():
    floors = enumerate(FLOORS.split("|"))
    floor_of = {room: floor for floor, rooms in floors for room in rooms.split()}
    named = [path for path in PACKAGE if not room_of(path).startswith("__")]
    assert {room_of(path) for path in named} == set(floor_of)
    for path in named:
        for module in imported_modules(path):
            package, _, rest = module.partition(".")
            used = rest.partition(".")[0]
            if package == "lezo_ds" and used in floor_of and used != room_of(path):
                assert floor_of[used] < floor_of[room_of(path)], f"{name_of(path)} uses {used}"


def test_only_the_rooms_whose_job_it_is_import_a_distributed_library():
    users = {
        room_of(path) if path in PACKAGE else name_of(path)
        for path in PACKAGE + SCRIPTS
        for module in imported_modules(path)
        if any(is_part_of(module, library) for library in DISTRIBUTED_LIBRARIES)
    }
    assert users == KNOW_DEEPSPEED


def test_light_rooms_load_no_heavy_library():
    imports = "; ".join(f"import lezo_ds.{room}" for room in LIGHT_ROOMS)
    loaded = f"print([name for name in {HEAVY_LIBRARIES} if name in sys.modules])"
    code = f"import sys; {imports}; {loaded}"
    out = subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, text=True)
    assert out.strip() == "[]"


@pytest.mark.parametrize("path", PACKAGE + SCRIPTS, ids=name_of)
def test_nothing_that_could_run_foreign_code_is_loaded(path):
    unsafe = ("pickle", "dill", "marshal")
    for module in imported_modules(path):
        assert not any(is_part_of(module, library) for library in unsafe)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert not ast.unparse(node).startswith("torch.distributed")
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert keywords.get("trust_remote_code", "False") == "False", function
            if function == "torch.load":
                assert keywords.get("weights_only") == "True"
            if function == "YAML":
                assert keywords.get("typ") == "'safe'"
            assert not function.startswith("yaml.") or function in ("yaml.load", "yaml.dump")


def test_no_tracked_file_names_a_package_index_or_a_private_path():
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    lines = []
    for name in set(listed.stdout.splitlines()) - {"LICENSE", name_of(REPOSITORY / __file__)}:
        path = REPOSITORY / name
        if path.is_file() and path.suffix not in BINARY:
            lines += [f"{name}: {line.strip()}" for line in path.read_text("utf-8").splitlines()]
    patterns = [r"index[-_]url|find[-_]links|trusted[-_]host|file://|pypi\.|pythonhosted"]
    patterns.append(r"(?<![\w.}\])])/(?:home|root|Users|work|tmp|opt|mnt)/")
    for pattern in patterns:
        assert [line for line in lines if re.search(pattern, line.partition(": ")[2])] == []


def test_every_requirement_is_pinned_to_one_version():
    text = (REPOSITORY / "constraints.txt").read_text().lower().replace("_", "-")
    pins = dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))
    setup = ast.parse((REPOSITORY / "setup.py").read_text())
    call = next(node for node in ast.walk(setup) if isinstance(node, ast.Call))
    keywords = {word.arg: word.value for word in call.keywords}
    extras = ast.literal_eval(keywords["extras_require"])
    required = ast.literal_eval(keywords["install_requires"])
    for requirement in [*required, *(name for extra in extras.values() for name in extra)]:
        words = requirement.partition(";")[0].strip().lower().replace("_", "-")
        name, _, bound = words.partition(">=")
        assert name in pins
        assert not bound or Version(bound) <= Version(pins[name]), f"{name} is not tried at {bound}"
