"""Registries: components by name, or a user-defined component as `package.module:Name`.

A key of the recipe names a component, such as `zo.estimator=fzoo` or `data.metric=mine:score`. The
first form is looked up in a `Registry`. The second one imports the user's module `mine`, which may
be installed, on PYTHONPATH, or a file in the recipe's folder, where it is looked for first. What
`mine` imports is looked for there last: a file datasets.py must not hide the library from others.
A folder's modules are forgotten as soon as another folder is looked in, which may have others of
the same names.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, TypeVar

from lezo_ds.errors import UserError, did_you_mean
from lezo_ds.user_code import same_directory

T = TypeVar("T")

FOLDERS: list[str] = []
"""The folder of the recipe, or nothing. `load_config` writes it, and imports read it."""

_ADDED: list[str] = []
"""What this module has put on sys.path."""

_OWN: dict[str, list[str]] = {}
"""For each top-level module that was imported from a recipe's folder, this folder."""


class Registry(dict[str, T]):
    """Components by lower-case name. Lookups ignore case.

    Args:
        noun: What a component is, such as "estimator", for messages.
        key: The configuration's key that names one, such as "zo.estimator", for messages.
        kind: A user-defined component must be an instance or a subclass of this type. If it is
            None, the component must be callable.
    """

    def __init__(self, noun: str, key: str, kind: type | None = None) -> None:
        super().__init__()
        self._noun = noun
        self._key = key
        self._kind = kind

    def add(self, name: str, entry: T) -> None:
        """Register a component under a new lower-case name."""
        self[name] = entry

    def find(self, name: str) -> T:
        """Return the component of a name; `package.module:Name` is imported.

        Raises:
            UserError: No component has this name, or the module cannot be imported or changes the
                working directory.
        """
        if names_code(name):
            with same_directory(f"{self._key}={name}"):
                return self._import(name)  # type: ignore[no-any-return]
        if name.lower() in self:
            return self[name.lower()]
        names = ", ".join(sorted(self))
        raise UserError(
            f"{self._key}={name} is not a registered {self._noun} ({names}) or package.module:Name",
            fix=did_you_mean(name, self, f"set {self._key} to one of these"),
        )

    def _import(self, name: str) -> Any:
        try:
            with _recipe_folder(name):
                component = pkgutil.resolve_name(name)
            self._check_kind(component)
        except (Exception, SystemExit) as error:  # the module may raise anything
            problem = f"{self._key}={name} names no {self._noun}: {type(error).__name__}: {error}"
            where = ""
            fix = "correct the name, or put the module in the recipe's folder or on PYTHONPATH"
            for frame, line in traceback.walk_tb(error.__traceback__):
                if frame.f_code.co_name == "<module>":  # what a module does when it is imported
                    where = f" ({frame.f_code.co_filename} line {line})"
                    fix = "correct the module, or install what it imports"
            raise UserError(problem + where, fix=fix) from error
        return component

    def _check_kind(self, component: object) -> None:
        if self._kind is None:
            if not callable(component):
                raise TypeError(f"{component!r} is not callable")
            return
        is_type = isinstance(component, type) and issubclass(component, self._kind)
        if not is_type and not isinstance(component, self._kind):
            raise TypeError(f"{component!r} is not {self._kind.__name__}")


def names_code(name: str) -> bool:
    """Return whether a name has the form `package.module:Name`: finding it imports a module."""
    return ":" in name


def options_of(component: Any, kind: type) -> dict[str, Any]:
    """Return the defaults of a component's options, by name.

    The options are the fields of the component's dataclass that its base class `kind` lacks.
    """
    common = {field.name for field in dataclasses.fields(kind)}
    own = (field for field in dataclasses.fields(component) if field.name not in common)
    return {field.name: field.default for field in own}


def file_of(name: str) -> Path:
    """Return the file of the module of a component that was found: `package.module:Name`."""
    with _recipe_folder(name):
        module = importlib.import_module(name.partition(":")[0])
    return Path(str(module.__file__))


@contextmanager
def _recipe_folder(name: str) -> Iterator[None]:
    """Let imports find the module of a component in the recipe's folder first, and others last."""
    for top in [top for top, folder in _OWN.items() if folder != FOLDERS]:
        del _OWN[top]
        for module in [each for each in sys.modules if each.partition(".")[0] == top]:
            del sys.modules[module]
    before = set(sys.modules)
    sys.path[:] = [folder for folder in sys.path if folder not in _ADDED]
    # It stays on the path: processes that the module starts import the module again.
    _ADDED[:] = [folder for folder in FOLDERS if folder not in sys.path]
    sys.path += _ADDED
    try:
        _import_from_recipe_folder(re.split("[.:]", name)[0])
        yield
    finally:
        for top in {module.partition(".")[0] for module in sys.modules} - before:
            spec = PathFinder.find_spec(top, FOLDERS)
            imported = sys.modules.get(top)
            if spec is not None and spec.origin == getattr(imported, "__file__", ""):
                _OWN[top] = list(FOLDERS)


def _import_from_recipe_folder(module_name: str) -> None:
    """Import a top-level module if the recipe's folder has it, before any installed one."""
    spec = PathFinder.find_spec(module_name, FOLDERS)
    # A folder without __init__.py may hold anything: installed packages win.
    if spec is None or spec.loader is None:
        return
    if module_name in sys.modules:
        imported = getattr(sys.modules[module_name], "__file__", None)
        if Path(str(imported)).resolve() != Path(str(spec.origin)).resolve():
            problem = f"{spec.origin} needs another name: {module_name} is {imported} already"
            raise ImportError(problem)
        return
    module = module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
