"""Reads the DeepSpeed JSON, and refuses settings that zeroth-order training cannot use."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig

from lezo_ds.config.paths import ROOT, find_file
from lezo_ds.config.reading import flatten
from lezo_ds.config.run_config import check_world
from lezo_ds.config.schema import TRAINED, RunConfig
from lezo_ds.errors import UserError, cut

_ONLY_VALUES: Mapping[str, tuple[tuple[object, ...], str]] = {
    # DeepSpeed keeps parameters below the threshold gathered, and never reads their updated shards.
    "zero_optimization.param_persistence_threshold": ((0,), "resident copies become stale"),
    "zero_optimization.memory_efficient_linear": ((False,), "it changes the losses of bf16"),
    "zero_optimization.allgather_sequential": (
        (True,),
        "gathered weights would take twice the memory",
    ),
    # hpZ keeps a second copy of the weights inside each node, which updates of the shards do not reach.
    "zero_optimization.zero_hpz_partition_size": ((0, 1), "the second copy becomes stale"),
    "zero_optimization.zero_quantized_weights": (
        (False,),
        "the gathered weights would be quantized",
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": (
        (False,),
        "the shards would be quantized",
    ),
    "gradient_accumulation_steps": ((1,), "use train.batch_size and train.micro_batch_size"),
    "torch_autocast.enabled": ((False,), "use model.dtype"),
}
"""Keys, with or without DeepSpeed's prefix stage3_; the values they may have; the problem with others."""


def ds_config_of(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a run on `world_size` ranks, if the other settings fit it."""
    train, tensor_parallel = config.train, config.tensor_parallel
    source, dtype = config.deepspeed, config.model.dtype
    ds_config = load_ds_config(source, dtype, world_size, train.micro_batch_size, tensor_parallel)
    size = tensor_parallel_size(ds_config)
    if size > 1 and (config.partition_size is not None or config.method == "adamw"):
        text = (
            "partition_size and method=adamw need ZeRO-3, and tensor parallelism shards the weights"
        )
        raise UserError(
            text, fix="set partition_size=null and method=lezo, or remove tensor_parallel"
        )
    return ds_config


def check_shares(config: RunConfig, ds_config: Mapping[str, Any], world_size: int) -> None:
    """Refuse a training run whose work does not split evenly among `world_size` ranks."""
    if config.method in TRAINED:
        check_world(config, world_size // tensor_parallel_size(ds_config))


def load_ds_config(
    path: str | Path | None,
    dtype: str,
    world_size: int,
    micro_batch_size: int,
    tensor_parallel: int | None = None,
) -> dict[str, Any]:
    """Return a DeepSpeed JSON, checked by DeepSpeed and completed for deepspeed.initialize.

    `path` is a file, or the name of one in ds_configs, such as zero3_bf16; None is ZeRO-3 with defaults, or
    AutoTP if `tensor_parallel` is its size. Keys that begin with "_" are comments. The JSON need not repeat
    dtype and micro-batch size of the recipe.
    """
    source = str(path or "the default")
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 3 if tensor_parallel in (None, 1) else 0}
    }
    if path is not None:
        config = _read_json(str(path))
    for name in ("zero_optimization", "tensor_parallel", dtype):
        if not isinstance(config.get(name, {}), dict):
            raise UserError(
                f"{name} in {source} is not an object", fix=f'write it like "{name}": {{...}}'
            )
    size, flat = _checked_size(config, source, tensor_parallel, world_size), flatten(config)
    if {"optimizer", "scheduler"} & config.keys():
        raise UserError(
            f"{source} has an optimizer or a scheduler, which are the recipe's", fix="remove it"
        )
    limits = {
        **_ONLY_VALUES,
        "train_micro_batch_size_per_gpu": ((micro_batch_size,), "it contradicts the recipe"),
        "train_batch_size": ((micro_batch_size * world_size // size,), "it contradicts the recipe"),
        "bf16.enabled": ((dtype == "bf16",), f"it contradicts model.dtype={dtype}"),
        "fp16.enabled": ((dtype == "fp16",), f"it contradicts model.dtype={dtype}"),
    }
    for key, value in flat.items():
        allowed, reason = limits.get(key.replace(".stage3_", "."), ((value,), ""))
        if value not in allowed or value == "auto":
            text = f"{key}={json.dumps(value)} in {source} cannot be used"
            raise UserError(f"{text}: {reason or 'set a value'}", fix=f"remove {key}")
    if dtype != "fp32":
        config[dtype] = {**config.get(dtype, {}), "enabled": True}
    if size == 1:
        # Without allgather_sequential, DeepSpeed gathers several weights into a second buffer and copies.
        config["zero_optimization"] |= {
            "allgather_sequential": True,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
        }
    config["train_micro_batch_size_per_gpu"] = micro_batch_size
    try:
        DeepSpeedConfig(
            {**copy.deepcopy(config), "train_batch_size": None}
        )  # the ranks may not be known yet
    except Exception as error:  # DeepSpeed's checks raise many types
        text = " ".join(str(error).split()).partition(" For further information")[0]
        raise UserError(
            f"DeepSpeed refuses {source}: {cut(text, 300)}", fix="correct the JSON"
        ) from error
    return config


def _checked_size(
    config: dict[str, Any], source: str, tensor_parallel: int | None, world_size: int
) -> int:
    """Return the number of ranks that split each weight, if it fits the rest of the DeepSpeed JSON."""
    if tensor_parallel is not None:
        section = config.setdefault("tensor_parallel", {"autotp_size": tensor_parallel})
        if section.get("autotp_size") != tensor_parallel:
            text = f"tensor_parallel={tensor_parallel}, and {source} has {json.dumps(section)}"
            raise UserError(text, fix="remove tensor_parallel")
    size, stage = tensor_parallel_size(config), flatten(config).get("zero_optimization.stage", 0)
    if type(size) is not int:
        raise UserError(
            f"autotp_size={json.dumps(size)} in {source} is not an integer", fix="correct it"
        )
    if size < 1 or world_size % size:
        text = f"tensor_parallel={size} does not divide {world_size} ranks"
        raise UserError(text, fix="use a divisor of the number of ranks")
    if size > 1 and stage != 0:
        text = (
            f"{source} has ZeRO stage {stage}, and tensor parallelism shards the weights by itself"
        )
        raise UserError(text, fix="set zero_optimization.stage to 0, or remove tensor_parallel")
    if size == 1 and stage != 3:
        raise UserError(
            f"{source} does not use ZeRO stage 3", fix="set zero_optimization.stage to 3"
        )
    return size


def tensor_parallel_of(config: RunConfig) -> int:
    """Return the number of ranks that split each weight in a run, or 1."""
    if config.tensor_parallel is not None or config.deepspeed is None:
        return config.tensor_parallel or 1
    return tensor_parallel_size(_read_json(config.deepspeed))


def tensor_parallel_size(ds_config: Mapping[str, Any]) -> int:
    """Return the number of ranks that split each weight by DeepSpeed's AutoTP, or 1."""
    return ds_config.get("tensor_parallel", {}).get("autotp_size", 1)  # type: ignore[no-any-return]


def _read_json(name: str) -> dict[str, Any]:
    shipped = {path.stem: path for path in sorted((ROOT / "ds_configs").glob("*.json"))}
    path = find_file(name) if find_file(name).is_file() else shipped.get(name, Path(name))
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_comments)
        if not isinstance(values, dict):
            raise ValueError("it is no object")
    except OSError as error:
        fix = f"set deepspeed to a file or to one of {', '.join(shipped)}"
        raise UserError(
            f"cannot read the DeepSpeed configuration {path}: {error}", fix=fix
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a valid JSON object: {error}", fix="correct it") from error
    return values


def _without_comments(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    if len(section) != len(pairs):
        raise ValueError("a key is repeated: " + ", ".join(name for name, _ in pairs))
    return {name: value for name, value in section.items() if not name.startswith("_")}
