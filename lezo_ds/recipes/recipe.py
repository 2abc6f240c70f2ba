"""What a recipe is: the configuration of a run, and what a reader should know about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The configuration of a run, with comments.

    Attributes:
        title: one line that says what is run.
        values: dotted keys and their values; keys with a default may be missing.
        notes: a comment for each key that needs one.
        num_gpus: number of ranks that it is written for.
        about: paragraphs by their heading, such as "Hardware" and "Expected".
    """

    title: str
    values: Mapping[str, Any]
    notes: Mapping[str, str]
    num_gpus: int
    about: Mapping[str, str]
