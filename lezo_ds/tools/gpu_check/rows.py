"""A row of the check: what was looked at, what was found, and whether it is right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        section: the part of the check.
        what: what was looked at.
        found: what was found, in words or as a number with its unit.
        passed: whether it is as it must be; None for a measurement, which nothing holds to a value.
    """

    section: str
    what: str
    found: str
    passed: bool | None = None
