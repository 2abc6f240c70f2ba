"""From a recipe or a recorded run, and `key=value` overrides, to a run's configuration.

recipe.yaml   --config paper   header of a journal, config.yaml
     |               |                      |
  nested values, whose paths are resolved   |    nested values, whose paths stay
     |_______________|______________________|
                     |
                flat values  <--  overrides
                     |
                 RunConfig   <--  the rules between values (not for a recorded run)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lezo_ds.config.checks import checked
from lezo_ds.config.paper import paper_recipe
from lezo_ds.config.paths import expand, find_file, resolve_paths, shipped_files
from lezo_ds.config.schema import READER, RunConfig
from lezo_ds.config.yaml_text import read_recipe
from lezo_ds.errors import UserError, did_you_mean
from lezo_ds.registry import FOLDERS
from lezo_ds.tasks.custom import CUSTOM
from lezo_ds.zo.laws import DenseLaw

TOKENS_OF_TURN = 256
"""The default of generation.max_new_tokens in a chat."""


def load_config(source: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a recipe.

    Args:
        source: A YAML file, the name of one in launch/recipes, "paper" (see `paper_recipe`), or
            None if the overrides have all keys.
        overrides: Changes of the form `key=value`, of which the last of a key counts.

    Raises:
        UserError: The recipe cannot be read, or a key or value is wrong.
    """
    return config_from_dict(*find_recipe(source, overrides))


def find_recipe(
    source: str | Path | None, overrides: Sequence[str] = ()
) -> tuple[Mapping[str, Any], str, Sequence[str], Path | None]:
    """Return the values of a recipe, their source, the overrides that are left, and its folder.

    They are arguments of `config_from_dict`.
    """
    if source is None:
        return {}, "the command line", overrides, None
    if source == "paper":
        values, overrides = paper_recipe(overrides)
        return values, "--config paper", overrides, None
    name = expand(str(source), "--config")
    path = find_file(name)
    if not path.is_file() and path.suffix not in (".yaml", ".yml"):
        shipped = shipped_files("launch/recipes/*.yaml")
        if name not in shipped:
            raise UserError(
                f"--config {name} is neither a file nor one of paper, {', '.join(shipped)}",
                fix=did_you_mean(name, shipped, "name a YAML file"),
            )
        path = shipped[name]
    return read_recipe(path), str(path), overrides, path.parent


def _answers_in_chat(flat: Mapping[str, Any]) -> bool:
    """Return whether the model's answers are turns of a chat, given the flat values of a recipe."""
    if flat.get("data.messages") is not None:
        return True
    has_candidates = any(flat.get(key) is not None for key in ("data.labels", "data.choices"))
    is_judged = flat.get("train.objective", "task") != "task"
    return flat.get("data.chat_template") is True and (is_judged or not has_candidates)


def tokens_of_turn(max_length: object) -> int:
    """Return the default of generation.max_new_tokens in a chat: at most half of an input."""
    if not isinstance(max_length, int):
        return TOKENS_OF_TURN
    return max(1, min(TOKENS_OF_TURN, max_length // 2))


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as nested plain dicts, as in config.yaml and the journal."""
    return dataclasses.asdict(config)


def config_from_dict(
    values: Mapping[str, Any],
    where: str,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    *,
    recorded: bool = False,
    opened: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Return the configuration that nested plain dicts hold: the inverse of `config_to_dict`.

    Args:
        values: The nested dicts.
        where: The source of the values, for messages.
        overrides: Changes of the form `key=value`, of which the last of a key counts.
        folder: The folder of the recipe that holds the values (see `resolve_paths`). From now on,
            the modules that a configuration names are looked for there.
        recorded: Whether the values are those of a run. Their paths then stay as they are, and the
            values are not checked against each other: that would import the user's modules.
        opened: Sections of a model to open, which take the place of those in `values`. There is no
            run then, so the values are not checked, either.

    Raises:
        UserError: A key or value is wrong.
    """
    if folder is not None:
        FOLDERS[:] = [str(folder.absolute())]
    flat = READER.flatten(values)
    if not recorded:
        flat = resolve_paths(flat, folder)
    if opened is not None:
        others = {key: flat[key] for key in flat if key.partition(".")[0] not in opened}
        flat = {"run_dir": "", **others, **READER.flatten(opened)}
    changes = dict(READER.override(override) for override in overrides)
    flat |= resolve_paths(changes, None)
    if flat.get("data.prompt") is not None or flat.get("data.messages") is not None:
        flat.setdefault("data.task", CUSTOM)
    if _answers_in_chat(flat):
        # A recorded run has these keys, and they keep the meaning that they had when it began.
        flat.setdefault("generation.stop", [])
        flat.setdefault("generation.max_new_tokens", tokens_of_turn(flat.get("data.max_length")))
    if not flat.get("zo.noise_rank"):
        # As all releases recorded it, so that their runs go on.
        flat.setdefault("zo.probes_per_pass", DenseLaw.most_probes)
    if overrides and values:
        where += " and the command line"
    config: RunConfig = READER.read(flat, where)
    return config if recorded or opened is not None else checked(config)
