"""Start or resume the run that a configuration describes, and restore the weights of a recorded one."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import build_checked, resolve_model
from lezo_ds.checkpoints.snapshots import snapshot_path, snapshot_steps
from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig, ZoConfig, make_layer_policy
from lezo_ds.config.deepspeed import check_shares, ds_config_of
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.engine import LezoEngine, initialize
from lezo_ds.errors import UserError
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.disk import check_disk
from lezo_ds.runs.first_order import FirstOrderMethod, initialize_first_order
from lezo_ds.runs.membership import SingleLaunch
from lezo_ds.runs.records import RecordedRun, assert_same_model_config, check_records, steps_of
from lezo_ds.runs.results import RunResults
from lezo_ds.runs.run import Run
from lezo_ds.runs.zeroth_order import ZerothOrderMethod

logger = logging.getLogger(__name__)

_SCORING_ONLY = ZoConfig(learning_rate=0.0, sparsity=0.0, update_precision="stochastic")
"""Settings of an engine that updates nothing, and therefore stores no low bits of the weights."""


def train(config: RunConfig) -> RunResults:
    """Start or resume a run and return its results. A collective.

    They are not `finished` if the run was asked to stop early. Bad input raises before weights are
    loaded.
    """
    nothing_done = distributed.lost_ranks_reported(
        lambda: "last good step: none, the run was starting"
    )
    with nothing_done, ExitStack() as resources:
        distributed.init_distributed(config.train.timeout_seconds)
        ds_config = _prepared(config)
        num_ranks = distributed.world_size()
        check_shares(config, ds_config, num_ranks)
        data = load_task_data(config)
        monitors, directory = distributed.on_rank_zero(
            lambda: check_run(config, data, num_ranks, resources)
        )
        ds_config = {**monitors, **ds_config}
        return _compose(config, data, directory, ds_config, resources).execute()


def _compose(
    config: RunConfig,
    data: TaskData,
    directory: RunDirectory,
    ds_config: dict[str, Any],
    resources: ExitStack,
) -> Run:
    """Load the model and return the run with its method and its membership. A collective."""
    if config.method == "adamw":
        logger.info("loading %s", config.model.path)
        engine = initialize_first_order(config, ds_config)
        return Run(FirstOrderMethod(config, data, directory, engine), SingleLaunch())
    lighthouse = config.elastic.lighthouse
    if lighthouse is None:
        method = ZerothOrderMethod(config, data, directory, make_engine(config, ds_config))
        return Run(method, SingleLaunch())
    # torchft is an extra, and only replicas load it.
    from lezo_ds.replicas import Replicas
    from lezo_ds.runs.elastic import ReplicaMembership

    # The link comes first: a wrong address is refused before weights are loaded.
    replicas = Replicas(
        lighthouse, directory.number, directory.journal, config.train.timeout_seconds
    )
    resources.callback(replicas.leave)
    method = ZerothOrderMethod(config, data, directory, make_engine(config, ds_config))
    return Run(method, ReplicaMembership(replicas, method))


def check_run(
    config: RunConfig, data: TaskData, num_ranks: int, lock: ExitStack | None = None
) -> tuple[dict[str, Any], RunDirectory]:
    """Refuse, before weights are loaded, what a run cannot do; return its monitors' sections and directory.

    The run's directory is made and locked by `lock`. Without it, as in a dry run, nothing is
    written.
    """
    module, layout = build_checked(resolve_model(config.model.path), config.model.dtype)
    if config.method in ZEROTH_ORDER:
        make_layer_policy(config.zo, layout.num_blocks, trains_outside=not config.zo.only_blocks)
    directory = RunDirectory(config.run_dir)
    if lock is None:
        directory.check_writable()
    else:
        directory = directory.lock(lock, is_replica=config.elastic.lighthouse is not None)
    if config.elastic.lighthouse and find_spec("torchft") is None:
        raise UserError("elastic.lighthouse needs torchft", fix="pip install 'lezo_ds[elastic]'")
    check_records(config, data, directory, num_ranks)
    if lock is not None:
        blocks = module.get_submodule(layout.path) if config.zo.only_blocks else module
        trained = blocks.parameters() if config.peft.kind == "none" else ()  # an adapter is small
        numels = (
            sum(p.numel() for p in parameters) for parameters in (module.parameters(), trained)
        )
        check_disk(config, *numels)
    return monitor_sections(config), directory


def make_engine(config: RunConfig, ds_config: dict[str, Any] | None = None) -> LezoEngine:
    """Load a run's model, sharded over all ranks. A collective."""
    logger.info("loading %s", config.model.path)
    return initialize(
        config.model.path,
        config.zo if config.method in ZEROTH_ORDER else _SCORING_ONLY,
        ds_config=ds_config or _prepared(config),
        dtype=config.model.dtype,
        seed=config.seed,
        peft=config.peft if config.method in TRAINED else None,
        partition_size=config.partition_size,
        num_steps=config.train.steps,
    )


def _prepared(config: RunConfig) -> dict[str, Any]:
    """Set the number of threads of a CPU operation, and return the DeepSpeed JSON."""
    # On CPUs, this number affects the last bits. With a GPU, the threads only update offloaded
    # weights.
    num_threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1
    if distributed.device().type != "cpu":
        num_cores = len(os.sched_getaffinity(0))
        num_threads = max(num_threads, num_cores // torch.accelerator.device_count())
    torch.set_num_threads(num_threads)
    return ds_config_of(config, distributed.world_size())


def monitor_sections(config: RunConfig) -> dict[str, Any]:
    """Return the sections of the DeepSpeed JSON that train.report_to stands for."""
    run = Path(config.run_dir).name
    files = {"enabled": True, "output_path": f"{config.run_dir}/monitors", "job_name": run}
    service = {"enabled": True, "project": "lezo_ds"}
    sections = {
        "csv": ("csv_monitor", "csv", files),
        "tensorboard": ("tensorboard", "tensorboard", files),
        "wandb": ("wandb", "wandb", service | {"group": run}),
        "comet": (
            "comet",
            "comet_ml",
            service | {"experiment_name": run, "samples_log_interval": 1},
        ),
    }
    chosen = [sections[name] for name in config.train.report_to or ()]
    for _, package, _ in chosen:
        if find_spec(package) is None:
            requirement = "'lezo_ds[tensorboard]'" if package == "tensorboard" else package
            raise UserError(
                f"train.report_to needs the package {package}", fix=f"pip install {requirement}"
            )
    return {section: values for section, _, values in chosen}


def restore(run: RecordedRun, step: int) -> LezoEngine:
    """Return an engine with exactly the weights that the run had after `step` updates. A collective."""
    if run.header.noise_version != NOISE_VERSION:
        text = f"run {run.directory.path} has noise version {run.header.noise_version}, not {NOISE_VERSION}"
        raise UserError(
            text, fix="use the version of lezo_ds that wrote it, or open one of its snapshots"
        )
    distributed.on_rank_zero(lambda: assert_same_model_config(run.header, run.config.model.path))
    # A replay needs neither the estimator nor the layer policy, which may be a user's code.
    zo = replace(
        run.config.zo, estimator="spsa", estimator_options={}, directions=1, learning_rate=0.0
    )
    zo = replace(
        zo, layer_policy="uniform", layer_policy_options={}, sparsity=0.0, lr_schedule="constant"
    )
    engine = make_engine(replace(run.config, zo=zo))
    if engine.base.fingerprint != run.header.model_fingerprint:
        text = (
            f"{run.config.model.path} is not the base model of the run: its fingerprint is another"
        )
        raise UserError(text, fix="add model.path=... with the directory of the base model")
    if run.config.method == "adamw" and step > 0:
        engine.load_model(snapshot_path(run.directory.snapshots, step), step)
        return engine
    num_groups = engine.layer_policy.num_groups
    if any(len(record.layer_weights) not in (0, num_groups) for record in steps_of(run.records)):
        text = f"a step of {run.directory.path} has weights, but not of {num_groups} groups of parameters"
        raise UserError(text, fix="restore the journal from a copy")
    if distributed.rank() == 0 and step > 0 and not snapshot_steps(run.directory.snapshots):
        logger.info("step %d is replayed from the base weights and the journal", step)
    engine.load_checkpoint(run.directory.snapshots, steps_of(run.records), step, run.owner)
    return engine
