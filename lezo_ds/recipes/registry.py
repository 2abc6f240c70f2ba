"""The recipes by name. A new one is one more entry of RECIPES."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lezo_ds.config import RunConfig, config_from_dict, config_to_dict, load_config
from lezo_ds.config.paths import expand
from lezo_ds.config.reading import nearest
from lezo_ds.errors import UserError
from lezo_ds.recipes.paper import PAPER_SCORES
from lezo_ds.recipes.paper_recipes import paper_recipe, recipe_name
from lezo_ds.recipes.recipe import Recipe
from lezo_ds.shipped import ROOT, deepspeed_command, find_file

RECIPES: dict[str, Callable[[], Recipe]] = {
    recipe_name(experiment): partial(paper_recipe, experiment) for experiment in PAPER_SCORES
}
"""Functions that return a recipe, by the name that --config takes."""

_WIDTH = 100
_INDENT = 10


def load_recipe(source: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a recipe.

    Args:
        source: the name of a recipe, or the path of a YAML file, which is searched as `find_file` does. None
            takes everything from the overrides.
        overrides: `key=value` changes.

    Raises:
        UserError: there is no such recipe or file; or as `load_config`.
    """
    if source is None:
        return load_config(None, overrides)
    source = expand(source, "--config")
    if (path := _file(source)) is not None:
        return load_config(path, overrides)
    return config_from_dict(_find(source).values, _where(source, overrides), overrides)


def recipe_text(source: str | None, overrides: Sequence[str] = ()) -> str:
    """Return the whole configuration that `load_recipe` reads, as YAML that can be saved and run.

    The text begins with comments: what is run, the command, the hardware, and the result to expect.
    """
    config = load_recipe(source, overrides)
    if source is None or _file(source) is not None:
        head = [f"# {_where(source, overrides)}"]
        return "\n".join([*head, *_yaml_lines(config_to_dict(config), {})]) + "\n"
    recipe = _find(source)
    command = [*deepspeed_command(recipe.num_gpus), "--config", source, *overrides]
    about = {}
    if overrides:
        about["Changed"] = f"{', '.join(overrides)}. What follows is about the recipe without these changes."
    changed = {override.partition("=")[0] for override in overrides}
    notes = {key: note for key, note in recipe.notes.items() if key not in changed}
    about |= recipe.about
    return commented_recipe(recipe.title, " ".join(command), about, config_to_dict(config), notes)


def commented_recipe(
    title: str, command: str, about: Mapping[str, str], values: Mapping[str, Any], notes: Mapping[str, str]
) -> str:
    """Return a recipe as YAML that begins with comments.

    Args:
        title: one line that says what is run.
        command: the command that runs it.
        about: paragraphs by their heading.
        values: sections and keys.
        notes: a comment for each dotted key that needs one.
    """
    head = [f"# {title}.", "#", f"# Command:  {command}"]
    for heading, text in about.items():
        first, others = f"# {heading + ':':{_INDENT}}", f"# {'':{_INDENT}}"
        head += textwrap.wrap(
            text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
        )
    return "\n".join([*head, *_yaml_lines(values, notes)]) + "\n"


def list_recipes() -> str:
    """Return a line for each recipe: its name and its title, which is the first comment of a shipped file."""
    files = {name: _title(path) for name, path in _shipped_recipes().items()}
    titles = files | {name: make().title for name, make in RECIPES.items()}
    width = max(map(len, titles))
    return "\n".join(f"{name:{width}}  {title}" for name, title in titles.items())


def _shipped_recipes() -> dict[str, Path]:
    """Return the files in launch/recipes by their names without .yaml."""
    return {path.stem: path for path in sorted((ROOT / "launch" / "recipes").glob("*.yaml"))}


def _title(recipe: Path) -> str:
    with recipe.open(encoding="utf-8") as lines:
        return next(lines).removeprefix("# ").rstrip(".\n")


def _file(source: str) -> Path | None:
    """Return the path of a recipe that is a file; None if `source` is the name of another recipe."""
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or (path.exists() and not path.is_dir()):
        return find_file(source)
    return _shipped_recipes().get(source)


def _where(source: str | None, overrides: Sequence[str]) -> str:
    parts = [] if source is None else [source]
    return " and ".join([*parts, "the command line"] if overrides or source is None else parts)


def _find(name: str) -> Recipe:
    if name in RECIPES:
        return RECIPES[name]()
    names = [*_shipped_recipes(), *RECIPES]
    near = nearest(name, names, count=3)
    raise UserError(
        "there is no recipe of this name, and no such file",
        got=name,
        expected=f"a YAML file, or one of {len(names)} names such as {next(iter(RECIPES))}",
        fix=f"did you mean {' or '.join(near)}?" if near else "lezo-ds train --list-recipes lists them",
    )


def _yaml_lines(values: Mapping[str, Any], notes: Mapping[str, str], prefix: str = "") -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        note = f"  # {notes[prefix + name]}" if prefix + name in notes else ""
        if isinstance(value, Mapping) and value:
            section = _yaml_lines(value, notes, f"{prefix}{name}.")
            lines += ["", f"{name}:{note}", *(f"  {line}" for line in section), ""]
        else:
            lines.append(_yaml_line(name, value) + note)
    return [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]


def _yaml_line(name: str, value: object) -> str:
    """Return a key and its value, which has no sections, as one line of YAML."""
    line = yaml.safe_dump({name: value}, width=10_000, allow_unicode=True).rstrip()
    # YAML gives each item of a list a line, and breaks a text at its line breaks. JSON is YAML on one line.
    return line if "\n" not in line else f"{name}: {json.dumps(value, ensure_ascii=False)}"
