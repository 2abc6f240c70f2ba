"""Registries: components by name, or a component of the user's own as `package.module:Name`.

A key of the recipe names a component, such as `zo.estimator=fzoo` or `data.metric=mine:score`. The
first form is looked up in a `Registry`. The second one imports the user's module `mine`, which may
be installed, on PYTHONPATH, or a file in the recipe's folder (see `_RecipeFolder`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeVar

from lezo_ds.errors import UserError, did_you_mean

T = TypeVar("T")

FOLDERS: list[str] = []
"""The folder of the recipe, or nothing. `load_config` writes it, and imports read it."""


class Registry(dict[str, T]):
    """Components by lower-case name. Lookups ignore case.

    Args:
        noun: What a component is, such as "estimator", for messages.
        key: The configuration's key that names one, such as "zo.estimator", for messages.
        kind: A component of the user's own must be an instance or a subclass of this type. If it is
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
            UserError: No component has this name, or the module cannot be imported.
        """
        if names_code(name):
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
            with _recipe_folder_first():
                component = pkgutil.resolve_name(name)
            self._check_kind(component)
        except Exception as error:  # the module may raise anything
            raise UserError(
                f"{self._key}={name} names no {self._noun}: {type(error).__name__}: {error}",
                fix="correct the name, or put the module in the recipe's folder or on PYTHONPATH",
            ) from error
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


class _RecipeFolder:
    """Finds the modules in the recipe's folder before installed ones of the same name.

    Python does the same for the folder of a script. But a file datasets.py or queue.py there must
    not hide a library that lezo_ds, or a library below it, imports later. So the standard library
    and the libraries that lezo_ds requires come first.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as `importlib.abc.MetaPathFinder` does."""
        if path is not None or name in sys.stdlib_module_names:
            return None  # a module inside a package, which has been found already; or Python's own
        spec = PathFinder.find_spec(name, FOLDERS)
        if spec is None or spec.loader is None:
            return None  # a folder without __init__.py may hold anything: installed packages win
        if PathFinder.find_spec(name) is not None and _is_required(name):
            return None
        return spec


@contextmanager
def _recipe_folder_first() -> Iterator[None]:
    """Let imports find the recipe's folder: its modules first, its bare folders last."""
    added = [folder for folder in FOLDERS if folder not in sys.path]
    sys.meta_path.insert(0, _RecipeFolder)
    sys.path += added
    try:
        yield
    finally:
        sys.meta_path.remove(_RecipeFolder)
        for folder in added:
            sys.path.remove(folder)


def _is_required(module: str) -> bool:
    """Return whether an installed top-level module belongs to a library that lezo_ds requires."""
    # Reading the metadata of all libraries takes a while. Few modules come this far.
    libraries = importlib.metadata.packages_distributions().get(module, ())
    return any(_canonical(library) in _required_libraries() for library in libraries)


@functools.cache
def _required_libraries() -> frozenset[str]:
    """Return the canonical names of the libraries that lezo_ds requires, directly or not."""
    required: set[str] = set()
    unread = ["lezo_ds"]
    while unread:
        library = unread.pop()
        try:
            requirements = importlib.metadata.requires(library) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra, or a requirement on another platform
        for requirement in requirements:
            # lezo_ds uses what its own extras install. The extras of others are of no use to it.
            if "extra ==" in requirement and library != "lezo_ds":
                continue
            name = _canonical(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
            if name not in required:
                required.add(name)
                unread.append(name)
    return frozenset(required)


def _canonical(library: str) -> str:
    """Return the name of a library in the form in which names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", library).lower()
