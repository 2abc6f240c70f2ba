"""Reads the DeepSpeed JSON, and refuses settings that zeroth-order training cannot use."""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lezo_ds.config import flatten
from lezo_ds.config.paths import ROOT, find_file
from lezo_ds.config.reading import nearest
from lezo_ds.errors import UserError

logger = logging.getLogger(__name__)

_KEYS: Mapping[str, Mapping[type, str]] = {
    "": {
        bool: """
            dataloader_drop_last disable_allgather disable_python_gc dump_state managed_gradient_accumulation
            memory_breakdown prescale_gradients use_data_before_expert_parallelism wall_clock_breakdown
            zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        """,
        float: """
            gradient_accumulation_steps gradient_clipping gradient_predivide_factor sequence_parallel_size
            steps_per_print train_batch_size train_micro_batch_size_per_gpu vocabulary_size
        """,
        str: """
            communication_data_type gradient_allreduce_op log_level seq_parallel_communication_data_type
        """,
        dict: """
            activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger compile
            compression_training csv_monitor data_efficiency data_types datastates_ckpt expert_parallel
            flops_profiler fp16 hybrid_engine optimizer pipeline scheduler tensor_parallel tensorboard timers
            torch_autocast wandb weight_quantization zero_optimization
        """,
    },
    "zero_optimization": {
        bool: """
            allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients cpu_offload
            cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
            gather_16bit_weights_on_model_save ignore_unused_parameters legacy_stage1 load_from_fp32_weights
            log_trace_cache_warnings memory_efficient_linear overlap_comm override_module_apply
            parameter_alignment pipeline_loading_checkpoint reduce_scatter round_robin_gradients
            save_muon_momentum_buffer_in_memory stage3_allgather_sequential
            stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
            stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params
            use_multi_rank_bucket_allreduce zero_quantized_gradients zero_quantized_nontrainable_weights
            zero_quantized_weights
        """,
        float: """
            allgather_bucket_size max_live_parameters max_reuse_distance model_persistence_threshold
            module_granularity_threshold param_persistence_threshold prefetch_bucket_size reduce_bucket_size
            stage stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
            stage3_module_granularity_threshold stage3_param_persistence_threshold
            stage3_prefetch_bucket_size sub_group_size zero_hpz_partition_size
        """,
        dict: "leaf_module offload_optimizer offload_param zenflow",
    },
    "zero_optimization.offload_param": {
        bool: "pin_memory",
        float: "buffer_count buffer_size max_in_cpu",
        str: "device nvme_path",
    },
    "bf16": {
        bool: """
            bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled
            immediate_grad_update
        """,
    },
    "fp16": {
        bool: "auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads",
        float: "hysteresis initial_scale_power loss_scale loss_scale_window min_loss_scale",
    },
    "aio": {
        bool: "overlap_events single_submit use_gds",
        float: "block_size intra_op_parallelism queue_depth",
    },
    "tensorboard": {bool: "enabled", str: "job_name output_path"},
    "csv_monitor": {bool: "enabled", str: "job_name output_path"},
    "wandb": {bool: "enabled", str: "group project team"},
    "comms_logger": {bool: "debug enabled prof_all verbose", list: "prof_ops"},
}
"""DeepSpeed's keys by section and type of value, as of version 0.19. Other sections may hold any key.

DeepSpeed itself ignores unknown keys of the top level, and most of its sections raise errors of many lines.
"""

_TYPE_NAMES = {bool: "true or false", float: "a number", str: "text", dict: "a section", list: "a list"}

_ONLY_WITH_GRADIENTS: Mapping[str, str] = {
    "": """
        activation_checkpointing autotuning communication_data_type data_efficiency data_types
        dataloader_drop_last gradient_allreduce_op gradient_clipping gradient_predivide_factor
        managed_gradient_accumulation prescale_gradients seq_parallel_communication_data_type steps_per_print
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """,
    "zero_optimization": """
        allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload
        elastic_checkpoint gather_16bit_weights_on_model_save ignore_unused_parameters legacy_stage1
        load_from_fp32_weights offload_optimizer pipeline_loading_checkpoint reduce_bucket_size
        reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save sub_group_size
        use_multi_rank_bucket_allreduce zenflow zero_quantized_gradients
    """,
    "bf16": """
        bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow immediate_grad_update
    """,
    "fp16": """
        consecutive_hysteresis fp16_master_weights_and_grads hysteresis initial_scale_power loss_scale
        loss_scale_window min_loss_scale
    """,
}
"""Keys by section that DeepSpeed reads only for gradients, optimizers, its checkpoints and data loaders."""

_ONLY_WITH_HOOKS = frozenset(
    [
        "leaf_module",
        "log_trace_cache_warnings",
        "max_reuse_distance",
        "module_granularity_threshold",
        "stage3_max_reuse_distance",
        "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params",
        "use_all_reduce_for_fetch_params",
    ]
)
"""Keys of zero_optimization for the hooks with which DeepSpeed gathers weights, a module at a time."""

_TWICE_THE_MEMORY = "gathered weights would take twice the memory"
_ONLY_VALUES: tuple[tuple[str, tuple[object, ...], str], ...] = (
    # DeepSpeed keeps parameters below the threshold gathered, and never reads their updated shards.
    ("zero_optimization.stage3_param_persistence_threshold", (0,), "resident copies become stale"),
    ("zero_optimization.param_persistence_threshold", (0,), "resident copies become stale"),
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

_HOST_STALLS: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("zero_optimization.overlap_comm", operator.not_, "a gather waits for the computation before it"),
    ("zero_optimization.stage3_prefetch_bucket_size", operator.not_, "no weight is gathered ahead"),
    ("zero_optimization.prefetch_bucket_size", operator.not_, "no weight is gathered ahead"),
    ("zero_optimization.offload_param.pin_memory", operator.not_, "each copy from the host is waited for"),
    ("wall_clock_breakdown", bool, "each forward pass is waited for"),
    ("comms_logger.enabled", bool, "each message is waited for"),
    ("flops_profiler.enabled", bool, "each forward pass is waited for"),
)
"""Keys, the values of them with which the host waits for the GPU, and for what (DeepSpeed 0.19.8)."""


def load_ds_config(
    path: str | Path | None, dtype: str, world_size: int, micro_batch_size: int
) -> dict[str, Any]:
    """Read a DeepSpeed JSON, refuse settings that zeroth-order training cannot use, and complete it.

    Keys that begin with "_" are comments, at any depth. All other keys must be DeepSpeed's; those that this
    package does not use itself (monitors, offload, aio, the comms logger) are passed on to it.

    Args:
        path: the JSON file, or the name of one in ds_configs, such as zero3_bf16. `find_file` says where it
            is searched. None uses ZeRO-3 with DeepSpeed's default settings.
        dtype: fp32, bf16 or fp16, from the recipe. The JSON does not have to repeat it.
        world_size: number of ranks.
        micro_batch_size: number of examples in one forward pass of one rank.

    Returns:
        The configuration for deepspeed.initialize.

    Raises:
        UserError: the file cannot be read, is not a JSON object, does not use ZeRO stage 3, or has a key that
            DeepSpeed does not know or a value of the wrong type; or a setting would corrupt the weights,
            change the losses or contradict the recipe.
    """
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}} if path is None else _read_json(_find(path))
    source = "the default" if path is None else str(path)
    for section in _KEYS:
        _check_section(section, _section(config, section), source)
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") != 3:
        raise UserError(
            f"{source} does not use ZeRO stage 3",
            got=f"zero_optimization {zero!r}",
            expected='"zero_optimization": {"stage": 3}',
            fix="start from one of the files in ds_configs",
        )
    _refuse_unusable_values(config, source)
    batch_sizes = {"train_micro_batch_size_per_gpu": micro_batch_size}
    for key, number in (batch_sizes | {"train_batch_size": micro_batch_size * world_size}).items():
        value = config.get(key, number)
        if value != number:
            raise _unusable(source, key, value, f"{number}, as in the recipe")
    # Without allgather_sequential, DeepSpeed gathers several weights into a second buffer and copies them.
    zero |= {"allgather_sequential": True}
    zero |= {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    return _with_dtype(config | batch_sizes, source, dtype)


def warn_of_idle_keys(ds_config: Mapping[str, Any]) -> None:
    """Log a warning for each reason why keys have no effect on a run without gradients.

    Args:
        ds_config: as `load_ds_config` returns it.
    """
    idle = {
        "this method computes no gradients": [
            f"{section}.{key}" if section else key
            for section, keys in _ONLY_WITH_GRADIENTS.items()
            for key in _section(ds_config, section)
            if key in keys.split()
        ],
        "whole blocks are gathered, without DeepSpeed's hooks": [
            f"zero_optimization.{key}"
            for key in _section(ds_config, "zero_optimization")
            if key in _ONLY_WITH_HOOKS and not _is_offloaded(ds_config)
        ],
    }
    for reason, keys in idle.items():
        if keys:
            text = "keys in the DeepSpeed JSON without effect, because %s: %s"
            logger.warning(text, reason, ", ".join(keys))


def warn_of_host_stalls(ds_config: Mapping[str, Any], *, has_gradients: bool) -> None:
    """Log one warning that names the keys which make the host wait for a GPU, if there are any.

    Args:
        ds_config: as `load_ds_config` returns it.
        has_gradients: whether the method computes gradients. If not, and if the shards are on the GPU, no
            weight is gathered by DeepSpeed's hooks, which read `overlap_comm`.
    """
    flat = flatten(ds_config)
    if _is_offloaded(ds_config):
        flat.setdefault("zero_optimization.offload_param.pin_memory", False)  # DeepSpeed's default
    elif not has_gradients:
        flat.pop("zero_optimization.overlap_comm", None)
    stalls = [
        f"{key} {json.dumps(flat[key])} ({what})"
        for key, is_stall, what in _HOST_STALLS
        if key in flat and is_stall(flat[key])
    ]
    if stalls:
        text = "keys in the DeepSpeed JSON that make the host wait, and a step slower: %s"
        logger.warning(text, "; ".join(stalls))


def _is_offloaded(ds_config: Mapping[str, Any]) -> bool:
    return bool(_section(ds_config, "zero_optimization.offload_param").get("device", "none") != "none")


def _section(config: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Return a section by its dotted name, "" for the whole; empty if there is none."""
    found: Any = config
    for name in section.split(".") if section else ():
        found = found.get(name)
        if not isinstance(found, dict):
            return {}
    return found  # type: ignore[no-any-return]


def _check_section(section: str, values: Mapping[str, Any], source: str) -> None:
    kinds = {key: kind for kind, keys in _KEYS[section].items() for key in keys.split()}
    prefix = f"{section}." if section else ""
    for key, value in values.items():
        if key not in kinds:
            near = nearest(key, kinds)
            raise UserError(
                f"unknown key in {source}",
                got=prefix + key,
                expected=f"a key of DeepSpeed's {section or 'configuration'}",
                fix=f"did you mean {prefix}{near[0]}?" if near else "remove it",
            )
        kind = float if type(value) is int else type(value)
        if kind is not kinds[key] and value != "auto":  # a better error about auto follows
            raise _unusable(source, prefix + key, value, _TYPE_NAMES[kinds[key]])


def _refuse_unusable_values(config: Mapping[str, Any], source: str) -> None:
    flat = flatten(config)
    for key, value in flat.items():
        if value == "auto":
            raise _unusable(source, key, value, "a value (auto is not supported)")
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise _unusable(source, key, config[key], "no such section, because LeZO is the optimizer")
    for key, values, reason in _ONLY_VALUES:
        value = flat.get(key, values[0])
        if value not in values:
            raise _unusable(source, key, value, f"{json.dumps(values[0])} ({reason})")


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


def _find(name: str | Path) -> Path:
    """Return the path of a file by its path or its name."""
    path = find_file(str(name))
    named = find_file(f"ds_configs/{name}.json")
    return named if named.is_file() and not path.is_file() else path


def _shipped_names() -> list[str]:
    return sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))


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
            fix=f"set deepspeed to a file or to one of {', '.join(_shipped_names())}",
        ) from error
    except (ValueError, RecursionError) as error:
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
