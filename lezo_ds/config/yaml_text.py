"""YAML 1.2, the language of recipes and config.yaml, by ruamel.yaml.

Compared with YAML 1.1, `no`, `on` and `1:30` are strings, 1e-6 is a number, and 0o17 is octal.

A recipe may come from anyone. So only plain values are made (no tag makes an object), and a text
may neither repeat a key nor use aliases. Any text that is refused costs at most a few seconds.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import AliasEvent

MAX_CHARACTERS = 1 << 18
"""The longest recipe. ruamel.yaml reads 100,000 characters in a second."""


class YamlError(ValueError):
    """A text is not YAML, or has what a recipe may not have. The message names the line."""


class _Composer(Composer):
    """Refuses aliases: a few nested ones stand for billions of values."""

    def compose_node(self, parent: Any, index: int) -> Any:
        if self.parser.check_event(AliasEvent):
            mark = self.parser.peek_event().start_mark
            raise MarkedYAMLError(problem="aliases are not supported", problem_mark=mark)
        return super().compose_node(parent, index)


def load_yaml(text: str) -> Any:
    """Return the plain values of a YAML text: dicts, lists, strings, numbers, booleans and None.

    Raises:
        YamlError: The text is too long, is not YAML, or has a tag, an alias or a repeated key.
    """
    if len(text) > MAX_CHARACTERS:
        raise YamlError(f"it has more than {MAX_CHARACTERS} characters")
    # The parser in Python. The one in C, if it is installed, reads YAML 1.1.
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    try:
        return yaml.load(text)
    except MarkedYAMLError as error:
        raise YamlError(f"line {error.problem_mark.line + 1}: {error.problem}") from error
    except Exception as error:  # many types, for a deep text, a bad date or number, or a character
        raise YamlError(f"{type(error).__name__}: {error}") from error


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return nested plain dicts as a YAML text, with their keys in the given order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False  # a line for each key
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    # ruamel.yaml 0.19 does not read back some long strings that it has folded, nor these line
    # breaks of Unicode unless they are escaped.
    yaml.width = 1 << 20
    yaml.allow_unicode = not re.search("[\x85\u2028\u2029]", json.dumps(values, ensure_ascii=False))
    text = io.StringIO()
    yaml.dump(values, text)
    return text.getvalue()
