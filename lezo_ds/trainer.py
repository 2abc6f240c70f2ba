"""From a configuration to a finished, or resumed, run: the work behind launch/train.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lezo_ds import distributed
from lezo_ds.config import TRAINED, RunConfig, ZoConfig, check_world
from lezo_ds.ds_config import load_ds_config
from lezo_ds.engine import LezoEngine, initialize
from lezo_ds.run_directory import RunDirectory
from lezo_ds.task_data import load_task_data
from lezo_ds.zeroth_order_run import ZerothOrderRun, check_journal


def train(config: RunConfig) -> dict[str, Any]:
    """Run, or resume, a run. A collective: every rank calls it with the same config.

    Returns:
        What results.json holds; "finished" is false if the run was asked to stop early.

    Raises:
        UserError: bad input; where it can be known, before any weights load.
        LezoError: see its kinds.
    """
    distributed.init_distributed()
    if config.method in TRAINED:
        check_world(config, distributed.world_size())
    torch.set_num_threads(config.train.cpu_threads)
    data = load_task_data(config)
    directory = RunDirectory(config.run_dir)
    distributed.on_rank_zero(lambda: _check_before_loading(config, directory))
    return ZerothOrderRun(config, data, directory, make_engine(config)).execute()


def make_engine(config: RunConfig) -> LezoEngine:
    """Load a run's model, sharded over all ranks; with a method that does not train, for scoring only."""
    ds_config = load_ds_config(
        config.deepspeed, config.model.dtype, distributed.world_size(), config.train.micro_batch_size
    )
    zo = config.zo if config.method in TRAINED else scoring_only(config.zo)
    peft = config.peft if config.method in TRAINED else None
    return initialize(
        *(config.model.path, zo, ds_config, config.model.dtype, config.seed, peft, config.partition_size)
    )


def scoring_only(zo: ZoConfig) -> ZoConfig:
    """Return settings of an engine that updates nothing: no low bits beside the weights."""
    return replace(zo, learning_rate=0.0, sparsity=0.0, num_dropped_layers=None, update_precision="nearest")


def _check_before_loading(config: RunConfig, directory: RunDirectory) -> None:
    directory.create()
    check_journal(config, directory)
