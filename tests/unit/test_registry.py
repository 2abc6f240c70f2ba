"""Components of the user's own: which module a name finds, and what the import leaves behind."""

import json
import sys

import pytest
from commands import run_well

from lezo_ds import registry
from lezo_ds.errors import UserError
from lezo_ds.registry import Registry

IMPORT = """
import json, sys
from lezo_ds import registry
registry.FOLDERS[:] = [sys.argv[1]]
sys.path.append(sys.argv[2])
judge = registry.Registry("metric", "data.metric").find("rewards:judge")
assert sys.path[-1] == sys.argv[1]
import xxhash
print(json.dumps([judge(), xxhash.__file__]))
"""

REWARDS = """
import colorsys, helper, plain.module, xxhash
def judge():
    return [module.__file__ for module in (helper, plain.module, colorsys, xxhash)]
"""


@pytest.fixture
def recipe_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "FOLDERS", [str(tmp_path)])
    return tmp_path


def write_modules(folder, **modules):
    for name, code in modules.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)


def test_the_named_module_is_the_one_in_the_recipes_folder_which_hides_no_library(tmp_path):
    """colorsys is of the standard library, and datasets requires xxhash."""
    folder = tmp_path / "recipes"
    installed = tmp_path / "installed"
    write_modules(folder, rewards=REWARDS, helper="", plain__module="", colorsys="", xxhash="")
    write_modules(installed, rewards="judge = None")
    (installed / "plain").mkdir()
    finished = run_well([sys.executable, "-c", IMPORT, folder, installed])
    (helper, module, *libraries), later = json.loads(finished.out)
    assert helper == str(folder / "helper.py")
    assert module == str(folder / "plain" / "module.py")
    assert [path for path in [*libraries, later] if path.startswith(str(tmp_path))] == []


def test_a_bare_folder_next_to_the_recipe_hides_no_installed_package(recipe_folder, monkeypatch):
    """As wandb writes a folder wandb next to the recipe."""
    (recipe_folder / "ledger").mkdir()
    installed = recipe_folder / "installed"
    write_modules(installed, ledger____init__="", ledger__book="def entry(): pass")
    monkeypatch.syspath_prepend(installed)
    assert Registry("metric", "data.metric").find("ledger.book:entry").__name__ == "entry"
    for name in ("ledger", "ledger.book"):
        del sys.modules[name]


def test_a_module_with_the_name_of_an_imported_library_is_refused(recipe_folder):
    write_modules(recipe_folder, json="def loads(): pass")
    with pytest.raises(UserError, match=rf"{recipe_folder}/json.py needs another name: json is /"):
        Registry("metric", "data.metric").find("json:loads")


@pytest.mark.parametrize(
    ("code", "name", "expected"),
    [
        ("", "judges:absent", "AttributeError: module 'judges' has no attribute 'absent'"),
        ("\n1 / 0", "judges:judge", "ZeroDivisionError: division by zero (FILE line 2)"),
        ("import sys; sys.exit(0)", "judges:judge", "SystemExit: 0 (FILE line 1)"),
        ("", "absent:judge", "ModuleNotFoundError: No module named 'absent'"),
        ("judge = 1", "judges:judge", "TypeError: 1 is not callable"),
    ],
)
def test_a_name_without_a_component_is_refused_with_the_cause(code, name, expected, recipe_folder):
    write_modules(recipe_folder, judges=code)
    with pytest.raises(UserError) as caught:
        Registry("metric", "data.metric").find(name)
    message = str(caught.value).replace(str(recipe_folder / "judges.py"), "FILE")
    assert f"data.metric={name} names no metric: {expected}; fix: " in message
    sys.modules.pop("judges", None)
