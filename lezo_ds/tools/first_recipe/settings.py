"""Learning rate, steps, batches and precision of the first recipe, from the model and the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lezo_ds.config import RunConfig, config_to_dict, flatten
from lezo_ds.config.schema import SCHEMA
from lezo_ds.data.task_data import TaskData
from lezo_ds.tools.first_recipe.machine import Machine
from lezo_ds.tools.planning.inputs import measured_inputs
from lezo_ds.tools.planning.memory import GIB, RankMemory, rank_memory
from lezo_ds.tools.planning.model_sizes import ModelSizes
from lezo_ds.tools.planning.options import make_plan

_RATES = ((4e8, 3e-5), (1e9, 1e-5), (4e9, 3e-6))
"""Pairs of a number of parameters and the learning rate of models below it, for LeZO with sparsity 0.75. The
first is the demonstration's, the last the paper's for OPT-1.3B."""

_SPARSITY = 0.75
_FEWEST_BLOCKS = 4  # with fewer, this share can be all blocks
_LARGE_RATE = 1e-6  # the paper's for OPT-13B and OPT-30B
_STEPS, _NUM_EVALUATIONS = 1000, 10
_BATCH = 16  # the papers' size
_MEMORY_SHARE = 0.8  # of a machine without GPUs; other programs need the rest
_EVAL_BATCHES = (32, 16, 8, 4, 2, 1)


def first_settings(machine: Machine) -> tuple[dict[str, Any], dict[str, str]]:
    """Return dotted keys that no model is needed for, with their values, and comments on some of them."""
    num_each = -(-_BATCH // machine.num_ranks)
    batch = num_each * machine.num_ranks
    values = {
        "model.dtype": machine.dtype,
        "zo.learning_rate": _LARGE_RATE,
        "zo.perturbation_scale": 1e-3,
        "zo.sparsity": _SPARSITY,
        "train.steps": _STEPS,
        "train.batch_size": batch,
        "train.micro_batch_size": num_each,
        "train.eval_batch_size": _EVAL_BATCHES[0],
        "train.eval_every": _STEPS // _NUM_EVALUATIONS,
        "deepspeed": f"zero3_{machine.dtype}" if machine.is_gpu else "zero3_cpu",
    }
    notes = {
        "model.dtype": f"{machine.why}; zo.update_precision keeps the bits that it lacks"
        if machine.dtype != "fp32"
        else machine.why,
        "zo.sparsity": "the share of the transformer blocks that each step leaves out",
        "train.steps": "a start: the papers train for 20,000; more steps continue the same run",
        "train.batch_size": "examples in a step, over all ranks",
        "train.eval_every": "each evaluation takes the loss of the validation records; the best step counts",
        "deepspeed": "a file of ds_configs, by name",
    }
    return values, notes


def model_settings(sizes: ModelSizes) -> dict[str, Any]:
    """Return the dotted keys that depend on the model: size, blocks and positions."""
    rate = next((rate for limit, rate in _RATES if sizes.num_parameters < limit), _LARGE_RATE)
    longest: int = SCHEMA.keys["data.max_length"].default
    sparsity = _SPARSITY if sizes.num_blocks >= _FEWEST_BLOCKS else 0.5
    max_length = min(longest, sizes.max_length or longest)
    return {"zo.learning_rate": rate, "zo.sparsity": sparsity, "data.max_length": max_length}


def fitted(
    config: RunConfig, data: TaskData, sizes: ModelSizes, machine: Machine
) -> tuple[dict[str, Any], str]:
    """Return the keys that must change so that a run fits the machine, and the memory in words.

    Raises:
        UserError: nothing fits its GPUs.
    """
    inputs = measured_inputs(config, data)
    if machine.is_gpu:
        plan = make_plan(
            config, num_gpus=machine.num_ranks, gpu_bytes=machine.num_bytes, length=inputs.length
        )
        found, memory = plan.chosen.config, plan.chosen.memory
    else:
        found, memory = _fitted_to_cpus(config, data, sizes, machine)
    asked, chosen = (flatten(config_to_dict(one)) for one in (config, found))
    changed = {key: value for key, value in chosen.items() if asked[key] != value}
    return changed, f"about {memory.total / GIB:.1f} GiB for each rank"


def _fitted_to_cpus(
    config: RunConfig, data: TaskData, sizes: ModelSizes, machine: Machine
) -> tuple[RunConfig, RankMemory]:
    for sized in _smaller_batches(config):
        memory = rank_memory(
            sized, sizes, measured_inputs(sized, data), world_size=machine.num_ranks, on_gpu=False
        )
        if memory.total * machine.num_ranks <= _MEMORY_SHARE * machine.num_bytes:
            break
    return sized, memory


def _smaller_batches(config: RunConfig) -> Iterator[RunConfig]:
    micro = config.train.micro_batch_size
    for size in (size for size in range(micro, 0, -1) if micro % size == 0):
        for eval_size in _EVAL_BATCHES:
            yield replace(
                config, train=replace(config.train, micro_batch_size=size, eval_batch_size=eval_size)
            )
