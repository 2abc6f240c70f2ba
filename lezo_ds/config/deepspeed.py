"""Reads the DeepSpeed JSON, and refuses settings that zeroth-order training cannot use.

DeepSpeed's checks know first-order training: a step runs backward passes, and DeepSpeed's optimizer
writes the new weights. Here, lezo_ds updates each rank's shards in place (`lezo_ds.sharding`). Any
setting under which DeepSpeed keeps a second copy of the weights would leave that copy behind
(docs/deepspeed.md).

    recipe                 deepspeed, tensor_parallel, model.dtype, train.micro_batch_size
       | load_ds_config    reads the file, refuses contradictions, and adds what is not written
    DeepSpeed JSON         a dict for deepspeed.initialize
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hjson
from deepspeed.runtime.config import DeepSpeedConfig

from lezo_ds.config.components import check_world
from lezo_ds.config.load import flatten
from lezo_ds.config.paths import find_file, shipped_files
from lezo_ds.config.schema import RunConfig
from lezo_ds.errors import UserError, cut, one_line

# The values that a key of the JSON may have, and the problem with all others. Keys are without
# DeepSpeed's prefix stage3_, which may be written or not (docs/deepspeed.md).
_LIMITS: dict[str, tuple[tuple[object, ...], str]] = {
    # DeepSpeed keeps parameters below the threshold gathered, and never reads their updated shards.
    "zero_optimization.param_persistence_threshold": ((0,), "resident copies become stale"),
    "zero_optimization.offload_param.device": (("none", "cpu"), "shards are updated in memory"),
    "zero_optimization.memory_efficient_linear": ((False,), "it changes the losses of bf16"),
    "zero_optimization.allgather_sequential": (
        (True,),
        "gathered weights would take twice the memory",
    ),
    # hpZ keeps a second copy of the weights in each node, which updates of the shards do not reach.
    "zero_optimization.zero_hpz_partition_size": ((0, 1), "the second copy becomes stale"),
    "zero_optimization.zero_quantized_weights": (
        (False,),
        "the gathered weights would be quantized",
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": (
        (False,),
        "the shards would be quantized",
    ),
    "tensor_parallel.vocab_parallel_lm_head": ((), "the vocabulary is split where it can be"),
    "gradient_accumulation_steps": ((1,), "use train.batch_size and train.micro_batch_size"),
    "torch_autocast.enabled": ((False,), "use model.dtype"),
    **dict.fromkeys(
        ("data_efficiency.enabled", "expert_parallel.enabled", "hybrid_engine.enabled"),
        ((False,), "it is for training with gradients"),
    ),
}

_LEFT_OUT = ("optimizer", "scheduler", "gradient_clipping")
"""What a Trainer's JSON has for gradients, or for which a recipe has keys."""

logger = logging.getLogger(__name__)


def ds_config_of(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a run on `world_size` ranks.

    Raises:
        UserError: The JSON cannot be used, or does not fit the other settings of the run.
    """
    ds_config = load_ds_config(
        config.deepspeed,
        dtype=config.model.dtype,
        world_size=world_size,
        micro_batch_size=config.train.micro_batch_size,
        tensor_parallel=config.tensor_parallel,
    )
    has_prefix = config.peft.kind == "prefix"
    if tensor_parallel_size(ds_config) > 1 and (config.partition_size or has_prefix):
        raise UserError(
            "partition_size and peft.kind=prefix need ZeRO-3, and tensor parallelism shards the "
            "weights",
            fix="set partition_size=null peft.kind=lora, or tensor_parallel=null",
        )
    return ds_config


def shared_by(world_size: int, config: RunConfig) -> RunConfig:
    """Return the configuration with which `world_size` ranks open weights, to read them.

    The run may have had other ranks. ZeRO-3 over all ranks replaces groups that do not fit these.
    """
    sizes = (tensor_parallel_of(config), config.partition_size or 1)
    if all(world_size % size == 0 for size in sizes):
        return config
    return config.model_copy(update={"tensor_parallel": 1, "partition_size": None})


def check_shares(config: RunConfig, ds_config: Mapping[str, Any], world_size: int) -> None:
    """Refuse a training run whose work does not split evenly among `world_size` ranks."""
    check_world(config, world_size // tensor_parallel_size(ds_config))


def load_ds_config(
    path: str | os.PathLike[str] | Mapping[str, Any] | None,
    dtype: str,
    world_size: int,
    micro_batch_size: int | None,
    tensor_parallel: int | None = None,
) -> dict[str, Any]:
    """Return a DeepSpeed JSON, checked by DeepSpeed and completed for deepspeed.initialize.

    The JSON need not repeat the type of the weights and the micro-batch size, but may not
    contradict them. Its keys that begin with "_" are comments. A JSON for the Trainer of
    transformers will do: "auto" is a value that is not written, and sections for which a recipe has
    keys of its own are left out with a warning.

    Args:
        path: A file, the name of one in ds_configs, such as zero3_bf16, or the content of one. None
            is ZeRO-3 with defaults.
        dtype: The type of the weights: fp32, bf16 or fp16.
        world_size: The number of ranks.
        micro_batch_size: The number of examples in a forward pass of a rank. None is that of the
            JSON, or 1.
        tensor_parallel: The number of ranks that split each weight, whatever the JSON says of
            sharding. None takes that of the JSON.

    Raises:
        UserError: The file cannot be read, or has settings that cannot be used, all of which are
            named.
    """
    config: dict[str, Any]
    if path is None:
        source = "the default"
        config = {"zero_optimization": {"stage": 3}}
    elif isinstance(path, Mapping):
        source = "ds_config"
        config = json.loads(json.dumps(path, default=str), object_pairs_hook=_written_keys)
    else:
        source = str(path)
        config = _read_json(source)
    for name in ("zero_optimization", "tensor_parallel", dtype):
        if not isinstance(config.get(name, {}), dict):
            raise UserError(
                f"{name} in {source} is not an object", fix=f'write it like "{name}": {{...}}'
            )
    if tensor_parallel is not None:
        _set_tensor_parallel(config, tensor_parallel, source)
    left_out = [name for name in _LEFT_OUT if config.pop(name, None) is not None]
    if left_out:
        names = " and ".join(left_out)
        logger.warning("%s: %s left out, since the recipe's keys decide", source, names)
    _check_tensor_parallel(config, world_size, source)
    size = tensor_parallel_size(config)
    if micro_batch_size is None:
        micro_batch_size = config.get("train_micro_batch_size_per_gpu", 1)
    contradiction = "it contradicts the recipe"
    limits = {
        **_LIMITS,
        "train_micro_batch_size_per_gpu": ((micro_batch_size,), contradiction),
        "train_batch_size": ((micro_batch_size * world_size // size,), contradiction),
        "bf16.enabled": ((dtype == "bf16",), f"it contradicts model.dtype={dtype}"),
        "fp16.enabled": ((dtype == "fp16",), f"it contradicts model.dtype={dtype}"),
    }
    limits["zero_optimization.stage"] = _stage_limit(size)
    config["zero_optimization"] = {"stage": 0, **config.get("zero_optimization", {})}
    refusals = list(_refusals(config, limits, source))
    if refusals:
        problems, fixes = zip(*refusals, strict=True)
        raise UserError("; ".join(problems), fix="; ".join(fixes))
    if dtype != "fp32":
        config[dtype] = {**config.get(dtype, {}), "enabled": True}
    if size == 1:
        config["zero_optimization"] |= {
            # Otherwise DeepSpeed gathers several weights into a second buffer, and copies them.
            "allgather_sequential": True,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
        }
    config["train_micro_batch_size_per_gpu"] = micro_batch_size
    _let_deepspeed_check(config, source)
    return config


def _stage_limit(tensor_parallel: int) -> tuple[tuple[object, ...], str]:
    """Return the stage of ZeRO that shards the weights, and the problem with all others."""
    if tensor_parallel == 1:
        return (3,), "ZeRO stage 3 shards the weights"
    return (0,), "tensor parallelism shards the weights by itself"


def _refusals(
    config: Mapping[str, Any], limits: Mapping[str, tuple[tuple[object, ...], str]], source: str
) -> Iterator[tuple[str, str]]:
    """Yield the problem and the fix of each value that its key may not have."""
    if "weight_quantization" in config:
        yield (
            f"weight_quantization in {source} cannot be used: DeepSpeed would load the whole "
            "16-bit model first",
            "remove it, and set model.bits=4 or 8, which quantizes each weight when it is read",
        )
    for key, value in flatten(config).items():
        allowed, problem = limits.get(key.replace(".stage3_", "."), ((value,), ""))
        if value in allowed:
            continue
        fix = f"remove {key}"
        if key == "zero_optimization.stage":
            fix = f"set {key} to {allowed[0]}"
        if key in ("bf16.enabled", "fp16.enabled") and value is True:
            fix = f"set deepspeed=null, or model.dtype={key.removesuffix('.enabled')}"
        yield f"{key}={json.dumps(value)} in {source} cannot be used: {problem}", fix


def _set_tensor_parallel(config: dict[str, Any], size: int, source: str) -> None:
    """Let `size` ranks split each weight. What the JSON says of sharding gives way to that."""
    config["tensor_parallel"] = {**config.get("tensor_parallel", {}), "autotp_size": size}
    if size == 1:
        zero = config.get("zero_optimization", {})
        config["zero_optimization"] = {**zero, "stage": zero.get("stage") or 3}
        return
    if offloads_weights(config):
        raise UserError(
            f"tensor_parallel={size} keeps the weights on the GPUs, and {source} offloads them",
            fix="set deepspeed=null, or tensor_parallel=null",
        )
    config["zero_optimization"] = {"stage": 0}


def _check_tensor_parallel(config: Mapping[str, Any], world_size: int, source: str) -> None:
    """Refuse a number of ranks for AutoTP that is none, or that does not divide `world_size`."""
    size: object = tensor_parallel_size(config)
    if type(size) is not int:  # as JSON has it: true is no number of ranks
        raise UserError(
            f"autotp_size={json.dumps(size)} in {source} is not an integer", fix="correct it"
        )
    if size < 1 or world_size % size != 0:
        raise UserError(
            f"tensor_parallel={size} does not divide {world_size} ranks",
            fix="use a divisor of the number of ranks, which deepspeed --num_gpus N sets, and "
            "--dry-run --gpus N for a plan",
        )


def _let_deepspeed_check(config: Mapping[str, Any], source: str) -> None:
    # A copy, because DeepSpeed changes what it reads. Without the batch size, which depends on the
    # number of ranks: DeepSpeed may not know them yet.
    checked = copy.deepcopy({**config, "train_batch_size": None})
    try:
        DeepSpeedConfig(checked)
    except Exception as error:  # DeepSpeed's checks raise many types
        problem = one_line(error).partition(" For further information")[0]
        raise UserError(
            f"DeepSpeed refuses {source}: {cut(problem, 300)}", fix="correct the JSON"
        ) from error


def tensor_parallel_of(config: RunConfig) -> int:
    """Return the number of ranks that split each weight in a run, or 1."""
    if config.tensor_parallel is not None:
        return config.tensor_parallel
    if config.deepspeed is None:
        return 1
    return tensor_parallel_size(_read_json(config.deepspeed))


def tensor_parallel_size(ds_config: Mapping[str, Any]) -> int:
    """Return the number of ranks that split each weight by DeepSpeed's AutoTP, or 1."""
    return ds_config.get("tensor_parallel", {}).get("autotp_size", 1)  # type: ignore[no-any-return]


def offloads_weights(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the shards are in the memory of the host."""
    offload = ds_config.get("zero_optimization", {}).get("offload_param") or {}
    return bool(offload.get("device", "none") != "none")


def _read_json(name: str) -> dict[str, Any]:
    """Return the content of a JSON file, by its path or its name in ds_configs."""
    shipped = shipped_files("ds_configs/*.json")
    path = find_file(name)
    if not path.is_file():
        path = shipped.get(name, Path(name))
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows programs write a mark
        if not text.strip():
            raise ValueError("it is empty")
        values = hjson.loads(text, object_pairs_hook=_written_keys)  # as DeepSpeed reads it
        if not isinstance(values, dict):
            raise ValueError("it is not an object")
    except OSError as error:
        raise UserError(
            f"cannot read the DeepSpeed configuration {path}: {error}",
            fix=f"set deepspeed to a file or to one of {', '.join(shipped)}",
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a valid JSON object: {error}", fix="correct it") from error
    return values


def _written_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the JSON without comments, and without values that are left to us."""
    section = dict(pairs)
    if len(section) != len(pairs):
        raise ValueError("a key is repeated: " + ", ".join(name for name, _ in pairs))
    return {
        name: value
        for name, value in section.items()
        if not name.startswith("_") and value != "auto"
    }
