"""Start or resume the run that a configuration describes, for lezo-ds train."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Any

import torch

from lezo_ds import distributed
from lezo_ds.config import (
    TRAINED,
    ZEROTH_ORDER,
    RunConfig,
    ZoConfig,
    check_world,
    make_layer_policy,
)
from lezo_ds.config.deepspeed import load_ds_config, warn_of_host_stalls, warn_of_idle_keys
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.engine import LezoEngine, initialize
from lezo_ds.errors import UserError
from lezo_ds.model.checkpoint import build_checked
from lezo_ds.runs.first_order import FirstOrderEngine, initialize_first_order
from lezo_ds.runs.first_order_run import FirstOrderRun, check_training_state
from lezo_ds.runs.run import count_steps
from lezo_ds.runs.run_directory import RunDirectory
from lezo_ds.runs.tracking import check_trackers
from lezo_ds.runs.zeroth_order_run import ZerothOrderRun, check_journal
from lezo_ds.sharding.checkpoint_files import resolve_model

logger = logging.getLogger(__name__)

_SCORING_ONLY = ZoConfig(learning_rate=0.0, sparsity=0.0, update_precision="nearest")
"""Settings of an engine that updates nothing, and therefore stores no low bits of the weights."""


def train(config: RunConfig) -> dict[str, Any]:
    """Start or resume a run. A collective that every rank calls with the same configuration.

    Returns:
        The content of results.json. "finished" is false if the run was asked to stop early.

    Raises:
        UserError: the input is bad. Whenever possible, this is found before any weights are loaded.
        LezoError: see its subclasses.
    """
    with distributed.lost_ranks_reported(lambda: "last good step: none, the run was starting"):
        return _train(config)


def _train(config: RunConfig) -> dict[str, Any]:
    distributed.init_distributed(config.train.timeout_seconds)
    if config.method in TRAINED:
        check_world(config, distributed.world_size())
    set_threads()
    data = load_task_data(config)
    directory = RunDirectory(config.run_dir)
    with ExitStack() as lock:

        def prepare() -> None:
            check_trackers(config.train.report_to)
            _check_model(config)
            directory.create()
            lock.enter_context(directory.locked())
            _check_before_loading(config, data, directory)

        distributed.on_rank_zero(prepare)
        if config.method == "adamw":
            engine = make_first_order_engine(config, count_steps(config, len(data.train.encoded)))
            return FirstOrderRun(config, data=data, directory=directory, engine=engine).execute()
        return ZerothOrderRun(config, data=data, directory=directory, engine=make_engine(config)).execute()


def set_threads() -> None:
    """Set the number of threads of a CPU operation to OMP_NUM_THREADS (default 1: it affects the last bits).

    With a GPU, no result depends on the number of CPU threads. They update offloaded weights, so they are at
    least this rank's share of the cores.
    """
    num_threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1
    if distributed.device().type != "cpu":
        num_cores = len(os.sched_getaffinity(0))
        num_threads = max(num_threads, num_cores // torch.accelerator.device_count())
    torch.set_num_threads(num_threads)


def make_first_order_engine(config: RunConfig, num_steps: int) -> FirstOrderEngine:
    """Load a run's model, sharded over all ranks, to fine-tune it for `num_steps` steps. A collective."""
    num_passes = config.train.batch_size // config.train.micro_batch_size // distributed.world_size()
    ds_config = {
        **_ds_config(config),
        "train_batch_size": config.train.batch_size,
        "gradient_accumulation_steps": num_passes,
    }
    logger.info("loading %s", config.model.path)
    return initialize_first_order(
        config.model.path,
        config.adamw,
        num_steps=num_steps,
        ds_config=ds_config,
        dtype=config.model.dtype,
        seed=config.seed,
        peft=config.peft,
    )


def make_engine(config: RunConfig) -> LezoEngine:
    """Load a run's model, sharded over all ranks. A collective.

    The engine trains if the method is zeroth-order. Otherwise it only scores.
    """
    zo = config.zo if config.method in ZEROTH_ORDER else _SCORING_ONLY
    peft = config.peft if config.method in TRAINED else None
    logger.info("loading %s", config.model.path)
    return initialize(
        config.model.path,
        zo,
        ds_config=_ds_config(config),
        dtype=config.model.dtype,
        seed=config.seed,
        peft=peft,
        partition_size=config.partition_size,
        num_steps=config.train.steps,
    )


def _ds_config(config: RunConfig) -> dict[str, Any]:
    ds_config = load_ds_config(
        config.deepspeed,
        dtype=config.model.dtype,
        world_size=distributed.world_size(),
        micro_batch_size=config.train.micro_batch_size,
    )
    has_gradients = config.method == "adamw"
    if not has_gradients:
        warn_of_idle_keys(ds_config)
    if distributed.device().type != "cpu":
        warn_of_host_stalls(ds_config, has_gradients=has_gradients)
    return ds_config


def _check_model(config: RunConfig) -> None:
    _, layout = build_checked(resolve_model(config.model.path), config.model.dtype)
    if config.method in ZEROTH_ORDER:
        outside = not config.zo.only_blocks
        make_layer_policy(config.zo, layout.num_blocks, trains_outside=outside)


def _check_before_loading(config: RunConfig, data: TaskData, directory: RunDirectory) -> None:
    _refuse_other_method(config, directory)
    if config.method == "adamw":
        _refuse_partition(config)
        check_training_state(config, data, directory, distributed.world_size())
    else:
        check_journal(config, data, directory)


def _refuse_partition(config: RunConfig) -> None:
    if config.partition_size not in (None, distributed.world_size()):
        raise UserError(
            "method adamw shards the weights among all ranks",
            got=f"partition_size={config.partition_size}, {distributed.world_size()} ranks",
            expected="null",
            fix="set partition_size=null",
        )


def _refuse_other_method(config: RunConfig, directory: RunDirectory) -> None:
    """Refuse to continue a zeroth-order run as a first-order run, or the other way round."""
    other = directory.journal if config.method == "adamw" else directory.training_state
    if other.exists():
        raise UserError(
            f"run_dir {directory.path} holds a run of another method",
            got=f"method {config.method}, and a directory with {other.name}",
            expected="one directory for each run",
            fix="give another run_dir",
        )
