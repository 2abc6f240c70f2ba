"""Strict reading: YAML recipes, `key=value` overrides and plain dicts become configurations."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from lezo_ds.config.keys import Choices, Key, Schema, yaml_scalar
from lezo_ds.errors import UserError, cut
from lezo_ds.registry import names_code

_MAX_YAML_DEPTH, _MAX_YAML_NODES = 10, 10_000
_MAX_SHOWN = 200
_NOT_IN_FILES = re.compile(r"[\0\ud800-\udfff]")
"""A null character, and halves of characters (lone surrogates): no file name or UTF-8 file holds these."""


def flatten(
    values: Mapping[str, Any],
    prefix: str = "",
    *,
    keep_empty: bool = False,
    whole: Collection[str] = frozenset(),
) -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys.

    Args:
        values: dicts of dicts.
        prefix: stands before every key.
        keep_empty: whether an empty dict becomes a value; otherwise it has no key.
        whole: dotted keys whose dict is a value.

    >>> flatten({"seed": 1, "train": {"steps": 2}})
    {'seed': 1, 'train.steps': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and (value or not keep_empty) and key not in whole:
            flat |= flatten(value, key + ".", keep_empty=keep_empty, whole=whole)
        else:
            flat[key] = value
    return flat


def flatten_sections(schema: Schema, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections and keys as one dict with dotted keys; an empty section (null in YAML) has none."""
    may_be_empty = {*schema.sections, *schema.open_sections}
    flat = flatten(values, keep_empty=True, whole=schema.map_keys)
    return {k: v for k, v in flat.items() if (v is not None and v != {}) or k not in may_be_empty}


def read(schema: Schema, values: Mapping[str, Any], where: str, *, recorded: bool = False) -> Any:  # noqa: ANN401 (the schema's class)
    """Return a configuration.

    Args:
        schema: its keys.
        values: by dotted key; keys with a default may be missing.
        where: the source of the values, for messages.
        recorded: whether a run recorded the values. A task or metric that is not registered here is kept
            then, since an export, a pack or a report needs none.

    Raises:
        UserError: an unknown or missing key, or a value of the wrong type or out of range.
    """
    missing = [key for key in schema.keys.values() if key.required and key.name not in values]
    checked = {key.name: key.default for key in schema.keys.values()}
    options: dict[str, dict[str, Any]] = {name: {} for name in schema.open_sections}
    for name, value in values.items():
        section, _, option = name.rpartition(".")
        if section in options:
            options[section][option] = value
        else:
            key = find_key(schema, name, where)
            if recorded and key.choices is not None and key.choices.code is not None:
                key = replace(key, choices=replace(key.choices, any_name=True))
            checked[name] = check_value(key, value, where)
    if missing:
        raise UserError(
            f"missing in {where}: {', '.join(key.name for key in missing)}",
            got="nothing",
            expected="; ".join(f"{key.name}, {key.expected}" for key in missing),
            fix=f"add it to the file, or {missing[0].name}=... on the command line",
        )
    for section, given in options.items():
        checked[section] = _read_options(schema.keys[section], given, checked, where)
    return _build(schema, schema.config_type, checked, "")


def find_key(schema: Schema, name: str, where: str) -> Key:
    """Return the key of a dotted name.

    Raises:
        UserError: there is none, or it is a section; names the nearest key.
    """
    section, _, leaf = name.rpartition(".")
    siblings = [key for key in schema.keys if key.rpartition(".")[0] == section]
    if name in schema.keys and name not in schema.open_sections:
        return schema.keys[name]
    if name in schema.sections or name in schema.open_sections:
        below = [key for key in schema.keys if key.startswith(name + ".")]
        raise UserError(
            f"{name} in {where} is a section, not a value",
            got="a single value",
            expected="the keys " + ", ".join(below) if below else schema.keys[name].expected,
            fix=f"write them below {name}:, or {name}.KEY=... on the command line",
        )
    elsewhere = [key for key in schema.keys if key.rpartition(".")[2] == leaf]
    near = elsewhere or nearest(name, siblings) or nearest(name, schema.keys)
    raise UserError(
        f"unknown key in {where}",
        got=name,
        expected="one of " + ", ".join(siblings or schema.keys),
        fix=f"did you mean {near[0]}?" if near else "remove it",
    )


def load_yaml(text: str | bytes) -> Any:  # noqa: ANN401 (anything that YAML can say)
    """Return the plain values of a YAML text. No tag makes an object.

    Raises:
        yaml.YAMLError: it is not YAML, repeats a key, is nested deeply, or stands for too many values.
    """
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        _refuse_large(node)
        _refuse_repeated_keys(node, "", set())
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise
    except Exception as error:  # PyYAML raises many types for a deep text, or a bad date, number or tag
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the sections and keys of a YAML file.

    Raises:
        UserError: there is no such file, it is not YAML, it holds no keys, or it repeats one.
    """
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {path}",
            got=str(error),
            expected="a YAML recipe",
            fix="check the path; launch/recipes has an example",
        ) from error
    except yaml.YAMLError as error:
        raise UserError(
            f"{path} is not valid YAML",
            got=" ".join(str(error).split()),
            expected="key: value lines, each key once, sections indented",
            fix="correct the line that is named; launch/recipes has an example",
        ) from error
    if not isinstance(values, dict):
        raise UserError(
            f"{path} holds no keys",
            got=type(values).__name__,
            expected="key: value lines",
            fix="see launch/recipes for an example",
        )
    return values


def parse_override(schema: Schema, override: str) -> tuple[str, Any]:
    """Return the key and the value of `key=value`.

    Args:
        schema: all keys. Only a key for texts takes a list, such as data.labels=[yes, no], or a map.
        override: the text. The value is written in YAML. The value of a key for a single text may also be
            the text itself: data.prompt={text} It is

    Raises:
        UserError: it is not of that form.
    """
    name, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", name):
        raise UserError(
            "an argument is not an override",
            got=override,
            expected="key=value or --key value, with a dotted key",
            fix="write for instance zo.learning_rate=1e-6",
        )
    kind = schema.keys[name].kind if name in schema.keys else None
    if kind is str and _is_plain(text):
        return name, _plain_text(name, text)
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(
            f"the value of {name} on the command line is not YAML",
            got=shown(text),
            expected="texts" if kind is list else "a number, text or null",
            fix=f"put all of the argument in the shell's quotes: '{name}=...'",
        ) from error
    if isinstance(value, dict | list) and kind is not list:
        raise UserError(
            f"the value of {name} on the command line is not a single value",
            got=shown(text),
            expected="a number, text or null",
            fix="give each key separately, as section.key=value",
        )
    return name, value


def _is_plain(text: str) -> bool:
    """Return whether a value is the text itself: it is neither in the quotes of YAML nor null."""
    inner = text.strip()
    is_quoted = len(inner) > 1 and inner[0] == inner[-1] and inner[0] in "'\""
    return not is_quoted and inner.lower() not in ("", "~", "null")


def _plain_text(name: str, text: str) -> str:
    """Return a text from the command line.

    Raises:
        UserError: it has a line break as YAML writes it in quotes. Plain text would keep the backslash.
    """
    if "\\n" not in text:
        return text
    raise UserError(
        f"{name} on the command line has a backslash and an n, which is no line break there",
        got=shown(text),
        expected="a line break as YAML writes it, in double quotes",
        fix=f"write {name}='\"...\\n...\"', with both kinds of quotes, or set it in the recipe",
    )


def check_value(key: Key, value: object, where: str) -> Any:  # noqa: ANN401 (one of the key's type)
    """Return a key's value, converted to the key's type if YAML gave another for it.

    Raises:
        UserError: it is of another type or out of range.
    """
    if value is None and key.optional:
        return None
    if key.kind is float:
        value = _as_float(value)
    if key.kind is list:
        return _check_texts(key, value, where)
    if key.choices is not None and isinstance(value, str):
        value = next((name for name in key.choices.names if name.lower() == value.lower()), value)
    fits = type(value) is key.kind and (key.choices is None or _is_choice(key.choices, value))
    if fits and key.range is not None:
        fits = value in key.range  # type: ignore[operator]  # only numbers have a range
    if fits and not (isinstance(value, str) and _NOT_IN_FILES.search(value)):
        return value
    raise UserError(
        f"{key.name} in {where} is not valid",
        got=shown(value),
        expected=key.expected,
        fix=_fix_of_value(key, value),
    )


def _is_choice(choices: Choices, value: Any) -> bool:  # noqa: ANN401 (of the key's type)
    if choices.any_name or (choices.code is not None and isinstance(value, str) and names_code(value)):
        return isinstance(value, str)
    return value in choices.names


def _check_texts(key: Key, value: object, where: str) -> list[str] | dict[str, str]:
    """Return the value of a key for texts: a list or, if the key accepts one, a map. Numbers become text."""
    if isinstance(value, str):
        value = [value] if key.exact_texts else [text.strip() for text in value.split(",")]
    found: list[object] = value if isinstance(value, list) else []
    if key.may_map and isinstance(value, Mapping):
        found = [*value.keys(), *value.values()]
    is_valid = all(type(text) in (str, int, float) and not _NOT_IN_FILES.search(str(text)) for text in found)
    if is_valid and (found or (key.exact_texts and value == [])):
        if isinstance(value, Mapping):
            return {str(name): str(text) for name, text in value.items()}
        return _check_choices(key, [str(text) for text in found], where)
    # YAML takes yes, no, on, off, true and false without quotes for truth values.
    is_boolean = any(isinstance(text, bool) for text in found)
    raise UserError(
        f"{key.name} in {where} is not valid",
        got=shown(value),
        expected=key.expected,
        fix="write yes, no, true and false in quotes" if is_boolean else f"set {key.name} to texts",
    )


def _check_choices(key: Key, texts: list[str], where: str) -> list[str]:
    """Return a list of texts, each once and by its registered name if the key has choices."""
    if key.choices is None:
        return texts
    known = {name.lower(): name for name in key.choices.names}
    for text in texts:
        if text.lower() not in known:
            raise UserError(
                f"{key.name} in {where} is not valid",
                got=shown(text),
                expected=key.expected,
                fix=_fix_of_value(key, text),
            )
    return list(dict.fromkeys(known[text.lower()] for text in texts))


def shown(value: object) -> str:
    """Return a value as an error shows it: cut off if it is long."""
    return cut("null" if value is None else repr(value), _MAX_SHOWN)


def nearest(name: str, candidates: Iterable[str], count: int = 1) -> list[str]:
    """Return the candidates that a misspelled name may stand for, the likeliest first."""
    known = {candidate.lower(): candidate for candidate in candidates}
    return [known[match] for match in difflib.get_close_matches(name.lower(), known, n=count)]


def _build(schema: Schema, section: type, values: Mapping[str, Any], prefix: str) -> Any:  # noqa: ANN401
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        name = prefix + field.name
        nested = schema.sections.get(name)
        arguments[field.name] = _build(schema, nested, values, name + ".") if nested else values[name]
    return section(**arguments)


def _read_options(
    key: Key, given: Mapping[str, Any], checked: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return all options of a component: those given, and defaults."""
    assert key.options is not None
    component = checked[key.chooser]
    defaults = key.options.defaults(component)
    found = dict(defaults)
    for name, value in given.items():
        if name not in defaults:
            near = nearest(name, defaults)
            raise UserError(
                f"unknown option in {where}",
                got=f"{key.name}.{name}, with {key.chooser}={component}",
                expected=f"one of {', '.join(defaults)}" if defaults else "none: it has no options",
                fix=f"did you mean {key.name}.{near[0]}?" if near else "remove it",
            )
        default = defaults[name]
        option = Key(name=f"{key.name}.{name}", kind=type(default), default=default)
        found[name] = check_value(option, value, where)
    return found


def _fix_of_value(key: Key, value: object) -> str:
    if key.choices is not None:
        near = nearest(str(value), key.choices.names)
        return f"did you mean {near[0]}?" if near else f"set {key.name} to one of these"
    if isinstance(value, str) and _NOT_IN_FILES.search(value):
        return "remove null characters and lone surrogates"
    if key.kind is str and value is not None:
        return f'write it in quotes: "{value}"'
    if key.required or key.default is None:
        return f"set {key.name} to {key.expected}"
    return f"set {key.name}={yaml_scalar(key.default)}"


def _as_float(value: object) -> object:
    """Accept whole numbers, and 1e-6, which YAML 1.1 reads as text because it has no point, as floats."""
    scientific = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    if type(value) in (int, float) or scientific:
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:  # a whole number of more than 308 digits
            return str(value)
        # No key accepts NaN or infinity; as text they are refused.
        return number if math.isfinite(number) else str(number)
    return value


def _refuse_large(root: yaml.Node | None) -> None:
    """Refuse deep nesting, and aliases of aliases: a few lines can stand for billions of values."""
    level = [] if root is None else [root]
    num_nodes = 0
    for depth in range(_MAX_YAML_DEPTH):
        num_nodes += len(level)
        if num_nodes > _MAX_YAML_NODES:
            raise yaml.YAMLError(f"more than {_MAX_YAML_NODES} values at {depth + 1} levels")
        level = [child for node in level for child in _children(node)]
    if level:
        raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=level[0].start_mark)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _refuse_repeated_keys(node: yaml.Node | None, prefix: str, seen: set[str]) -> None:
    """YAML forbids a repeated key, but safe_load silently keeps the last: half a recipe would be lost."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if name in seen:
            raise yaml.MarkedYAMLError(problem=f"repeated key {name}", problem_mark=key.start_mark)
        seen.add(name)
        _refuse_repeated_keys(value, name + ".", seen)
