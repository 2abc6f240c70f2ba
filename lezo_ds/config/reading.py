"""Reads YAML recipes, `key=value` overrides and plain dicts, strictly, with pydantic."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, core_schema

from lezo_ds.config.yaml_text import YamlError, load_yaml
from lezo_ds.errors import UserError, cut, did_you_mean
from lezo_ds.registry import names_code

_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
}
_TYPES |= {"array": "a list of strings", "object": "a map", "null": "null"}
_LIMITS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most"}


class Named:
    """Restricts a string to the names in a registry, in any case, some others, and `package.module:name`."""

    def __init__(self, names: Collection[str], *others: str) -> None:
        self._names, self._others = names, others

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._find, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(schema) | {"enum": [*self._names, *self._others, "package.module:name"]}

    def _find(self, value: str) -> str:
        if names_code(value) or value.lower() in (*self._names, *self._others):
            return value if names_code(value) else value.lower()
        raise ValueError(value)


def split(value: object) -> object:
    parts = [text.strip() for text in value.split(",")] if isinstance(value, str) else value
    if isinstance(parts, list):
        return [str(part) if type(part) in (int, float) else part for part in parts]
    return parts


Strings = Annotated[list[str], BeforeValidator(split)]
ExactStrings = Annotated[
    list[str], BeforeValidator(lambda text: [text] if isinstance(text, str) else text)
]
"""A list, or one string, which may hold commas."""


class Reader:
    """Reads values of one dataclass, whose fields are keys or sections of keys."""

    def __init__(self, config_type: type, old: Mapping[str, str]) -> None:
        # What became of each `key` or `key=value` of earlier versions.
        self._old = {entry: text for text, entries in old.items() for entry in entries.split()}
        self._adapter = TypeAdapter[Any](config_type)
        schema = self._adapter.json_schema()
        self.keys: dict[str, dict[str, Any]] = {}  # the JSON schema of each key, by dotted name
        self._sections: set[str] = set()
        self._required = set(schema["required"])
        for name, entry in schema["properties"].items():
            if "$ref" not in entry:
                self.keys[name] = entry
                continue
            section = schema["$defs"][entry["$ref"].rpartition("/")[2]]
            self._sections.add(name)
            self.keys |= {f"{name}.{key}": of_key for key, of_key in section["properties"].items()}
            self._required |= {f"{name}.{key}" for key in section.get("required", ())}
        self.may_differ = frozenset(
            name for name, key in self.keys.items() if "may_differ_on_resume" in key
        )
        self._maps = {name for name, key in self.keys.items() if key.get("type") == "object"}

    def flatten(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return sections and keys as one dict with dotted keys; a section that is null has none."""
        flat: dict[str, Any] = {}
        for name, value in values.items():
            if name not in self._sections:
                flat[str(name)] = value
            elif isinstance(value, Mapping):
                flat |= {f"{name}.{key}": of_key for key, of_key in value.items()}
            elif value is not None:
                kind = type(value).__name__
                raise UserError(
                    f"{name} is a section, not a {kind}", fix=f"write its keys below {name}:"
                )
        return flat

    def read(self, flat: Mapping[str, Any], where: str) -> Any:
        """Return the dataclass. UserError: an unknown or missing key, or a wrong value."""
        entries = [
            *flat,
            *(f"{name}={value}" for name, value in flat.items() if isinstance(value, str)),
        ]
        if old := [f"{entry} {self._old[entry]}" for entry in entries if entry in self._old]:
            text = f"{where} was written for lezo_ds before 0.3.0: {', '.join(old)}"
            raise UserError(text, fix="replace or remove these keys")
        nested: dict[str, Any] = {name: {} for name in self._sections}
        for name, value in flat.items():
            if name not in self.keys and name.rpartition(".")[0] not in self._maps:
                raise self._unknown(name, where)
            *path, leaf = name.split(".")
            section = nested
            for part in path:
                section[part] = section = (
                    {**section[part]} if isinstance(section.get(part), dict) else {}
                )
            section[leaf] = value
        try:
            # In JSON, maps are dataclasses, and 1 is a float, without any other conversion.
            return self._adapter.validate_json(json.dumps(nested, default=str))
        except ValidationError as error:
            raise self._refusal(error, where) from error
        except (
            TypeError,
            ValueError,
            RecursionError,
        ) as error:  # a list as a key, an integer of too many digits, or deep lists
            raise UserError(f"{where} cannot be read: {error}", fix="correct the value") from error

    def override(self, text: str) -> tuple[str, Any]:
        """Return the key and value of `key=value`. A string needs no quotes; other values are YAML."""
        name, _, value = text.partition("=")
        if not re.fullmatch(r"\w+(\.\w+)*=.*", text, re.DOTALL):
            raise UserError(
                f"{text} is not of the form key=value", fix="write it like zo.learning_rate=1e-6"
            )
        kinds = {entry.get("type") for entry in _alternatives(self.keys.get(name, {}))}
        is_yaml = re.fullmatch(r"""\s*(".*"|'.*'|null|~|)\s*""", value, re.DOTALL)
        if "string" in kinds and "array" not in kinds and not is_yaml:
            if "\\n" in value:
                fix = f"""{name}='"...\\n..."', with both kinds of quotes"""
                raise UserError(
                    f"{name} has a backslash and an n, which is no line break here", fix=fix
                )
            return name, value
        try:
            return name, load_yaml(value)
        except YamlError as error:
            raise UserError(
                f"{cut(text, 200)} is not YAML", fix=f"quote all of it: '{name}=...'"
            ) from error

    def describe(self) -> str:
        """Return every key with its type, limits, default and meaning."""
        lines = []
        for name, key in self.keys.items():
            default = f"default {json.dumps(key.get('default', {}))}"
            text = f"{name}: {_expected(key)}; {'required' if name in self._required else default}"
            lines.append(textwrap.fill(text, 96, subsequent_indent="    "))
            lines.append(
                textwrap.indent(textwrap.fill(" ".join(key["description"].split()), 92), "    ")
            )
        return "\n".join(lines)

    def _unknown(self, name: str, where: str) -> UserError:
        if name in self._sections:
            return UserError(
                f"{name} in {where} is a section", fix=f"set its keys, as in {name}.KEY=VALUE"
            )
        same = [key for key in self.keys if key.rpartition(".")[2] == name.rpartition(".")[2]]
        fix = did_you_mean(
            name, [*self.keys, *self._sections], "lezo-ds train --help lists the keys"
        )
        if same:
            fix = f"did you mean {' or '.join(same)}?"
        return UserError(f"unknown key {name} in {where}", fix=fix)

    def _refusal(self, error: ValidationError, where: str) -> UserError:
        errors = {".".join(map(str, each["loc"])): each for each in error.errors()}
        missing = [name for name, each in errors.items() if each["type"] == "missing"]
        if missing:
            names = ", ".join(f"{name} ({_expected(self.keys[name])})" for name in missing)
            return UserError(f"missing in {where}: {names}", fix=f"add {missing[0]}=...")
        path, each = next(iter(errors.items()))
        if each["type"] == "json_invalid":
            return UserError(
                f"{where} is nested too deeply", fix="lezo-ds train --help describes the keys"
            )
        name = next(key for key in self.keys if f"{path}.".startswith(f"{key}."))
        key, value = self.keys[name], each["input"]
        choices = [choice for entry in _alternatives(key) for choice in _names(entry)]
        fix = did_you_mean(str(value), choices, "lezo-ds train --help describes it")
        if "string" in _expected(key) and isinstance(value, bool | int | float):
            fix = f'write it in quotes: "{json.dumps(value)}"'
        shown = cut(json.dumps(value, ensure_ascii=False), 200)
        return UserError(f"{name}={shown} in {where} is not {_expected(key)}", fix=fix)


def _expected(key: Mapping[str, Any]) -> str:
    """Return what a key accepts, in words, from its JSON schema."""
    return " or ".join(map(_words, _alternatives(key)))


def _words(entry: Mapping[str, Any]) -> str:
    if _names(entry):
        return f"{'a list' if 'items' in entry else 'one'} of {', '.join(_names(entry))}"
    word = _TYPES[entry["type"]]
    if {"minimum", "maximum"} <= entry.keys():
        return f"{word} from {entry['minimum']} to {entry['maximum']}"
    limits = (f"{text} {entry[name]}" for name, text in _LIMITS.items() if name in entry)
    return " ".join([word, " and ".join(limits)]).strip()


def _names(entry: Mapping[str, Any]) -> Sequence[str]:
    return entry.get("enum", entry.get("items", {}).get("enum", ()))  # type: ignore[no-any-return]


def _alternatives(key: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return key.get("anyOf", [key])  # type: ignore[no-any-return]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys, such as train.steps; an empty dict has no key."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= flatten(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat
