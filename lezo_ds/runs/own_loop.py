"""An engine for a training loop of one's own, and the journal of such a loop.

`initialize(run_dir=None)` keeps no record. With a directory, the loop is a run like that of
`lezo-ds train`, but for its data, which lezo_ds does not know:

    RUN/.lock            held by rank 0 as long as the engine, or until engine.resources.close()
    RUN/journal.jsonl    the header has `data.task` own-loop, and no fingerprints of data
    RUN/snapshots/       what engine.save_checkpoint("RUN/snapshots") writes, to resume sooner
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from lezo_ds import distributed
from lezo_ds.config import (
    PeftConfig,
    RunConfig,
    ZoConfig,
    check_zo,
    config_from_dict,
    is_replayable,
)
from lezo_ds.config.deepspeed import load_ds_config, tensor_parallel_size
from lezo_ds.engine import LezoEngine
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.records import open_journal, owner_of, steps_of
from lezo_ds.runs.trainer import check_run, make_engine

OWN_LOOP = "own-loop"
"""The task in the header: there is none of this name, so nothing is read by the rules of another.
A command that needs one refuses it, until data.task names one."""


def initialize(  # noqa: PLR0913, the first three are needed and the others have defaults
    model: str | os.PathLike[str],
    config: ZoConfig,
    ds_config: Mapping[str, Any] | str | os.PathLike[str] | None,
    dtype: str = "fp32",
    seed: int = 0,
    peft: PeftConfig | None = None,
    partition_size: int | None = None,
    num_steps: int | None = None,
    bits: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
) -> LezoEngine:
    """Load a model sharded over all ranks and return the engine that trains it.

    Each rank reads only its own slices of the weights. No rank ever holds the whole model.

    Args:
        model: hub id, or directory with config.json and safetensors files.
        config: settings of the zeroth-order optimizer.
        ds_config: DeepSpeed's JSON as a dict, a file, or a name in ds_configs; None is ZeRO-3 with
            defaults (see `lezo_ds.config.deepspeed.load_ds_config`). With
            `tensor_parallel.autotp_size` of N, groups of N ranks split the weights and run the same
            passes.
        dtype: "fp32", "bf16" or "fp16".
        seed: seed of the run. Noise and dropped layers depend on (seed, step), an adapter's start
            on seed.
        peft: the adapter to train, or None to train all weights.
        partition_size: number of ranks in a shard group, a divisor of the number of ranks; None
            for all. Each group holds a replica of the weights and exchanges only scalars with the
            others.
        num_steps: number of steps of the run; needed if the learning rate depends on it.
        bits: 4 or 8 stores the matrices of the blocks in so many bits (`sharding.quantization`).
            Without an adapter, codes of 8 bits are trained where they are. None stores them in
            `dtype`.
        run_dir: directory of the run, in which rank 0 keeps the journal. If it already holds the
            run, the engine has the weights after its last recorded step, and `global_steps` is the
            number of steps done. None keeps no journal.

    Raises:
        UserError: an argument has a wrong value, or two contradict each other; there is no such
            model, it has no transformer blocks, or its weights or the adapter do not fit;
            everything that is trainable is in blocks and all blocks are dropped; or `run_dir` is
            in use, or holds another run or one of other arguments.
        JournalError: the journal in `run_dir` is damaged, or cannot be written.
    """
    path = str(model) if isinstance(model, os.PathLike) else model
    values = {
        "run_dir": str(run_dir or ""),
        "model": {"path": path, "dtype": dtype, "bits": bits},
        "data": {"task": OWN_LOOP},
        "seed": seed,
        "partition_size": partition_size,
        "peft": peft,
        "train": {"steps": num_steps},
        "zo": config,
    }
    run = config_from_dict(values, "lezo_ds.initialize")
    check_zo(run.zo, run.peft.kind, bits, num_steps)
    distributed.init_distributed()
    world_size = distributed.world_size()
    completed = load_ds_config(ds_config, dtype, world_size, micro_batch_size=None)
    # The JSON may be a dict, which a header cannot name. Of it, this alone can decide last bits.
    run = run.model_copy(update={"tensor_parallel": tensor_parallel_size(completed)})
    if run_dir is None:
        return make_engine(run, completed)
    resources = ExitStack()
    directory = distributed.on_rank_zero(lambda: check_run(run, None, resources))
    engine = make_engine(run, completed)
    engine.resources = resources
    _start_or_resume(engine, run, directory)
    return engine


def _start_or_resume(engine: LezoEngine, config: RunConfig, directory: RunDirectory) -> None:
    """Open or start the journal of a run, and bring the engine to its last step. A collective."""

    def start_journal() -> None:
        journal = open_journal(directory, config, None, engine.base)
        engine.journal = engine.resources.enter_context(journal)

    distributed.on_rank_zero(start_journal)
    steps = []
    owner = None
    if engine.journal is not None:
        steps = steps_of(engine.journal.records)
        owner = owner_of(engine.journal)
    engine.load_checkpoint(directory.snapshots, steps, owner=owner)
    if engine.global_steps == 0 and not is_replayable(config):
        engine.save_checkpoint(directory.snapshots)  # a replay needs the bits of its start
