"""A run's configuration from a recipe, overrides or plain dicts, and the rules between its values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lezo_ds.config.algorithm import num_passes
from lezo_ds.config.paper import paper_recipe
from lezo_ds.config.paths import ROOT, expand, find_file, resolve_paths
from lezo_ds.config.reading import nearest, read_yaml
from lezo_ds.config.schema import READER, TRAINED, ZEROTH_ORDER, GenerationConfig, RunConfig, ZoConfig
from lezo_ds.config.task import check_data_keys
from lezo_ds.errors import UserError
from lezo_ds.registry import names_code, options_of
from lezo_ds.tasks.custom import CUSTOM
from lezo_ds.zo.estimators import ESTIMATORS, Estimator
from lezo_ds.zo.layers import LAYER_POLICIES, LayerPolicy

_COMMAND_LINE = "the command line"


def load_config(source: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a recipe, changed by `key=value` overrides, of which the last counts.

    Args:
        source: a YAML file, the name of one in launch/recipes, "paper" (see `paper_recipe`), or None.
        overrides: dotted keys and values, such as "zo.learning_rate=1e-6".
    """
    if source is None:
        return config_from_dict({}, _COMMAND_LINE, overrides)
    if source == "paper":
        values, overrides = paper_recipe(overrides)
        return config_from_dict(values, "--config paper", overrides)
    path = _recipe_file(expand(str(source), "--config"))
    where = f"{path} and {_COMMAND_LINE}" if overrides else str(path)
    return config_from_dict(read_yaml(path), where, overrides, folder=path.parent)


def _recipe_file(name: str) -> Path:
    path = find_file(name)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return path
    shipped = {file.stem: file for file in sorted((ROOT / "launch" / "recipes").glob("*.yaml"))}
    if name not in shipped:
        near = nearest(name, shipped) or ["a YAML file"]
        names = ", ".join(["paper", *shipped])
        raise UserError(
            f"--config {name} is neither a file nor one of {names}", fix=f"did you mean {near[0]}?"
        )
    return shipped[name]


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as nested plain dicts: what config.yaml and the journal hold."""
    return dataclasses.asdict(config)


def config_from_dict(
    values: Mapping[str, Any],
    where: str,
    overrides: Sequence[str] = (),
    *,
    recorded: bool = False,
    folder: Path | None = None,
) -> RunConfig:
    """Return the configuration that nested plain dicts hold: the inverse of `config_to_dict`.

    Args:
        values: sections and keys; keys with a default may be left out.
        where: the source of the values, for messages.
        overrides: as in `load_config`.
        recorded: whether a run recorded the values. They are then not checked against each other, which
            would import the user's modules that they name, and their paths stay.
        folder: of the recipe that holds the values (see `resolve_paths`).
    """
    flat = READER.flatten(values)
    if not recorded:
        flat = resolve_paths(flat, folder)
    flat |= resolve_paths(dict(READER.override(text) for text in overrides), None)
    if flat.get("data.prompt") is not None or flat.get("data.messages") is not None:
        flat.setdefault("data.task", CUSTOM)
    config: RunConfig = READER.read(flat, where)
    return config if recorded else _checked(config, where)


def _checked(config: RunConfig, where: str) -> RunConfig:
    """Return the configuration with the defaults of its components' options, if its values fit each other."""
    check_data_keys(config.data, has_own_objective=names_code(config.train.objective))
    _check_generation(config.generation)
    if config.method.startswith("icl") and (config.data.messages is not None or config.data.chat_template):
        raise UserError(
            f"method={config.method} shows no examples in a chat template",
            fix="set method=zero_shot, or write the examples into the conversations",
        )
    zo, steps = config.zo, config.train.steps
    if config.method not in TRAINED:
        return config
    needed: dict[str, object] = {"train.steps": steps}
    if config.method in ZEROTH_ORDER:
        needed |= {"zo.learning_rate": zo.learning_rate, "zo.sparsity": zo.sparsity}
    if missing := [key for key, value in needed.items() if value is None]:
        names = ", ".join(missing)
        raise UserError(
            f"missing in {where}: {names}, with method={config.method}", fix=f"add {missing[0]}=..."
        )
    if config.method in ZEROTH_ORDER:
        if steps is not None and zo.warmup_steps >= steps:
            raise UserError(
                f"zo.warmup_steps={zo.warmup_steps} is not below train.steps={steps}",
                fix="set zo.warmup_steps=0",
            )
        config = replace(config, zo=_with_options(zo))
    check_world(replace(config, partition_size=None), world_size=1)
    return config


def _with_options(zo: ZoConfig) -> ZoConfig:
    return replace(
        zo,
        estimator_options=_options(
            "estimator", zo.estimator_options, ESTIMATORS.find(zo.estimator), Estimator
        ),
        layer_policy_options=_options(
            "layer_policy", zo.layer_policy_options, LAYER_POLICIES.find(zo.layer_policy), LayerPolicy
        ),
    )


def _options(key: str, values: Mapping[str, Any], component: type, kind: type) -> dict[str, Any]:
    """Return all options of a component, with their defaults. UserError: an unknown one, or another type."""
    defaults = options_of(component, kind)
    for name, value in values.items():
        option = f"zo.{key}_options.{name}"
        if name not in defaults:
            near = nearest(name, defaults)
            fix = f"did you mean {near[0]}?" if near else f"its options are {', '.join(defaults) or 'none'}"
            raise UserError(f"{option} is no option of {component.__name__}", fix=fix)
        default = defaults[name]
        if type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
            kind_name = type(default).__name__
            raise UserError(f"{option}={value} is not of type {kind_name}", fix=f"set {option}={default}")
    return {**defaults, **values}


def check_world(config: RunConfig, world_size: int) -> None:
    """Refuse a batch or a partition that does not split evenly among `world_size` ranks."""
    if config.partition_size is not None and world_size % config.partition_size:
        raise UserError(
            f"partition_size={config.partition_size} does not divide {world_size} ranks",
            fix="set partition_size=1, or null",
        )
    batch, micro = config.train.batch_size, config.train.micro_batch_size
    if batch % micro == 0 and num_passes(config) % world_size == 0:
        return
    sizes = [size for size in range(1, batch + 1) if batch % (size * world_size) == 0]
    if sizes:
        fix = "set train.micro_batch_size to one of " + ", ".join(map(str, sizes))
    else:
        above = math.ceil(batch / world_size) * world_size
        fix = f"set train.batch_size={above} train.micro_batch_size={above // world_size}, or use fewer ranks"
    raise UserError(
        f"train.batch_size={batch} does not split into micro-batches of train.micro_batch_size={micro}, "
        f"equally many for each of {world_size} ranks",
        fix=fix,
    )


def _check_generation(generation: GenerationConfig) -> None:
    if generation.stop is not None and not all(generation.stop):
        raise UserError(
            "generation.stop has an empty string", fix="remove it; generation.stop=[] has no stops"
        )
    drawn = {"num_samples": generation.num_samples > 1, "top_p": generation.top_p is not None}
    if generation.temperature == 0 and any(drawn.values()):
        name = next(name for name, is_set in drawn.items() if is_set)
        raise UserError(
            f"generation.{name} needs a temperature: without one, all answers to a prompt are the same",
            fix=f"set generation.temperature=1, or remove generation.{name}",
        )
