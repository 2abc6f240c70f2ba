"""From a recipe and `key=value` overrides to a run's configuration.

    recipe.yaml --YAML--> dict --overrides--> dict --paths--> dict --pydantic--> RunConfig

`schema` decides what is accepted. This module reads, and says in one line what pydantic found.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from lezo_ds.config.names import fix_of_unknown
from lezo_ds.config.paths import expand, find_file, resolve_path, shipped_files
from lezo_ds.config.schema import KEYS, SECTIONS, RunConfig, keys_with
from lezo_ds.config.yaml_text import MAX_CHARACTERS, YamlError, load_yaml
from lezo_ds.errors import UserError, did_you_mean
from lezo_ds.registry import FOLDERS
from lezo_ds.user_code import shown

_WIDTH = 96  # of the help text, in columns

# pydantic's types of the errors of keys that take numbers.
_NUMBERS = ("int_type", "float_type")
# How to mend a value, by pydantic's type of the error.
_FIXES = {
    "bool_type": "write true or false",
    "escape": "write a line break as \"\\n\" in double quotes in YAML, and as $'\\n' in a shell",
    "string_type": "write one text, in quotes",
    "value_error": "correct it",
}


def load_config(source: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a recipe.

    Args:
        source: A YAML file, the name of one in launch/recipes, or None if the overrides have all
            keys.
        overrides: Changes of the form `key=value`, of which the last of a key counts.

    Raises:
        UserError: The recipe cannot be read, or a key or value is wrong.
    """
    if source is None:
        return config_from_dict({}, "the command line", overrides)
    values, path = read_recipe(source)
    return config_from_dict(values, str(path), overrides, path.parent)


def config_from_dict(
    values: Mapping[str, Any],
    where: str,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
) -> RunConfig:
    """Return the configuration that nested plain dicts hold: the inverse of `model_dump`.

    Args:
        values: The nested dicts. Those of a recipe may also have dotted keys.
        where: The source of the values, for messages.
        overrides: Changes of the form `key=value`, of which the last of a key counts. Their paths
            are relative to the working directory.
        folder: The folder of the recipe that holds the values, to which their paths are relative
            (see `resolve_path`). From now on, the modules that a configuration names are looked for
            there. None leaves the paths of the values as they are: those of a recorded run have
            been resolved, and may name no variable of the environment.

    Raises:
        UserError: A key or value is wrong.
    """
    nested = nest(values)
    if folder is not None:
        FOLDERS[:] = [str(folder.absolute())]
        _resolve_paths(nested, keys_with("path"), folder)
    for key, value in map(read_override, overrides):
        _set(nested, key.split("."), value, replaces=key not in SECTIONS)
        _resolve_paths(nested, keys_with("path") & {key}, None)
    if overrides and values:
        where += " and the command line"
    try:
        return RunConfig.model_validate({name: {} for name in SECTIONS} | nested)
    except ValidationError as error:
        raise _refusal(error.errors(), where) from error


def read_recipe(source: str | Path) -> tuple[dict[str, Any], Path]:
    """Return the values in a recipe, and its path.

    Args:
        source: A YAML file, or the name of one in launch/recipes.

    Raises:
        UserError: There is no such file, it cannot be read, is not YAML, or holds no keys.
    """
    name = expand(str(source), "--config")
    path = find_file(name)
    if not path.is_file() and path.suffix not in (".yaml", ".yml"):
        shipped = shipped_files("launch/recipes/*.yaml")
        if name not in shipped:
            raise UserError(
                f"--config {name} is neither a file nor one of {', '.join(shipped)}",
                fix=did_you_mean(name, shipped, "name a YAML file"),
            )
        path = shipped[name]
    try:
        with path.open(encoding="utf-8-sig") as file:
            values = load_yaml(file.read(MAX_CHARACTERS + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the recipe {path}: {error}",
            fix="check the path",
        ) from error
    except YamlError as error:
        raise UserError(
            f"{path} is not valid YAML: {error}",
            fix="correct the line that is named; a text with {, [, # or : needs double quotes",
        ) from error
    if not isinstance(values, dict):
        raise UserError(
            f"{path} holds no keys",
            fix="write `key: value` lines, as in launch/recipes",
        )
    return values, path


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe without dotted keys. A section that is null has no values.

    Raises:
        UserError: A key has several values, as zo.sparsity and as sparsity in the section zo.
    """
    nested: dict[str, Any] = {}
    for name, value in values.items():
        if name not in SECTIONS:
            _set(nested, str(name).split("."), value)
        elif isinstance(value, Mapping):
            for key, key_value in value.items():
                _set(nested, [name, key], key_value)
        elif value is not None:
            _set(nested, [name], value)
    return nested


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


def read_override(assignment: str) -> tuple[str, Any]:
    """Return the key and the value of `key=value`.

    The value of a key for a text is the text as it is, since a shell has removed its quotes. That
    of a key for several texts is split at commas, unless it is a list in brackets. All others are
    YAML, and `null` is null.

    Raises:
        UserError: The assignment has no such form, or the value is not YAML.
    """
    if not re.fullmatch(r"\w+(\.\w+)*=.*", assignment, re.DOTALL):
        raise UserError(
            f"{assignment} is not of the form key=value",
            fix="write it like zo.learning_rate=1e-6",
        )
    key, _, value = assignment.partition("=")
    types = {each.get("type") for each in _alternatives(key)} if key in KEYS else set()
    first = value.lstrip()[:1]
    is_map = first == "{" and "object" in types
    is_list = first == "[" and "array" in types
    if value == "null" or is_map or is_list or types.isdisjoint({"string", "array"}):
        try:
            return key, load_yaml(value)
        except YamlError as error:
            raise UserError(
                f"{shown(assignment)} is not YAML: {error}",
                fix=f"quote all of it: '{key}=...', with double quotes around each text",
            ) from error
    if "array" in types:
        return key, [item.strip() for item in value.split(",")]
    return key, value


def key_of(assignment: str) -> str:
    """Return the key that `key=value` changes: all of it, or an option in it.

    >>> key_of("zo.estimator_options.size=2")
    'zo.estimator_options'
    """
    return ".".join(assignment.partition("=")[0].split(".")[:2])


def describe(section: str | None = None) -> str:
    """Return the help of a section's keys; None lists the sections, and the keys outside of them.

    Raises:
        UserError: There is no such section.
    """
    if section is None:
        lines = ["lezo-ds train --help SECTION describes its keys:"]
        for name, kind in SECTIONS.items():
            summary, *_ = str(kind.__doc__).splitlines()
            lines.append(f"{name}: {summary}")
        lines += [_describe_key(key) for key in KEYS if "." not in key]
        return "\n".join(lines)
    if section not in SECTIONS:
        known = ", ".join(SECTIONS)
        raise UserError(
            f"{section} is not a section of a recipe",
            fix=did_you_mean(section, SECTIONS, f"name one of {known}"),
        )
    return "\n".join(_describe_key(key) for key in KEYS if key.startswith(f"{section}."))


def _describe_key(key: str) -> str:
    """Return a paragraph: the key's default, what it takes, and what it means."""
    default = default_of(key)
    needed = "required" if default is PydanticUndefined else f"default {json.dumps(default)}"
    title = textwrap.fill(f"{key} ({needed}; {expected(key)})", _WIDTH, subsequent_indent="    ")
    meaning = textwrap.fill(" ".join(str(KEYS[key].description).split()), _WIDTH - 4)
    return f"{title}\n{textwrap.indent(meaning, '    ')}"


def default_of(key: str) -> Any:
    """Return the default of a key, or PydanticUndefined if it has none."""
    return KEYS[key].get_default(call_default_factory=False)


def expected(key: str) -> str:
    """Return in words what a key takes, such as "a number of at least 0 and at most 1, or null"."""
    return ", or ".join(map(_in_words, _alternatives(key)))


@cache
def _schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe."""
    return RunConfig.model_json_schema()


def _alternatives(key: str) -> list[dict[str, Any]]:
    """Return what a key takes, in the terms of JSON Schema."""
    schema = _schema()
    section, _, leaf = key.rpartition(".")
    if section:
        name = SECTIONS[section].__name__
        schema = schema["$defs"][name]
    entry = schema["properties"][leaf]
    alternatives: list[dict[str, Any]] = entry.get("anyOf", [entry])
    return alternatives


def _in_words(entry: Mapping[str, Any]) -> str:
    if "enum" in entry:
        return f"one of {', '.join(map(str, entry['enum']))}"
    if "items" in entry:
        return f"a list of: {_in_words(entry['items'])}"
    limits = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}
    words = [f"{limits[name]} {entry[name]}" for name in limits if name in entry]
    return " ".join([str(entry["type"]), *words])


def _set(
    values: dict[str, Any], path: Sequence[str], value: Any, *, replaces: bool = False
) -> None:
    """Set a value below nested dicts. Those of the caller's values are copied, not changed."""
    *parents, leaf = path
    for name in parents:
        inner = values.get(name)
        if inner is not None and not isinstance(inner, Mapping):
            raise UserError(
                f"unknown key {'.'.join(map(str, path))}: {name} is {shown(inner)}",
                fix="remove one of them",
            )
        values[name] = dict(inner or {})
        values = values[name]
    if leaf in values and not replaces:
        raise UserError(
            f"{leaf} has several values: {shown(values[leaf])} and {shown(value)}",
            fix="remove all but one; a command line changes a section by its keys",
        )
    values[leaf] = value


def _resolve_paths(values: dict[str, Any], keys: frozenset[str], folder: Path | None) -> None:
    for key in keys:
        section, _, leaf = key.rpartition(".")
        of_section = values.get(section) if section else values
        if not isinstance(of_section, dict):
            continue
        path = of_section.get(leaf)
        if isinstance(path, str):
            is_near = key != "run_dir"  # that a run's directory is there does not count
            of_section[leaf] = resolve_path(path, key, folder, may_be_near=is_near)


def _refusal(problems: Sequence[ErrorDetails], where: str) -> UserError:
    """Return what pydantic has found: all keys that are missing, or else the first problem."""
    missing = [_path_of(each) for each in problems if each["type"] == "missing"]
    if missing:
        names = ", ".join(f"{name} ({expected(name)})" for name in missing)
        return UserError(f"missing in {where}: {names}", fix=f"add {missing[0]}=...")
    path = _path_of(problems[0])
    if problems[0]["type"] == "extra_forbidden":
        return UserError(f"unknown key {path} in {where}", fix=fix_of_unknown(path))
    # The location goes on below the key: an item of a list, or an alternative of the type.
    known = [name for name in (*KEYS, *SECTIONS) if f"{path}.".startswith(f"{name}.")]
    key = max(known, key=len)
    of_key = [each for each in problems if _path_of(each).startswith(key)]
    problem = max(of_key, key=lambda each: len(each["loc"]))  # the alternative that fits best
    value = problem["input"]
    if isinstance(value, str) and problem["type"] in _NUMBERS:
        value = json.dumps(value)  # "3" is no number
    return UserError(f"{key}={shown(value)} in {where}: {problem['msg']}", fix=_fix(key, problem))


def _path_of(problem: ErrorDetails) -> str:
    return ".".join(map(str, problem["loc"]))


def _fix(key: str, problem: ErrorDetails) -> str:
    kind = problem["type"]
    value = problem["input"]
    if key in SECTIONS:
        first = next(name for name in KEYS if name.startswith(f"{key}."))
        return f"write its keys, such as {first}"
    if isinstance(value, str) and kind in _NUMBERS:
        return "write a number, without quotes"
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"write {value:.0f}"
    if kind == "literal_error" and value in ("none", "None"):
        return "write null"
    if kind == "literal_error":
        words = re.findall(r"\w+", problem["ctx"]["expected"])
        choices = [word for word in words if word != "or"]
        near = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.5)
        return f"did you mean {near[0]}?" if near else f"write one of {', '.join(choices)}"
    section = key.rpartition(".")[0]
    return _FIXES.get(kind, f"lezo-ds train --help {section} describes it".replace("  ", " "))
