"""OPT's published sizes, whose configs are known without the hub."""

from __future__ import annotations

from typing import Any

from lezo_ds.tools.benchmark.shapes import SHAPES, opt_config

PUBLISHED = tuple(name for name in SHAPES if name != "opt-tiny")
_OWNER = "facebook/"


def published_name(model: str) -> str | None:
    """Return the short name of a published OPT, None for any other model.

    >>> published_name("facebook/opt-30b"), published_name("opt-30b"), published_name("gpt2")
    ('opt-30b', 'opt-30b', None)
    """
    name = model.removeprefix(_OWNER)
    return name if name in PUBLISHED else None


def hub_id(name: str) -> str:
    """Return the hub id of a published OPT by its short name."""
    return _OWNER + name


def published_config(model: str) -> Any | None:  # noqa: ANN401
    """Return the transformers config of a published OPT, by either of its names; None for any other model."""
    name = published_name(model)
    return None if name is None else opt_config(name)
