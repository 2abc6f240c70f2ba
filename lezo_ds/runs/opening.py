"""Open a model, or the weights of a run at any step, to score them, to ask them or to write them.

What is needed besides weights is how records become inputs, such as the task. It comes from one of
these, and from overrides:

    --run DIR                  the configuration of the run
    --model DIR --config R     the recipe R
    --model DIR                the recipe in DIR/lezo_manifest.json, if DIR is an export

The export of an adapter names its base model, and `model.path=` says where that is now.

A run and an export may come from anyone. Of an export's recipe, only the keys with the property
`of_export` count. A module that a run or an export names is imported only if the command line names
it, too.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import resolve_model, stored_dtype
from lezo_ds.checkpoints.snapshots import MANIFEST, damage_of, load_weights, read_facts
from lezo_ds.config import (
    RunConfig,
    ZoConfig,
    check_data,
    config_from_dict,
    flatten,
    keys_with,
    nest,
    read_recipe,
)
from lezo_ds.config.deepspeed import ds_config_of, shared_by
from lezo_ds.config.load import read_override
from lezo_ds.config.schema import KEYS
from lezo_ds.data.tasks import Task
from lezo_ds.engine import ModelEngine, Parts, ReplayEngine, load_parts
from lezo_ds.errors import UserError
from lezo_ds.forward.adapters import LoraAdapter, PrefixAdapter, read_adapter, start_of
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.evaluations import refuse_unjudged
from lezo_ds.runs.records import (
    RecordedRun,
    assert_same_base,
    assert_same_model_config,
    config_of,
    owner_of,
    read_run,
    refuse_code,
    steps_of,
)
from lezo_ds.runs.results import RunResults, method_name, peak_memory_bytes

logger = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", LoraAdapter.config_file, PrefixAdapter.config_file)
"""How the names of files end that decide the weights of an export."""

_READING_KEYS = frozenset(key for key in KEYS if key.startswith(("data.", "generation."))) | {
    "seed",
    "train.objective",
}
"""The keys by which a recorded run reads and answers a record. None of them decides its weights."""

ZERO_SHOT = "zero-shot"
"""The method of a model as others have published it."""

_TASK_KEYS = {"data.task", "data.prompt", "data.messages"}
"""Keys that name or describe a task."""


class Opened(NamedTuple):
    """Weights that can be loaded, and how their records become inputs.

    Attributes:
        source: what was opened: {"run": directory, "step": number}, or {"model": name}.
        config: how the model reads records and answers them; of a run, its configuration.
        load_engine: loads the weights. A collective.
        named: the overrides that may name modules to import; None if the recipe may, too.
        method: how the weights were made, or "zero-shot" of a model that lezo_ds has not written.
        fingerprints: of the examples of a run, by split; empty if they may be others.
    """

    source: dict[str, Any]
    config: RunConfig
    load_engine: Callable[[], ModelEngine]
    named: Sequence[str] | None
    method: str
    fingerprints: Mapping[str, str] = MappingProxyType({})

    def refuse_code(self, *keys: str) -> None:
        """Refuse to import a module that only the run or the export names in one of some keys."""
        if self.named is not None:
            refuse_code({key: attrgetter(key)(self.config) for key in keys}, self.named)


def open_run(path: Path, step: str, overrides: Sequence[str]) -> Opened:
    """Open the weights of a run. A collective.

    Args:
        path: the directory of the run.
        step: "best", "last" or a number.
        overrides: `key=value` changes of its configuration.

    Raises:
        UserError: the run or the step is not there, or an override would change its weights.
    """
    distributed.init_distributed()
    run = distributed.on_rank_zero(lambda: read_run(path, overrides, _READING_KEYS))
    number = run.find_step(step)
    source = {"run": str(path), "step": number}
    recorded = config_of(run.header, path)
    fingerprints = {}
    if all(attrgetter(key)(run.config) == attrgetter(key)(recorded) for key in _READING_KEYS):
        fingerprints = run.header.config.get("data_fingerprints", {})
    method = method_name(run.config)
    return Opened(source, run.config, lambda: restore(run, number), overrides, method, fingerprints)


def open_model(
    model: str,
    overrides: Sequence[str] = (),
    recipe: str | None = None,
    *,
    needs_task: bool = False,
) -> Opened:
    """Open a model as it is. A collective.

    Args:
        model: directory or hub id.
        overrides: `key=value` changes of the configuration.
        recipe: name or path of a recipe. None takes the keys that the model's own export has.
        needs_task: whether the recipe, the export or an override must name the task. If not, the
            task may be the default one.

    Raises:
        UserError: the model is not there, names no task, or an override would change its weights.
    """
    distributed.init_distributed()
    directory = Path(model)
    distributed.on_rank_zero(lambda: _assert_undamaged(directory))
    sections = read_adapter(directory)
    has_adapter = bool(sections)
    if not has_adapter:
        directory = resolve_model(model)
        of_model = {"path": model, "dtype": _dtype_of(directory)}
        sections = {"model": of_model, "peft": {"kind": "none"}}
    facts = read_facts(directory) or {}
    if has_adapter:
        sections["model"]["bits"] = facts.get("bits")
    moving_key = "model.path" if has_adapter else "model.dtype"
    _assert_same_model(model, sections, overrides, moving_key)
    values: Mapping[str, Any] = {}
    where = f"model {model}"
    folder = None
    if recipe is not None:
        values, path = read_recipe(recipe)
        where = str(path)
        folder = path.parent
    else:
        exported = facts.get("recipe")
        given = {override.partition("=")[0] for override in overrides}
        if isinstance(exported, dict) and "data.task" not in given:  # which needs other keys
            # A directory may come from anyone: no other key that may be there counts.
            values = {key: exported[key] for key in keys_with("of_export") & exported.keys()}
        if not (values or given & _TASK_KEYS):
            if needs_task:
                raise UserError(
                    f"{model} names no task",
                    fix="add --config RECIPE, data.task=... or data.prompt=...",
                )
            values = {"data.messages": "messages"}  # for a chat, with any of its keys
    config = config_from_dict({"run_dir": "", **nest(values), **sections}, where, overrides, folder)

    def load_engine() -> ModelEngine:
        shared = shared_by(distributed.world_size(), config)
        engine = ModelEngine(load(shared))
        if has_adapter:
            _load_adapter(engine, directory, facts.get("base"))
        return engine

    may_import = None if recipe is not None else overrides
    method = "exported model" if facts else ZERO_SHOT
    return Opened({"model": model}, config, load_engine, may_import, method)


def load(
    config: RunConfig,
    ds_config: dict[str, Any] | None = None,
    zo: ZoConfig | None = None,
) -> Parts:
    """Load the model of a configuration, sharded over all ranks. A collective.

    Args:
        config: of a run, or of a model.
        ds_config: the DeepSpeed JSON, if it is known.
        zo: of training; None perturbs and updates no weight.
    """
    logger.info("loading %s", config.model.path)
    return load_parts(config, ds_config or prepare(config), zo)


def prepare(config: RunConfig) -> dict[str, Any]:
    """Set the number of threads of an operation on the CPU, and return the DeepSpeed JSON."""
    # On CPUs, this number affects the last bits, so it must not depend on the machine. With a GPU,
    # the threads only update offloaded weights.
    num_threads = 1
    if "OMP_NUM_THREADS" in os.environ:
        num_threads = torch.get_num_threads()
    if distributed.device().type != "cpu":
        num_cores = len(os.sched_getaffinity(0))
        num_threads = max(num_threads, num_cores // torch.accelerator.device_count())
    torch.set_num_threads(num_threads)
    return ds_config_of(config, distributed.world_size())


def restore(run: RecordedRun, step: int) -> ReplayEngine:
    """Return an engine with exactly the weights that the run had after `step` steps. A collective.

    Raises:
        UserError: the base model is not that of the run, or this version draws other noise.
        LezoError: a snapshot's weights do not have the digest in its manifest.
    """
    header = run.header
    if header.noise_version != NOISE_VERSION:
        raise UserError(
            f"run {run.directory.path} has noise version {header.noise_version}, "
            f"not {NOISE_VERSION}",
            fix="use the version of lezo_ds that wrote it, or open one of its snapshots",
        )
    config = run.config
    refuse_code({"zo.law": config.zo.law}, run.overrides)
    if header.config.get("adapter") != start_of(config.peft):
        raise UserError(
            f"peft.path={config.peft.path} is not the adapter that the run started from",
            fix="add peft.path=... with its directory",
        )
    distributed.on_rank_zero(lambda: assert_same_model_config(header, config.model.path))
    # An adapter begins with values of this seed, whatever seed a command samples with.
    seeded = config.model_copy(update={"seed": header.config["seed"]})
    shared = shared_by(distributed.world_size(), seeded)
    engine = ReplayEngine(load(shared, zo=config.zo), config.zo)
    assert_same_base(header, engine.base)
    steps = steps_of(run.journal.records)
    engine.load_checkpoint(run.directory.snapshots, steps, step, owner_of(run.journal))
    return engine


def _assert_same_model(
    model: str, sections: Mapping[str, Any], overrides: Sequence[str], moving_key: str
) -> None:
    """Refuse overrides, but of `moving_key`, that would make another model of what is opened."""
    values = flatten(sections)
    for key, value in map(read_override, overrides):
        if key in values and key != moving_key and value != values[key]:
            raise UserError(
                f"{key} of {model} is {values[key]} and cannot be {value}", fix=f"remove {key}=..."
            )


def _assert_undamaged(directory: Path) -> None:
    """Raise UserError if the weights of an export have changed since it was written."""
    facts = read_facts(directory)
    if facts is None:  # a model of others
        return
    problem = damage_of(directory, facts, _WEIGHTS)
    if problem:
        raise UserError(
            f"{directory} is damaged: {problem} since it was exported",
            fix="copy it again or export the run again, or if you have changed its weights, remove "
            f"{MANIFEST}",
        )


def _load_adapter(engine: ModelEngine, directory: Path, base: str | None) -> None:
    """Set the weights of an adapter to those in its export. A collective.

    `base` is the fingerprint of the weights that it was trained on.
    """
    if base != engine.base.fingerprint:
        raise UserError(
            f"{directory} is not an adapter of {engine.base.name} that lezo_ds exported",
            fix="add model.path=... with the directory of its base model, or export it again; or, "
            "if peft has written it, merge it with peft and name the merged model",
        )
    load_weights(engine.sharded, directory)


def recipe_of(config: RunConfig) -> dict[str, Any]:
    """Return the keys by which an exported model reads a record, for its manifest."""
    return {key: attrgetter(key)(config) for key in sorted(keys_with("of_export"))}


def _dtype_of(directory: Path) -> str:
    """Return the dtype in the model's config if it can be computed with, and fp32 otherwise.

    fp32 keeps all bits of fp16, in which some processors have no arithmetic.
    """
    stored = stored_dtype(directory)
    return "fp32" if stored == "fp16" and not distributed.supports_fp16() else stored


# Scores.


def results_of(engine: ModelEngine, config: RunConfig, task: Task, **found: Any) -> RunResults:
    """Return what results.json has of a run or of a model. A collective.

    Args:
        engine: the weights. Their digest is noted.
        config: of the run, or of the model that was opened.
        task: whose metric was measured.
        found: the other fields of `RunResults`.
    """
    return RunResults(
        task=task.name,
        metric=task.metric,
        peft=config.peft.kind,
        protocol=config.data.protocol,
        seed=config.seed,
        model_fingerprint=engine.base.fingerprint,
        weights_digest=engine.weights.digest(),
        world_size=engine.world_size,
        **found,
    )


def score(opened: Opened, split: str, out: Path | None = None) -> dict[str, Any]:
    """Score weights on a split, "dev" or "test". A collective.

    Args:
        opened: the weights. With data.num_demonstrations, each question follows solved examples.
        split: the examples to score.
        out: a directory to write, as a run of no steps: config.yaml, results.json, predictions/.

    Returns:
        What --json prints.
    """
    # `export` starts without the libraries of data.
    from lezo_ds.data.dataset import Examples
    from lezo_ds.data.score import evaluate, prediction_rows
    from lezo_ds.runs.cross_check import check_scoring

    began = time.monotonic()
    opened.refuse_code("data.task", "data.metric", "train.objective")
    config = opened.config
    data = config.data
    check_data(config, split)
    examples = Examples(config, only=split)
    reader = examples.reader
    chosen = examples.split(split)
    if opened.fingerprints.get(split, chosen.fingerprint()) != chosen.fingerprint():
        logger.warning(
            "the %s examples have changed since the run: this score is not comparable with its own",
            split,
        )
    engine = opened.load_engine()
    check_scoring(engine, reader, chosen, config)
    result = evaluate(engine, reader, chosen, config.train.eval_batch_size)
    refuse_unjudged(result, split)
    if out is not None:
        # All ranks add to the numbers; rank 0 writes.
        method = opened.method
        if method == ZERO_SHOT and data.num_demonstrations:
            method = f"{data.num_demonstrations} solved examples"
        results = results_of(
            engine,
            config,
            reader.task,
            method=method,
            finished=True,
            zero_shot=result.score if method == ZERO_SHOT else None,
            test=result.score,
            majority_class=result.majority_class,
            macro_f1=result.macro_f1,
            by_label=result.by_label,
            best_step=opened.source.get("step"),
            seconds=round(time.monotonic() - began, 3),
            peak_memory_bytes=peak_memory_bytes(),
        )
        directory = RunDirectory(out)
        rows = prediction_rows(reader.task, chosen.examples, result.predicted)

        def write() -> None:
            directory.write_predictions(results.best_step or 0, rows)
            directory.write_config(opened.config.model_copy(update={"run_dir": str(out)}))
            directory.write_json(directory.results, asdict(results))

        distributed.on_rank_zero(write)
    return {
        **opened.source,
        "task": reader.task.name,
        "num_demonstrations": data.num_demonstrations,
        "protocol": data.protocol,
        "split": split,
        "num_examples": len(chosen),
        "metric": reader.task.metric,
        "score": result.score,
        "majority_class": result.majority_class,
        "macro_f1": result.macro_f1,
        "by_label": asdict(result)["by_label"],
        "objective": config.train.objective,
        "loss": result.loss,
    }
