"""Types of command-line arguments."""

from __future__ import annotations

import argparse
from pathlib import Path

from lezo_ds.config.paths import expand


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def path(text: str) -> Path:
    """Read a path, in which ~ and $VAR are expanded: a shell does not do so in --out=~/runs.

    Raises:
        UserError: a variable is not set.
    """
    return Path(expand(text, "an argument"))


def path_or_name(text: str) -> str:
    """Read a path as `path` does, or a name on the hub."""
    return expand(text, "an argument")
