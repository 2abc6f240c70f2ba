"""DeepSpeed's JSON: strict reading, and what zeroth-order training cannot use refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lezo_ds.config import flatten
from lezo_ds.errors import UserError


def load_ds_config(
    path: str | Path | None, dtype: str, world_size: int, micro_batch_size: int
) -> dict[str, Any]:
    """Read a DeepSpeed JSON, refuse what zeroth-order training cannot use, and complete it.

    Keys that begin with "_" are comments, at any depth. What this function does not know (monitors,
    offload, aio, the comms logger) passes through to DeepSpeed.

    Args:
        path: the JSON file; None for ZeRO-3 with DeepSpeed's own settings.
        dtype: fp32, bf16 or fp16, from the recipe; the JSON need not repeat it.
        world_size: number of ranks.
        micro_batch_size: examples in one forward pass of one rank.

    Returns:
        what to give deepspeed.initialize.

    Raises:
        UserError: no such file, not JSON, not ZeRO stage 3, a setting that would corrupt the weights or
            changes the losses, or one that contradicts the recipe.
    """
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}} if path is None else _read_json(Path(path))
    path = path or "the default"
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") != 3:
        raise UserError(
            f"{path} does not ask for ZeRO stage 3",
            got=f"zero_optimization {zero!r}",
            expected='"zero_optimization": {"stage": 3}',
            fix="start from one of ds_configs",
        )
    flat = flatten(config)
    for key, value in flat.items():
        _refuse(
            value == "auto", path, key, value, "a value: nothing is guessed", "give a value, or remove it"
        )
    _refuse_unusable(path, config, flat)
    per_step = micro_batch_size * world_size
    for key, number in (
        ("train_micro_batch_size_per_gpu", micro_batch_size),
        ("train_batch_size", per_step),
    ):
        value = config.get(key, number)
        _refuse(value != number, path, key, value, f"{number}, as the recipe has it", "remove it")
    # Each weight is gathered into its place: several at once would be copied there, from a second buffer.
    zero |= {"allgather_sequential": True}
    zero |= {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    config["train_micro_batch_size_per_gpu"] = micro_batch_size
    return _with_dtype(config, path, dtype)


def _refuse(wrong: bool, path: str | Path, key: str, value: object, expected: str, fix: str) -> None:
    if wrong:
        raise UserError(
            f"{key} in {path} does not fit", got=json.dumps(value), expected=expected, fix=f"{fix} ({key})"
        )


def _refuse_unusable(path: str | Path, config: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
    for key in ("optimizer", "scheduler"):
        _refuse(
            key in config, path, key, config.get(key), "none: LeZO is the optimizer", "remove the section"
        )
    # key, the only values that may be given, and what any other would do
    allowed: tuple[tuple[str, tuple[object, ...], str], ...] = (
        ("zero_optimization.stage3_param_persistence_threshold", (0,), "resident copies go stale"),
        ("zero_optimization.memory_efficient_linear", (False,), "it changes the losses of bf16"),
        ("zero_optimization.allgather_sequential", (True,), "else gathered weights take twice their memory"),
        (
            "zero_optimization.stage3_allgather_sequential",
            (True,),
            "else gathered weights take twice their memory",
        ),
        ("zero_optimization.zero_hpz_partition_size", (0, 1), "the second copy goes stale"),
        (
            "zero_optimization.zero_quantized_weights",
            (False,),
            "the gathered weights would not be the model's",
        ),
        ("zero_optimization.zero_quantized_nontrainable_weights", (False,), "the shards would be quantized"),
        ("gradient_accumulation_steps", (1,), "train.batch_size and train.micro_batch_size say it"),
        ("torch_autocast.enabled", (False,), "model.dtype says it"),
    )
    for key, values, reason in allowed:
        value = flat.get(key, values[0])
        expected = f"{json.dumps(values[0])} ({reason})"
        _refuse(value not in values, path, key, value, expected, "remove it")


def _with_dtype(config: dict[str, Any], path: str | Path, dtype: str) -> dict[str, Any]:
    for name in ("bf16", "bfloat16", "fp16"):  # DeepSpeed takes the second for the first
        section = config.get(name, {})
        _refuse(not isinstance(section, dict), path, name, section, "a section", "remove it")
        asked = name.replace("bfloat16", "bf16") == dtype
        enabled = section.get("enabled", asked)
        if enabled != asked:
            raise UserError(
                f"{path} and the recipe ask for different dtypes",
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
    except OSError as error:
        raise UserError(
            f"cannot read the DeepSpeed configuration {path}",
            got=str(error),
            expected="a JSON file",
            fix="set deepspeed=ds_configs/zero3_cpu.json, or another of ds_configs",
        ) from error
    except ValueError as error:
        raise UserError(
            f"{path} is not valid JSON", got=str(error), expected="one JSON object", fix="correct it"
        ) from error
    if not isinstance(values, dict):
        raise UserError(
            f"{path} holds no keys",
            got=json.dumps(values),
            expected="one JSON object",
            fix="start from one of ds_configs",
        )
    return values


def _without_comments(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    if len(section) != len(pairs):
        raise ValueError("a key is repeated: " + ", ".join(name for name, _ in pairs))
    return {name: value for name, value in section.items() if not name.startswith("_")}
