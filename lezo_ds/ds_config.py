"""DeepSpeed's JSON: it is read strictly, and settings that zeroth-order training cannot use are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lezo_ds.config import flatten
from lezo_ds.errors import UserError

_ONLY_VALUES: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("zero_optimization.stage3_param_persistence_threshold", (0,), "resident copies become stale"),
    ("zero_optimization.memory_efficient_linear", (False,), "it changes the losses of bf16"),
    ("zero_optimization.allgather_sequential", (True,), "gathered weights would take twice the memory"),
    (
        "zero_optimization.stage3_allgather_sequential",
        (True,),
        "gathered weights would take twice the memory",
    ),
    ("zero_optimization.zero_hpz_partition_size", (0, 1), "the second copy becomes stale"),
    ("zero_optimization.zero_quantized_weights", (False,), "the gathered weights would not be the model's"),
    ("zero_optimization.zero_quantized_nontrainable_weights", (False,), "the shards would be quantized"),
    ("gradient_accumulation_steps", (1,), "use train.batch_size and train.micro_batch_size"),
    ("torch_autocast.enabled", (False,), "use model.dtype"),
)
"""Keys, the only values that they may have, and what is wrong with any other."""


def load_ds_config(
    path: str | Path | None, dtype: str, world_size: int, micro_batch_size: int
) -> dict[str, Any]:
    """Read a DeepSpeed JSON, refuse what zeroth-order training cannot use, and complete it.

    Keys that begin with "_" are comments, at any depth. Keys that this function does not know (monitors,
    offload, aio, the comms logger) are passed on to DeepSpeed.

    Args:
        path: the JSON file; None for ZeRO-3 with DeepSpeed's default settings.
        dtype: fp32, bf16 or fp16, from the recipe; the JSON need not repeat it.
        world_size: number of ranks.
        micro_batch_size: number of examples in one forward pass of one rank.

    Returns:
        The configuration for deepspeed.initialize.

    Raises:
        UserError: no such file, not JSON, not ZeRO stage 3, a setting that would corrupt the weights or
            change the losses, or one that contradicts the recipe.
    """
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}} if path is None else _read_json(Path(path))
    source = "the default" if path is None else str(path)
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") != 3:
        raise UserError(
            f"{source} does not ask for ZeRO stage 3",
            got=f"zero_optimization {zero!r}",
            expected='"zero_optimization": {"stage": 3}',
            fix="start from one of ds_configs",
        )
    flat = flatten(config)
    for key, value in flat.items():
        _refuse(value == "auto", source, key, value, "a value: auto is not supported")
    for key in ("optimizer", "scheduler"):
        _refuse(key in config, source, key, config.get(key), "none: LeZO is the optimizer")
    for key, values, reason in _ONLY_VALUES:
        value = flat.get(key, values[0])
        _refuse(value not in values, source, key, value, f"{json.dumps(values[0])} ({reason})")
    batch_sizes = {"train_micro_batch_size_per_gpu": micro_batch_size}
    for key, number in (batch_sizes | {"train_batch_size": micro_batch_size * world_size}).items():
        value = config.get(key, number)
        _refuse(value != number, source, key, value, f"{number}, as in the recipe")
    # Without allgather_sequential, several weights are gathered through a second buffer and copied.
    zero |= {"allgather_sequential": True}
    zero |= {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    return _with_dtype(config | batch_sizes, source, dtype)


def _refuse(wrong: bool, source: str, key: str, value: object, expected: str) -> None:
    if wrong:
        raise UserError(
            f"{key} in {source} cannot be used",
            got=json.dumps(value),
            expected=expected,
            fix=f"remove it ({key})",
        )


def _with_dtype(config: dict[str, Any], source: str, dtype: str) -> dict[str, Any]:
    for name in ("bf16", "bfloat16", "fp16"):  # DeepSpeed treats the second like the first
        section = config.get(name, {})
        _refuse(not isinstance(section, dict), source, name, section, "a section")
        asked = name.replace("bfloat16", "bf16") == dtype
        enabled = section.get("enabled", asked)
        if enabled != asked:
            raise UserError(
                f"{source} and the recipe ask for different dtypes",
                got=f'"{name}": {{"enabled": {json.dumps(enabled)}}} and model.dtype {dtype}',
                expected="the same in both",
                fix=f"remove {name} from the JSON: model.dtype is enough",
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
            fix="set deepspeed=ds_configs/zero3_cpu.json, or another of ds_configs",
        ) from error
    except ValueError as error:
        raise UserError(
            f"{path} is not a valid JSON object",
            got=str(error),
            expected="one JSON object, each key once",
            fix="correct it, or start from one of ds_configs",
        ) from error
    return values


def _without_comments(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    if len(section) != len(pairs):
        raise ValueError("a key is repeated: " + ", ".join(name for name, _ in pairs))
    return {name: value for name, value in section.items() if not name.startswith("_")}
