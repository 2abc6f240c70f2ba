"""Reads the DeepSpeed JSON, and refuses settings that zeroth-order training cannot use."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from lezo_ds.config import flatten
from lezo_ds.errors import UserError

_TWICE_THE_MEMORY = "gathered weights would take twice the memory"
_ONLY_VALUES: tuple[tuple[str, tuple[object, ...], str], ...] = (
    # DeepSpeed keeps parameters below the threshold gathered, and never reads their updated shards.
    ("zero_optimization.stage3_param_persistence_threshold", (0,), "resident copies become stale"),
    ("zero_optimization.memory_efficient_linear", (False,), "it changes the losses of bf16"),
    ("zero_optimization.allgather_sequential", (True,), _TWICE_THE_MEMORY),
    ("zero_optimization.stage3_allgather_sequential", (True,), _TWICE_THE_MEMORY),
    # hpZ keeps a second copy of the weights inside each node, which updates of the shards do not reach.
    ("zero_optimization.zero_hpz_partition_size", (0, 1), "the second copy becomes stale"),
    ("zero_optimization.zero_quantized_weights", (False,), "the gathered weights would be quantized"),
    ("zero_optimization.zero_quantized_nontrainable_weights", (False,), "the shards would be quantized"),
    ("gradient_accumulation_steps", (1,), "use train.batch_size and train.micro_batch_size"),
    ("torch_autocast.enabled", (False,), "use model.dtype"),
)
"""Keys, the values that they may have (the first is the default), and the problem with other values."""


def load_ds_config(
    path: str | Path | None, dtype: str, world_size: int, micro_batch_size: int
) -> dict[str, Any]:
    """Read a DeepSpeed JSON, refuse settings that zeroth-order training cannot use, and complete it.

    Keys that begin with "_" are comments, at any depth. Keys that this function does not know (monitors,
    offload, aio, the comms logger) are passed on to DeepSpeed.

    Args:
        path: the JSON file. None uses ZeRO-3 with DeepSpeed's default settings.
        dtype: fp32, bf16 or fp16, from the recipe. The JSON does not have to repeat it.
        world_size: number of ranks.
        micro_batch_size: number of examples in one forward pass of one rank.

    Returns:
        The configuration for deepspeed.initialize.

    Raises:
        UserError: the file cannot be read, is not a JSON object, or does not use ZeRO stage 3; or a setting
            would corrupt the weights, change the losses or contradict the recipe.
    """
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}} if path is None else _read_json(Path(path))
    source = "the default" if path is None else str(path)
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") != 3:
        raise UserError(
            f"{source} does not use ZeRO stage 3",
            got=f"zero_optimization {zero!r}",
            expected='"zero_optimization": {"stage": 3}',
            fix="start from one of the files in ds_configs",
        )
    flat = flatten(config)
    unusable = partial(_unusable, source)
    for key, value in flat.items():
        if value == "auto":
            raise unusable(key, value, "a value (auto is not supported)")
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise unusable(key, config[key], "no such section, because LeZO is the optimizer")
    for key, values, reason in _ONLY_VALUES:
        value = flat.get(key, values[0])
        if value not in values:
            raise unusable(key, value, f"{json.dumps(values[0])} ({reason})")
    batch_sizes = {"train_micro_batch_size_per_gpu": micro_batch_size}
    for key, number in (batch_sizes | {"train_batch_size": micro_batch_size * world_size}).items():
        value = config.get(key, number)
        if value != number:
            raise unusable(key, value, f"{number}, as in the recipe")
    # Without allgather_sequential, DeepSpeed gathers several weights into a second buffer and copies them.
    zero |= {"allgather_sequential": True}
    zero |= {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    return _with_dtype(config | batch_sizes, source, dtype)


def _unusable(source: str, key: str, value: object, expected: str) -> UserError:
    return UserError(
        f"{key} in {source} cannot be used",
        got=json.dumps(value),
        expected=expected,
        fix=f"remove it ({key})",
    )


def _with_dtype(config: dict[str, Any], source: str, dtype: str) -> dict[str, Any]:
    for name in ("bf16", "bfloat16", "fp16"):  # bfloat16 is an alias of bf16 in DeepSpeed
        section = config.get(name, {})
        if not isinstance(section, dict):
            raise _unusable(source, name, section, "a section")
        asked = name.replace("bfloat16", "bf16") == dtype
        enabled = section.get("enabled", asked)
        if enabled != asked:
            raise UserError(
                f"{source} and the recipe set different dtypes",
                got=f'"{name}": {{"enabled": {json.dumps(enabled)}}} and model.dtype {dtype}',
                expected="the same dtype in both",
                fix=f"remove {name} from the JSON, because model.dtype is enough",
            )
    if dtype != "fp32":
        config[dtype] = {**config.get(dtype, {}), "enabled": True}
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_comments)
        if not isinstance(values, dict):
            raise ValueError(f"it holds {json.dumps(values)}")
    except OSError as error:
        raise UserError(
            f"cannot read the DeepSpeed configuration {path}",
            got=str(error),
            expected="a JSON file",
            fix="set deepspeed=ds_configs/zero3_cpu.json or another file in ds_configs",
        ) from error
    except ValueError as error:
        raise UserError(
            f"{path} is not a valid JSON object",
            got=str(error),
            expected="one JSON object with every key only once",
            fix="correct it, or start from one of the files in ds_configs",
        ) from error
    return values


def _without_comments(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    if len(section) != len(pairs):
        raise ValueError("a key is repeated: " + ", ".join(name for name, _ in pairs))
    return {name: value for name, value in section.items() if not name.startswith("_")}
