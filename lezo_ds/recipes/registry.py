"""The recipes by name. A new one is one more entry of RECIPES."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lezo_ds.config import RunConfig, config_from_dict, config_to_dict, load_config
from lezo_ds.config.reading import nearest, parse_override
from lezo_ds.errors import UserError
from lezo_ds.recipes.paper import PAPER_SCORES
from lezo_ds.recipes.paper_recipes import paper_recipe, recipe_name
from lezo_ds.recipes.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {
    recipe_name(experiment): partial(paper_recipe, experiment) for experiment in PAPER_SCORES
}
"""Functions that return a recipe, by the name that --config takes."""

_WIDTH = 100
_INDENT = 10


def load_recipe(source: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a recipe.

    Args:
        source: the name of a recipe, or the path of a YAML file; None takes everything from the overrides.
        overrides: `key=value` changes.

    Raises:
        UserError: there is no such recipe or file; or as `load_config`.
    """
    if source is None or _is_path(source):
        return load_config(None if source is None else Path(source), overrides)
    return config_from_dict(_find(source).values, _where(source, overrides), overrides)


def recipe_text(source: str | None, overrides: Sequence[str] = ()) -> str:
    """Return the whole configuration that `load_recipe` reads, as YAML that can be saved and run.

    The text begins with comments: what is run, the command, the hardware, and the result to expect.
    """
    config = load_recipe(source, overrides)
    if source is None or _is_path(source):
        head = [f"# {_where(source, overrides)}"]
        return "\n".join([*head, *_yaml_lines(config_to_dict(config), {})]) + "\n"
    recipe = _find(source)
    command = f"deepspeed --num_gpus {recipe.num_gpus} launch/train.py --config {source}"
    head = [f"# {recipe.title}.", "#", f"# Command:  {' '.join([command, *overrides])}"]
    about = {}
    if overrides:
        about["Changed"] = f"{', '.join(overrides)}. What follows is about the recipe without these changes."
    for heading, text in (about | dict(recipe.about)).items():
        first, others = f"# {heading + ':':{_INDENT}}", f"# {'':{_INDENT}}"
        head += textwrap.wrap(
            text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
        )
    changed = {parse_override(override)[0] for override in overrides}
    notes = {key: note for key, note in recipe.notes.items() if key not in changed}
    return "\n".join([*head, *_yaml_lines(config_to_dict(config), notes)]) + "\n"


def list_recipes() -> str:
    """Return a line for each recipe: its name and its title."""
    width = max(map(len, RECIPES))
    return "\n".join(f"{name:{width}}  {make().title}" for name, make in RECIPES.items())


def _is_path(source: str) -> bool:
    return Path(source).suffix in (".yaml", ".yml") or Path(source).exists()


def _where(source: str | None, overrides: Sequence[str]) -> str:
    parts = [] if source is None else [source]
    return " and ".join([*parts, "the command line"] if overrides or source is None else parts)


def _find(name: str) -> Recipe:
    if name in RECIPES:
        return RECIPES[name]()
    near = nearest(name, RECIPES, count=3)
    raise UserError(
        "there is no recipe of this name, and no such file",
        got=name,
        expected=f"a YAML file, or one of {len(RECIPES)} names such as {next(iter(RECIPES))}",
        fix=f"did you mean {' or '.join(near)}?" if near else "launch/train.py --list-recipes lists them",
    )


def _yaml_lines(values: Mapping[str, Any], notes: Mapping[str, str], prefix: str = "") -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            section = _yaml_lines(value, notes, f"{prefix}{name}.")
            lines += ["", f"{name}:", *(f"  {line}" for line in section), ""]
        else:
            note = f"  # {notes[prefix + name]}" if prefix + name in notes else ""
            lines.append(yaml.safe_dump({name: value}, width=10_000).rstrip() + note)
    return [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]
