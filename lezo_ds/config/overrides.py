"""Recipe keys as options of a command: `--key value` and `--key=value` say the same as `key=value`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Sequence

from lezo_ds.config.schema import SCHEMA

_BOOLEANS = frozenset({"true", "false", "yes", "no", "on", "off"})
"""What YAML reads as true or false, in upper or lower case."""


def as_overrides(words: Sequence[str], list_options: Collection[str] = ()) -> list[str]:
    """Return the words of a command line with `key=value` in place of `--key value` and `--key=value`.

    A key is one of the schema, or any name with a dot in it: no option of a command has one, and the strict
    reader then names the nearest key. The word after a key is its value, also if it begins with one "-". A
    key for true or false can stand alone, which means true. A key without a value stays as it is.

    Args:
        words: the arguments.
        list_options: options that take all words up to the next option. What follows a key no longer belongs
            to such an option, and is put before it.

    >>> as_overrides(["--config", "demo", "--seed", "-1", "--train.packed=false"])
    ['--config', 'demo', 'seed=-1', 'train.packed=false']
    >>> as_overrides(["--grid", "zo.sparsity=0.5,0.75", "--seed", "1"], list_options=["--grid"])
    ['seed=1', '--grid', 'zo.sparsity=0.5,0.75']
    """
    found: list[str] = []
    place: int | None = None  # of the last list option in `found`
    list_ended = False
    rest = deque(words)
    while rest:
        word = rest.popleft()
        option = word.partition("=")[0]
        if is_key_option(option):
            word, list_ended = _override(word, rest), True
        elif option.startswith("--"):
            place, list_ended = (len(found) if option in list_options else None), False
        if place is not None and list_ended:
            found.insert(place, word)
            place += 1
        else:
            found.append(word)
    return found


def is_key_option(option: str) -> bool:
    """Return whether an option, such as "--zo.sparsity", stands for a key of a recipe."""
    name = option.removeprefix("--")
    return option.startswith("--") and (
        name in SCHEMA.keys or re.fullmatch(r"\w+(\.\w+)+", name, re.ASCII) is not None
    )


def _override(word: str, rest: deque[str]) -> str:
    """Return `key=value` for a word that begins with `--key`, and take its value from the words after it."""
    name, equals, _ = word.removeprefix("--").partition("=")
    if equals:
        return word.removeprefix("--")
    key = SCHEMA.keys.get(name)
    if key is not None and key.kind is bool and (not rest or rest[0].lower() not in _BOOLEANS):
        return f"{name}=true"
    if not rest or rest[0].startswith("--"):
        return word
    return f"{name}={rest.popleft()}"
