"""YAML 1.2, the language of recipes and config.yaml, by ruamel.yaml.

Compared with YAML 1.1, `no`, `on` and `1:30` are strings, 1e-6 is a number, and 0o17 is octal.

A recipe may come from anyone. So only plain values are made (no tag makes an object), and a text
may neither repeat a key nor use aliases. Any text that is refused costs at most a few seconds.

What a person writes is read by `load_written`: each value keeps its text, and a backslash and an n
outside double quotes are refused.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from lezo_ds.errors import UserError

_MAX_CHARACTERS = 1 << 18  # of a recipe: ruamel.yaml reads 100,000 characters in a second

_ESCAPES = {
    "\\n": "has a backslash and an n, which are a line break only in double quotes",
    "\\t": "has a backslash and a t, which are a tab only in double quotes",
}
"""What is wrong with a text outside quotes that has what many languages read as one character."""
# What YAML ends a line at, or takes for no character of a text, unless it is escaped.
_UNREADABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")


class YamlError(ValueError):
    """A text is not YAML, or has what a recipe may not have. The message names the line."""


class Unquoted(str):
    """A scalar that is no text to YAML, as it is written, such as 0123: keys for texts take it so.

    Attributes:
        value: The number, boolean, date or None that it is to YAML.
    """

    value: Any

    def __new__(cls, text: str, value: Any) -> Unquoted:
        unquoted = super().__new__(cls, text)
        unquoted.value = value
        return unquoted


class _Composer(Composer):
    """Refuses aliases: a few nested ones stand for billions of values."""

    def compose_node(self, parent: Any, index: int) -> Any:
        if self.parser.check_event(AliasEvent):
            mark = self.parser.peek_event().start_mark
            raise MarkedYAMLError(problem="aliases are not supported", problem_mark=mark)
        return super().compose_node(parent, index)


class _WrittenComposer(_Composer):
    """Refuses what only double quotes make a line break or a tab. A block has real line breaks."""

    def compose_scalar_node(self, anchor: Any) -> Any:
        event = self.parser.peek_event()
        problem = escape_problem(event.value)
        if problem and event.style in (None, "'"):
            raise MarkedYAMLError(problem=f"a text {problem}", problem_mark=event.start_mark)
        return super().compose_scalar_node(anchor)


class _WrittenConstructor(SafeConstructor):
    """Makes each scalar without quotes that is no text an `Unquoted`."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        value = super().construct_object(node, deep)
        if isinstance(node, ScalarNode) and not node.style and not isinstance(value, str):
            return Unquoted(node.value, value)
        return value


def escape_problem(text: str) -> str:
    r"""Return what is wrong with a text outside double quotes that has \n or \t, or ""."""
    return next((problem for escape, problem in _ESCAPES.items() if escape in text), "")


def inline_yaml(value: Any) -> str:
    """Return YAML of a text, number, list or map on one line, with all texts in double quotes."""
    line = json.dumps(value, ensure_ascii=False)  # JSON is YAML, but for some characters
    return _UNREADABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def load_yaml(text: str) -> Any:
    """Return the plain values of a YAML text: dicts, lists, strings, numbers, booleans and None.

    Raises:
        YamlError: The text is not YAML, or has a tag, an alias or a repeated key.
    """
    return _load(text, _Composer, SafeConstructor)


def load_written(text: str) -> Any:
    """Return the values of a YAML text of a person, which are `Unquoted` if they are no texts.

    Raises:
        YamlError: As by `load_yaml`; or a backslash and an n or t are outside double quotes.
    """
    return _load(text, _WrittenComposer, _WrittenConstructor)


def _load(text: str, composer: type[Composer], constructor: type[SafeConstructor]) -> Any:
    # The parser in Python. The one in C, if it is installed, reads YAML 1.1.
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = composer
    yaml.Constructor = constructor
    try:
        return yaml.load(text)
    except MarkedYAMLError as error:
        raise YamlError(f"line {error.problem_mark.line + 1}: {error.problem}") from error
    except Exception as error:  # many types, for a deep text, a bad date or number, or a character
        raise YamlError(f"{type(error).__name__}: {error}") from error


class _Representer(SafeRepresenter):
    r"""Writes a text that has \n or \t in double quotes, in which a recipe may have it."""

    def represent_str(self, data: Any) -> Any:
        style = '"' if escape_problem(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return nested plain dicts as a YAML text, with their keys in the given order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False  # a line for each key
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    # ruamel.yaml 0.19 does not read back some long strings that it has folded, nor these line
    # breaks of Unicode unless they are escaped.
    yaml.width = 1 << 20
    yaml.allow_unicode = not re.search("[\x85\u2028\u2029]", json.dumps(values, ensure_ascii=False))
    text = io.StringIO()
    yaml.dump(values, text)
    return text.getvalue()


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the keys and sections in a YAML file, as `load_written` does.

    Raises:
        UserError: The file cannot be read, is too long, is not YAML, or holds no keys.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the recipe {path}: {error}", fix="check the path") from error
    if len(text) > _MAX_CHARACTERS:
        raise UserError(f"{path} has more than {_MAX_CHARACTERS} characters", fix="name a recipe")
    try:
        values = load_written(text)
    except YamlError as error:
        fix = r"correct the line that is named; a text with {, [, #, : or \n needs double quotes"
        raise UserError(f"{path} is not valid YAML: {error}", fix=fix) from error
    if not isinstance(values, dict):
        raise UserError(
            f"{path} holds no keys", fix="write `key: value` lines, as in launch/recipes"
        )
    return values
