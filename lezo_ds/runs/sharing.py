"""What of a run's facts may be shared: names in place of this machine's paths, and no secrets.

A command line can hold a token, and a path can hold a user's name. Both are of no use on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lezo_ds.config import flatten
from lezo_ds.config.overrides import as_overrides
from lezo_ds.config.paths import PATH_KEYS
from lezo_ds.config.schema import SCHEMA

_ENVIRONMENT = ("versions", "hardware", "platform", "world_size", "threads")
_HIDDEN = "..."


def shared_path(path: str) -> str:
    """Return a path as it may be shared.

    Hub ids and paths below the working directory stay. Of all others, the last part stays.

    >>> shared_path("/data/alice/opt-13b"), shared_path("facebook/opt-13b")
    ('opt-13b', 'facebook/opt-13b')
    """
    is_private = Path(path).is_absolute() or ".." in path or "://" in path or path.startswith("~")
    return Path(path).name if is_private else path


def shared_command(words: Sequence[str]) -> list[str]:
    """Return a command line as it may be shared.

    The name of the program, the recipe, and the overrides of config keys stay, with `shared_path` of their
    values. `--key value` becomes `key=value`. Every other word becomes "...".

    Args:
        words: the program and its arguments.

    >>> shared_command(["/data/alice/train.py", "--config", "mine.yaml", "seed=3", "--hub_token", "hf_x"])
    ['train.py', '--config', 'mine.yaml', 'seed=3', '...', '...']
    """
    program, *arguments = words
    shared, previous = [Path(program).name], ""
    for word in as_overrides(arguments):
        key, equals, value = word.partition("=")
        if word in ("--config", "--dry-run") or (previous == "--config" and not word.startswith("-")):
            shared.append(shared_path(word))
        elif equals and (key in SCHEMA.keys or key.rpartition(".")[0] in SCHEMA.open_sections):
            shared.append(f"{key}={shared_path(value)}")
        else:
            shared.append(_HIDDEN)
        previous = word
    return shared


def shared_environment(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts in a run's environment.json as they may be shared.

    Args:
        facts: from `environment` of this version, or an earlier one that recorded the whole command line.
    """
    shared = {name: facts[name] for name in _ENVIRONMENT if name in facts}
    command = facts.get("command")
    if isinstance(command, list) and len(command) > 1 and all(isinstance(word, str) for word in command):
        shared["command"] = ["python", *shared_command(command[1:])]
    return shared


def shared_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested config values with `shared_path` of all paths."""
    shared = dict(config)
    for key in PATH_KEYS:
        section, _, name = key.rpartition(".")
        values = shared.get(section) if section else shared
        if isinstance(values, dict) and isinstance(values.get(name), str):
            changed = {**values, name: shared_path(values[name])}
            shared = {**shared, section: changed} if section else changed
    return shared


def private_paths(config: Mapping[str, Any]) -> list[str]:
    """Return "key=path" for each path in nested config values that `shared_path` changes."""
    before, after = flatten(config), flatten(shared_config(config))
    return [f"{key}={path}" for key, path in before.items() if after[key] != path]
