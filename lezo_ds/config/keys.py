"""What a key is, and the dotted keys of a configuration class, as its dataclasses declare them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """The numbers that a key accepts.

    Attributes:
        minimum: the smallest number.
        maximum: the largest number; None for no limit.
        above: whether the minimum itself is excluded.
    """

    minimum: int
    maximum: int | None = None
    above: bool = False

    def __contains__(self, value: float) -> bool:
        if value < self.minimum or (self.above and value == self.minimum):
            return False
        return self.maximum is None or value <= self.maximum

    def __str__(self) -> str:
        if self.maximum is not None:
            first = f"above {self.minimum}, at most" if self.above else f"{self.minimum} to"
            return f"{first} {self.maximum}"
        return f"{'above' if self.above else 'at least'} {self.minimum}"


@dataclass(frozen=True)
class Choices:
    """The values of a text key are the names in a registry. Upper and lower case are the same.

    Attributes:
        names: the registry, or its names. It is looked at whenever a value is read: later entries count.
        code: None, or what "package.module:NAME", which is a value too, should name.
        any_name: whether every text is a value, because it need not be known here.
    """

    names: Collection[str]
    code: str | None = None
    any_name: bool = False


@dataclass(frozen=True)
class ExactTexts:
    """A key for texts takes each text as it is: a single one is not cut at commas, and there may be none."""


@dataclass(frozen=True)
class OptionsOf:
    """The key is an open section: it holds the options of a component that another key names.

    A configuration that was read holds every option of its component, with defaults filled in.

    Attributes:
        chooser: the key, in the same section, that names the component.
        defaults: maps the component's name to the default value of each of its options, by name. A value
            must have the type of its default.
    """

    chooser: str
    defaults: Callable[[str], Mapping[str, Any]]


_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "options",
    list: "texts (a list, or one text with commas)",
}


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key.

    Attributes:
        name: dotted, such as "zo.sparsity".
        kind: the type of its value; dict for an open section of options, list for texts.
        default: MISSING if the key is required.
        optional: whether null is a value.
        may_map: whether a key for texts also accepts a map from text to text.
        exact_texts: whether a key for texts takes each text as it is (see `ExactTexts`).
        range: the numbers that it accepts; None for all.
        choices: the texts that it accepts, or where they are registered; None for all. A list of texts may
            only hold these.
        options: whose options an open section holds.
    """

    name: str
    kind: type
    default: Any
    optional: bool = False
    may_map: bool = False
    exact_texts: bool = False
    range: Range | None = None
    choices: Choices | None = None
    options: OptionsOf | None = None

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is dataclasses.MISSING

    @property
    def chooser(self) -> str:
        """The key that names the component whose options an open section holds."""
        assert self.options is not None
        section, dot, _ = self.name.rpartition(".")
        return section + dot + self.options.chooser

    @property
    def expected(self) -> str:
        """What the key accepts, in words."""
        words = _TYPE_NAMES[self.kind]
        if self.choices is not None:
            words = f"{'a list' if self.kind is list else 'one'} of {', '.join(self.choices.names)}"
        if self.exact_texts:
            words = "texts (a list, which may be empty, or one text)"
        if self.choices is not None and self.choices.code is not None:
            words += f" or package.module:{self.choices.code}"
        if self.may_map:
            words += " or a map of texts"
        if self.options is not None:
            words += f" of {self.chooser}"
        return words + (f" {self.range}" if self.range else "") + (" or null" if self.optional else "")

    @property
    def accepted(self) -> str:
        """What the key accepts, and its default, in words."""
        default = "required" if self.required else f"default {yaml_scalar(self.default)}"
        return f"{self.expected}; {default}"


class Schema:
    """All keys of a configuration class.

    Attributes:
        config_type: the class: a dataclass whose fields are keys or sections, which are dataclasses too.
        keys: by dotted name, in the order of the class.
        sections: the class of each section by its name.
    """

    def __init__(self, config_type: type) -> None:
        self.config_type = config_type
        self.keys: dict[str, Key] = {}
        self.sections: dict[str, type] = {}
        self._add(config_type, "")

    @cached_property
    def map_keys(self) -> frozenset[str]:
        """The keys whose value may be a map."""
        return frozenset(key.name for key in self.keys.values() if key.may_map)

    @cached_property
    def open_sections(self) -> tuple[str, ...]:
        """The keys that hold options of a component."""
        return tuple(key.name for key in self.keys.values() if key.options is not None)

    @cached_property
    def meanings(self) -> dict[str, str]:
        """What each key means, by dotted name."""
        texts = _field_docstrings(self.config_type, "")
        for name, section in self.sections.items():
            texts |= _field_docstrings(section, name + ".")
        return texts

    def describe(self) -> str:
        """Return every key with its type, limits, default and meaning, as the command's help shows it."""
        lines = []
        for key in self.keys.values():
            head, meaning = f"{key.name}: {key.accepted}", self.meanings[key.name]
            lines.append(textwrap.fill(head, 96, subsequent_indent="    ", break_on_hyphens=False))
            lines.append(textwrap.fill(meaning, 96, initial_indent="    ", subsequent_indent="    "))
        return "\n".join(lines)

    def _add(self, section: type, prefix: str) -> None:
        hints = get_type_hints(section, include_extras=True)
        for field in dataclasses.fields(section):
            name, hint = prefix + field.name, hints[field.name]
            if dataclasses.is_dataclass(hint):
                assert isinstance(hint, type)
                self.sections[name] = hint
                self._add(hint, name + ".")
                continue
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            self.keys[name] = _key(name, hint, default)


def yaml_scalar(value: object) -> str:
    """Return a value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _key(name: str, hint: object, default: object) -> Key:
    notes: tuple[object, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *others = get_args(hint)
        notes = tuple(others)
    optional = get_origin(hint) in (Union, types.UnionType)
    may_map = False
    if optional:
        kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
        hint, may_map = kinds[0], any(get_origin(kind) is Mapping for kind in kinds[1:])
    choices = next((note for note in notes if isinstance(note, Choices)), None)
    options = next((note for note in notes if isinstance(note, OptionsOf)), None)
    if get_origin(hint) is Literal:
        choices, hint = Choices(get_args(hint)), str
    origin = get_origin(hint)
    kind = dict if origin is Mapping else list if origin is Sequence else hint
    assert kind in _TYPE_NAMES, f"{name} has a type that cannot be read: {hint}"
    assert isinstance(kind, type)
    limits = next((note for note in notes if isinstance(note, Range)), None)
    return Key(
        name=name,
        kind=kind,
        default=default,
        optional=optional,
        may_map=may_map,
        exact_texts=any(isinstance(note, ExactTexts) for note in notes),
        range=limits,
        choices=choices,
        options=options,
    )


def _field_docstrings(section: type, prefix: str) -> dict[str, str]:
    """Return the string below each field in the source, by key: Python itself does not keep it."""
    tree = ast.parse(inspect.getsource(sys.modules[section.__module__]))
    body = next(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == section.__name__)
    return {
        prefix + ast.unparse(field.target): " ".join(ast.literal_eval(below.value).split())
        for field, below in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }
