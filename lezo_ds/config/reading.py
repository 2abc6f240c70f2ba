"""Reads the values of a configuration strictly, and describes its keys.

Values have three forms:

    nested    {"train": {"steps": 10}, "seed": 3}    a recipe, a journal's header, or config.yaml
    flat      {"train.steps": 10, "seed": 3}         one dict by dotted key, which overrides change
    read      RunConfig(train=TrainConfig(steps=10), seed=3)

The one idea is that pydantic's JSON schema of the dataclass is the only description of the keys: of
their types, limits, defaults and meanings. Help and refusals are made from it, so that they cannot
contradict what is accepted. An entry of that schema is such as

    {"type": "integer", "minimum": 1, "maximum": 4096, "default": 1, "description": "Number of ..."}
    {"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}], "default": None, ...}
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lezo_ds.config.yaml_text import Unquoted, YamlError, escape_problem, load_written
from lezo_ds.errors import UserError, cut, did_you_mean

KeySchema = Mapping[str, Any]
"""The JSON schema of a key, or one of the alternatives in it."""

_HELP = "lezo-ds train --help"
_WIDTH = 96  # of the help text, in columns
_SHOWN_CHARACTERS = 200  # of a value that is refused

# What other programs call a key, and the sections that stand for their main key.
_OTHER_NAMES = {
    "model": "model.path",
    "model_name_or_path": "model.path",
    "data": "data.train",
    "dataset": "data.train",
    "output_dir": "run_dir",
    "lr": "zo.learning_rate",
    "eps": "zo.perturbation_scale",
    "zo_eps": "zo.perturbation_scale",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.batch_size",
    "eval_steps": "train.eval_every",
    "save_steps": "train.snapshot_every",
    "save_total_limit": "train.keep_snapshots",
    "lora_r": "peft.lora_rank",
}
# What sets a value that another key has, or that other programs call so.
_OTHER_VALUES = {
    "lora": "set peft.kind=lora",
    "mezo": "set method=lezo zo.sparsity=0",
    "fzoo": "set method=lezo zo.estimator=fzoo",
    "float16": "did you mean fp16?",
}

# JSON's types in words.
_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list of strings",
    "object": "a map",
    "null": "null",
}
# The types of JSON's schemas that a value of Python has.
_TYPES_OF_VALUES: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
}
_LIMITS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most"}


class ConfigReader:
    """Reads a frozen pydantic dataclass. Its fields are keys, and sections: dataclasses of keys.

    Attributes:
        keys: The JSON schema of each key, by its dotted name, such as "train.steps".
        may_differ: The keys that may have another value when a run is resumed.
    """

    def __init__(self, config_type: type) -> None:
        self._adapter = TypeAdapter[Any](config_type)
        self._sections: set[str] = set()
        self.keys: dict[str, KeySchema] = {}
        schema = self._adapter.json_schema()
        for name, entry in schema["properties"].items():
            if "$ref" not in entry:
                self.keys[name] = entry
                continue
            self._sections.add(name)
            section = schema["$defs"][entry["$ref"].removeprefix("#/$defs/")]
            for key, key_schema in section["properties"].items():
                self.keys[f"{name}.{key}"] = key_schema
        self.may_differ = frozenset(
            name for name, key in self.keys.items() if "may_differ_on_resume" in key
        )
        # Keys whose value is a map of options, each of which may also be written with a dot.
        self._maps = {name for name, key in self.keys.items() if key.get("type") == "object"}
        for name in self._maps:  # pydantic's schema leaves out a default that a function makes
            self.keys[name] = {"default": {}, **self.keys[name]}

    def flatten(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return nested values as flat ones. A section that is null has no values.

        Values may be `Unquoted`, and become what their keys need.

        Raises:
            UserError: A section has another value.
        """
        flat: dict[str, Any] = {}
        for name, value in values.items():
            if name not in self._sections:
                flat[str(name)] = value
            elif isinstance(value, Mapping):
                flat |= {f"{name}.{key}": key_value for key, key_value in value.items()}
            elif _value_of(value) is not None:
                raise UserError(
                    f"{name} is a section, not a {type(_value_of(value)).__name__}",
                    fix=f"write its keys below {name}:",
                )
        return {name: self._as_needed(name, value) for name, value in flat.items()}

    def _as_needed(self, name: str, value: Any) -> Any:
        """Return what a written value means as that of a key. An unknown key takes any value."""
        if _value_of(value) is None:
            return None
        schema = self.keys.get(name, {})
        map_name = name.rpartition(".")[0]
        if map_name in self._maps:
            schema = self.keys[map_name]["additionalProperties"]
        return _as_schema_needs(value, schema)

    def read(self, flat: Mapping[str, Any], where: str) -> Any:
        """Return the dataclass with flat values. `where` names their source in messages.

        Raises:
            UserError: A key is unknown or missing, or a value is wrong.
        """
        nested = self._nest(flat, where)
        try:
            # In JSON, a map is a dataclass, and 1 is a float; pydantic converts nothing else.
            return self._adapter.validate_json(json.dumps(nested, default=str))
        except ValidationError as error:
            raise self._refusal(error, where) from error
        except (TypeError, ValueError, RecursionError) as error:
            # A list as a key, an integer of too many digits, or a list that is nested too deeply.
            raise UserError(f"{where} cannot be read: {error}", fix="correct the value") from error

    def override(self, assignment: str) -> tuple[str, Any]:
        """Return the key and the value of `key=value`.

        A value is YAML. But the value of a key that takes a string or a list needs no quotes, since
        the shell has removed them: data.prompt="{text}: " has the value `{text}: `.

        Raises:
            UserError: The assignment has no such form, or the value is not YAML.
        """
        if not re.fullmatch(r"\w+(\.\w+)*=.*", assignment, re.DOTALL):
            raise UserError(
                f"{assignment} is not of the form key=value",
                fix="write it like zo.learning_rate=1e-6",
            )
        name, _, value = assignment.partition("=")
        if self._is_text(name, value):
            problem = escape_problem(value)
            if problem:
                fix = f"""{name}='"...\\n..."', with both kinds of quotes"""
                raise UserError(f"{name} {problem}", fix=fix)
            return name, value
        try:
            return name, self._as_needed(name, load_written(value))
        except YamlError as error:
            raise UserError(
                f"{cut(assignment, _SHOWN_CHARACTERS)} is not YAML: {error}",
                fix=f"quote all of it: '{name}=...', with double quotes around each text",
            ) from error

    def _is_text(self, name: str, value: str) -> bool:
        """Return whether a value on the command line is the text, or texts, of a key as it is."""
        types = {entry.get("type") for entry in _alternatives(self.keys.get(name, {}))}
        quoted = r"""".*"|'.*'"""
        if "array" in types:
            quoted += r"|\[.*"
        if "object" in types:
            quoted += r"|\{.*"
        is_yaml = re.fullmatch(rf"\s*({quoted}|null|~|)\s*", value, re.DOTALL)
        return not is_yaml and not types.isdisjoint({"string", "array"})

    def describe(self) -> str:
        """Return a paragraph for each key: its type, limits and default, and what it means."""
        paragraphs = []
        for name, key in self.keys.items():
            default = "required"
            if "default" in key:
                default = f"default {json.dumps(key['default'])}"
            title = f"{name}: {_expected(key)}; {default}"
            meaning = textwrap.fill(" ".join(key["description"].split()), _WIDTH - 4)
            paragraphs.append(textwrap.fill(title, _WIDTH, subsequent_indent="    "))
            paragraphs.append(textwrap.indent(meaning, "    "))
        return "\n".join(paragraphs)

    def _nest(self, flat: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return flat values as nested ones. The dicts are new: `flat` does not change."""
        nested: dict[str, Any] = {name: {} for name in self._sections}
        for name, value in flat.items():
            map_name = name.rpartition(".")[0]
            if name not in self.keys and map_name not in self._maps:
                raise self._unknown(name, where)
            *path, leaf = name.split(".")
            section = nested
            for step in path:
                inner = section.get(step)
                section[step] = dict(inner) if isinstance(inner, dict) else {}
                section = section[step]
            section[leaf] = value
        return nested

    def meant(self, name: str) -> list[str]:
        """Return the keys that an unknown name may mean: of its last part, or by other programs."""
        leaf = name.rpartition(".")[2].replace("-", "_")
        if leaf in _OTHER_NAMES:
            return [_OTHER_NAMES[leaf]]
        return [key for key in self.keys if key.rpartition(".")[2] == leaf]

    def _unknown(self, name: str, where: str) -> UserError:
        meant = self.meant(name)
        if meant:
            fix = f"did you mean {' or '.join(meant)}?"
        elif name in self._sections:
            fix = f"set its keys, as in {name}.KEY=VALUE"
        else:
            known = [*self.keys, *self._sections]
            fix = did_you_mean(name, known, f"{_HELP} lists the keys")
        if name in self._sections:
            return UserError(f"{name} in {where} is a section", fix=fix)
        return UserError(f"unknown key {name} in {where}", fix=fix)

    def _refusal(self, error: ValidationError, where: str) -> UserError:
        """Return what pydantic has found: all keys that are missing, or else the first problem."""
        problems = {".".join(map(str, problem["loc"])): problem for problem in error.errors()}
        missing = [path for path, problem in problems.items() if problem["type"] == "missing"]
        if missing:
            names = ", ".join(f"{name} ({_expected(self.keys[name])})" for name in missing)
            return UserError(f"missing in {where}: {names}", fix=f"add {missing[0]}=...")
        path, problem = next(iter(problems.items()))
        if problem["type"] == "json_invalid":
            return UserError(f"{where} is nested too deeply", fix=f"{_HELP} describes the keys")
        # The path goes on below the key: an item of a list, or an alternative of the type.
        name = next(key for key in self.keys if f"{path}.".startswith(f"{key}."))
        value = problem["input"]
        expected = _expected(self.keys[name])
        if "string" in expected and isinstance(value, bool | int | float):
            fix = f'write it in quotes: "{json.dumps(value)}"'
        elif "an integer" in expected and isinstance(value, float) and value.is_integer():
            fix = f"write {value:.0f}"
        elif expected == _TYPES["boolean"]:
            fix = "write true or false"  # in YAML 1.1, so were yes and no
        else:
            choices = [
                choice for entry in _alternatives(self.keys[name]) for choice in _choices(entry)
            ]
            fix = did_you_mean(str(value), choices, f"{_HELP} describes it")
            if choices:
                fix = _OTHER_VALUES.get(str(value), fix)
        shown = cut(json.dumps(value, ensure_ascii=False), _SHOWN_CHARACTERS)
        return UserError(f"{name}={shown} in {where} is not {expected}", fix=fix)


def _expected(key: KeySchema) -> str:
    """Return in words what a key accepts, such as "a number of at least 0 or null"."""
    return " or ".join(map(_in_words, _alternatives(key)))


def _in_words(entry: KeySchema) -> str:
    choices = ", ".join(_choices(entry))
    if choices:
        return f"a list of {choices}" if "items" in entry else f"one of {choices}"
    words = _TYPES[entry["type"]]
    if "minimum" in entry and "maximum" in entry:
        return f"{words} from {entry['minimum']} to {entry['maximum']}"
    limits = [f"{limit} {entry[name]}" for name, limit in _LIMITS.items() if name in entry]
    return f"{words} {' and '.join(limits)}".strip()


def _choices(entry: KeySchema) -> Sequence[str]:
    """Return the values that are allowed, or those of each item of a list; nothing for others."""
    items = entry.get("items", {})
    choices = entry.get("enum") or items.get("enum") or ()
    return [str(choice) for choice in choices]


def _alternatives(key: KeySchema) -> Sequence[KeySchema]:
    """Return the JSON schemas of which a value must match one."""
    return key.get("anyOf", [key])  # type: ignore[no-any-return]


def _value_of(value: Any) -> Any:
    """Return a value as YAML has it, whether or not its text is kept."""
    return value.value if isinstance(value, Unquoted) else value


def _as_schema_needs(value: Any, schema: KeySchema) -> Any:
    """Return a written value, or its text where the schema takes texts and no such value."""
    alternatives = _alternatives(schema)
    types = {entry.get("type") for entry in alternatives}
    takes_text = not types.isdisjoint({"string", "array"})
    if isinstance(value, list):
        items = _part_of(alternatives, "items")
        return [_as_schema_needs(item, items) for item in value]
    if isinstance(value, Mapping):
        if takes_text and "object" not in types and list(value.values()) == [""]:
            return f"{{{next(iter(value))}}}"  # {name} is a map to YAML, and here a template
        part = _part_of(alternatives, "additionalProperties")
        return {key: _as_schema_needs(item, part) for key, item in value.items()}
    plain = _value_of(value)
    is_taken = not types.isdisjoint(_TYPES_OF_VALUES.get(type(plain), ()))
    return value if takes_text and not is_taken else plain


def _part_of(alternatives: Sequence[KeySchema], name: str) -> KeySchema:
    """Return the schema of the items of a list or map, or one that takes any value."""
    return next((entry[name] for entry in alternatives if name in entry), {})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts of any depth as one dict with dotted keys, such as train.steps.

    An empty dict has no key.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
