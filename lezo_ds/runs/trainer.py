"""Start or resume the run of a configuration.

`train` refuses bad input before it loads weights, because loading may take minutes:

    process group, DeepSpeed JSON, data          all ranks
    check_run: model, lock, records              rank 0
    lighthouse, weights                          all ranks
    Run.execute                                  all ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lezo_ds import distributed
from lezo_ds.agreement import assert_same
from lezo_ds.checkpoints.checkpoint import build_checked, resolve_model
from lezo_ds.config import RunConfig, make_layer_policy, trained_part, with_steps
from lezo_ds.config.deepspeed import check_shares
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.distributed.monitors import Monitors
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import UserError, require_package
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.opening import load, prepare
from lezo_ds.runs.records import check_records, with_start_date
from lezo_ds.runs.results import RunResults
from lezo_ds.runs.run import Run


def train(config: RunConfig) -> RunResults:
    """Start or resume a run and return its results. A collective.

    They are not `finished` if the run was asked to stop early.

    Raises:
        UserError: bad input. It is found before weights are loaded.
        LezoError: see `Run.execute`.
    """
    nothing_done = distributed.lost_ranks_reported(
        lambda: "last good step: none, the run was starting"
    )
    with _exits_refused(), nothing_done, ExitStack() as resources:
        distributed.init_distributed(config.train.timeout_seconds)
        config = distributed.on_rank_zero(partial(with_start_date, config))
        ds_config = prepare(config)
        check_shares(config, ds_config, distributed.world_size())
        data = load_task_data(config)
        config = with_steps(config, len(data.train.examples))
        directory = distributed.on_rank_zero(lambda: check_run(config, data, resources))
        # From here on, a batch is known by the indices of its records.
        assert_same("training records", distributed.gather_objects(data.train.fingerprint()))
        monitors = Monitors(config.train.report_to or [], ds_config, directory.monitors)
        workers = None
        if config.elastic.lighthouse is not None:
            # torchft is an extra, and only replicas load it. The link comes first, so that a wrong
            # address is refused before weights are loaded.
            from lezo_ds.replicas.quorum import Replicas

            workers = Replicas(
                config.elastic.lighthouse,
                directory.number,
                directory.journal,
                config.train.timeout_seconds,
            )
            resources.callback(workers.leave)
        engine = make_engine(config, ds_config)
        if workers is not None:
            workers.num_workers = engine.num_workers
            engine.workers = workers
        return Run(config, data, directory, engine, monitors).execute()


@contextmanager
def _exits_refused() -> Iterator[None]:
    """Keep a user-defined estimator, policy or task from ending a run as if all steps were done."""
    try:
        yield
    except SystemExit as error:
        raise UserError(
            f"code that the recipe names called sys.exit({error.code})", fix="remove that call"
        ) from error


def check_run(
    config: RunConfig, data: TaskData | None, resources: ExitStack | None = None
) -> RunDirectory:
    """Raise UserError for settings that a run cannot use, before weights are loaded. For rank 0.

    Args:
        config: of the run.
        data: its encoded splits; None for a training loop that reads data of its own.
        resources: holds the lock of the run's directory. None, as in a dry run: write nothing.

    Returns:
        The directory of the run, which is the first free one for a replica.
    """
    _, layout = build_checked(resolve_model(config.model.path), config.model.dtype)
    trains_outside = trained_part(config.zo) == "all"
    make_layer_policy(config.zo, layout.num_blocks, trains_outside=trains_outside)
    if not config.run_dir:
        raise UserError("run_dir is empty", fix="set it to a directory")
    directory = RunDirectory(config.run_dir)
    if directory.path.is_file():
        raise UserError(f"run_dir {directory.path} is a file", fix="set another run_dir")
    is_replica = config.elastic.lighthouse is not None
    if resources is not None:
        directory = directory.lock(resources, is_replica=is_replica)
    if is_replica:
        require_package("torchft", "elastic.lighthouse needs torchft", "'lezo_ds[elastic]'")
        stop_files = directory.stop_files()
        if stop_files:
            raise UserError(f"{stop_files[0]} stops all replicas", fix=f"rm {stop_files[0]}")
    check_records(config, data, directory)
    found = directory.outputs()
    if found and not directory.journal.exists():
        raise UserError(
            f"{directory.path} has {', '.join(path.name for path in found)}, and no "
            f"{directory.journal.name} of the run that would continue them",
            fix="set another run_dir, or move them elsewhere",
        )
    return directory


def make_engine(config: RunConfig, ds_config: dict[str, Any] | None = None) -> LezoEngine:
    """Load the model of a run, sharded over all ranks, to train it. A collective."""
    parts = load(config, ds_config, config.zo)
    return LezoEngine(parts, config.zo, config.seed, config.train.steps)
