"""A run's configuration from a recipe, overrides or plain dicts, and the rules between its values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lezo_ds.config.algorithm import num_passes
from lezo_ds.config.paths import with_places
from lezo_ds.config.reading import check_value, find_key, flatten_sections, parse_override, read, read_yaml
from lezo_ds.config.schema import SCHEMA, TRAINED, ZEROTH_ORDER, GenerationConfig, RunConfig
from lezo_ds.config.task import check_data_keys
from lezo_ds.errors import UserError
from lezo_ds.registry import names_code
from lezo_ds.tasks.custom import CUSTOM

_COMMAND_LINE = "the command line"


def load_config(path: Path | None, overrides: Sequence[str]) -> RunConfig:
    """Read a recipe and change it by `key=value` overrides.

    Args:
        path: YAML file; None takes everything from the overrides.
        overrides: dotted keys and YAML scalars, such as "zo.learning_rate=1e-6". If a key is repeated, its
            last value counts.

    Raises:
        UserError: no such file, not YAML, an unknown, missing or repeated key, a value of the wrong type
            or out of range, or values that contradict each other.
    """
    values = {} if path is None else read_yaml(path)
    sources = ([str(path)] if path else []) + ([_COMMAND_LINE] if overrides or not path else [])
    folder = None if path is None else path.parent
    return config_from_dict(values, " and ".join(sources), overrides, folder=folder)


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
        recorded: whether a run recorded the values. Its task need not be known here, and its paths stay.
        folder: the folder of the recipe that holds the values (see `with_places`); None if it is no file.

    Raises:
        UserError: as `load_config`.
    """
    flat = flatten_sections(SCHEMA, values)
    if not recorded:
        flat = with_places(flat, where, folder)
    flat |= with_places(dict(parse_override(SCHEMA, text) for text in overrides), _COMMAND_LINE)
    if flat.get("data.prompt") is not None or flat.get("data.messages") is not None:
        flat.setdefault("data.task", CUSTOM)
    config: RunConfig = read(SCHEMA, flat, where, recorded=recorded)
    if not recorded:
        check_data_keys(config.data, has_own_objective=names_code(config.train.objective))
    _check_generation(config.generation, where)
    if config.method.startswith("icl") and (config.data.messages is not None or config.data.chat_template):
        raise UserError(
            f"method {config.method} in {where} shows no examples in a chat template",
            got="data.messages or data.chat_template",
            expected="a task whose prompt is plain text",
            fix="set method=zero_shot, or write the examples into the conversations",
        )
    if config.method in TRAINED:
        check_world(replace(config, partition_size=None), world_size=1)
        _check_training(config, where)
    return config


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that no run's configuration accepts, before the rest of it is known.

    Raises:
        UserError: an unknown key, or a value of the wrong type or out of range.
    """
    for override in overrides:
        name, value = parse_override(SCHEMA, override)
        if name.rpartition(".")[0] not in SCHEMA.open_sections:
            check_value(find_key(SCHEMA, name, _COMMAND_LINE), value, _COMMAND_LINE)
        with_places({name: value}, _COMMAND_LINE)


def describe() -> str:
    """Return every key with its type, limits, default and meaning, as the command's help shows it."""
    return SCHEMA.describe()


def check_world(config: RunConfig, world_size: int) -> None:
    """Refuse a batch or a partition that does not split evenly among the ranks.

    Args:
        config: the run's configuration.
        world_size: number of ranks, at least 1.

    Raises:
        UserError: names the micro-batch sizes that fit, or batch sizes if none does; or partition_size does
            not divide the number of ranks.
    """
    if config.partition_size is not None and world_size % config.partition_size:
        raise UserError(
            "partition_size does not divide the number of ranks",
            got=f"partition_size={config.partition_size}, {world_size} ranks",
            expected=f"a divisor of {world_size}",
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
        f"a batch of {batch} does not split into micro-batches of {micro}, equally many for each rank",
        got=f"train.batch_size={batch}, train.micro_batch_size={micro}, {world_size} ranks",
        expected="train.batch_size a multiple of train.micro_batch_size times the number of ranks",
        fix=fix,
    )


def _check_generation(generation: GenerationConfig, where: str) -> None:
    if generation.stop is not None and not all(generation.stop):
        raise UserError(
            f"generation.stop in {where} has an empty text",
            got=repr(list(generation.stop)),
            expected='texts that end an answer, such as ["\\n"], or none: []',
            fix="remove the empty text",
        )
    changed = {"num_samples": generation.num_samples > 1}
    changed |= {"top_p": generation.top_p is not None}
    if generation.temperature == 0 and any(changed.values()):
        name = next(name for name, is_changed in changed.items() if is_changed)
        raise UserError(
            f"generation.{name} in {where} needs a temperature",
            got=f"generation.temperature=0, generation.{name}={getattr(generation, name)}",
            expected="a temperature above 0: without one, all answers to a prompt are the same",
            fix=f"set generation.temperature=1, or remove generation.{name}",
        )


def _check_training(config: RunConfig, where: str) -> None:
    zo, steps = config.zo, config.train.steps
    needed: dict[str, object] = {"train.steps": steps}
    if config.method in ZEROTH_ORDER:
        needed = {"zo.learning_rate": zo.learning_rate, "zo.sparsity": zo.sparsity} | needed
    for key, value in needed.items():
        if value is None:
            raise UserError(
                f"missing in {where}: {key}",
                got="null",
                expected=f"{SCHEMA.keys[key].expected.removesuffix(' or null')}, with method {config.method}",
                fix=f"add it to the file, or {key}=... on the command line",
            )
    if config.method in ZEROTH_ORDER and steps is not None and zo.warmup_steps >= steps:
        raise UserError(
            f"the warm-up in {where} is as long as the run",
            got=f"zo.warmup_steps={zo.warmup_steps}, train.steps={steps}",
            expected="zo.warmup_steps below train.steps",
            fix="set zo.warmup_steps=0",
        )
