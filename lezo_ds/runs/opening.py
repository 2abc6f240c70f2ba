"""Open a model, or the weights of a run at any step, to score them, to ask them or to write them.

What is needed besides weights is how records become inputs, such as the task. It comes from one of
these, and from overrides:

    --run DIR                  the configuration of the run
    --model DIR --config R     the recipe R
    --model DIR                the recipe in DIR/lezo_manifest.json, if DIR is an export

The export of an adapter names its base model, and `model.path=` says where that is now.

A run and an export may come from anyone. Of an export's recipe, only the keys in `_RECIPE` count. A
module that a run or an export names is imported only if the command line names it, too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import (
    load_model_config,
    num_positions,
    resolve_model,
    stored_dtype,
)
from lezo_ds.checkpoints.snapshots import (
    MANIFEST,
    damage_of,
    load_weights,
    read_facts,
    snapshot_path,
)
from lezo_ds.config import (
    TRAINED,
    PeftConfig,
    ReadingConfig,
    RunConfig,
    check_reading,
    config_from_dict,
    find_recipe,
)
from lezo_ds.config.components import DESCRIBING_KEYS
from lezo_ds.config.deepspeed import ds_config_of, shared_by
from lezo_ds.config.schema import READER
from lezo_ds.data.evaluation import evaluate
from lezo_ds.data.task_data import load_examples, warn_of_unreachable
from lezo_ds.engine import ModelEngine, Parts, ReplayEngine, load_parts
from lezo_ds.errors import UserError
from lezo_ds.forward.adapters import LoraAdapter, PrefixAdapter, read_adapter, start_of
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.runs.records import (
    RecordedRun,
    assert_same_model_config,
    read_run,
    refuse_code,
    steps_of,
)

logger = logging.getLogger(__name__)

_RECIPE = (
    "data.task",
    *(f"data.{name}" for name in DESCRIBING_KEYS),
    "data.chat_template_kwargs",
    "data.metric",
    "data.max_length",
    "generation.max_new_tokens",
    "generation.stop",
)
"""The keys that say how an exported model reads a record."""

_READING_KEYS = frozenset(
    key for key in READER.keys if key.startswith(("data.", "generation."))
) | {"seed", "train.objective"}
"""The keys by which a recorded run reads and answers a record. None of them decides its weights."""

_WEIGHTS = (".safetensors", LoraAdapter.config_file, PrefixAdapter.config_file)
"""How the names of files end that decide the weights of an export."""

_TASK_OVERRIDES = ("data.task=", "data.prompt=", "data.messages=")
"""How an override begins that names or describes a task."""


class Opened(NamedTuple):
    """Weights that can be loaded, and how their records become inputs.

    Attributes:
        source: what was opened: {"run": directory, "step": number}, or {"model": name}.
        reading: how the model reads records and answers them.
        load_engine: loads the weights. A collective.
        named: the overrides that may name modules to import; None if the recipe may, too.
        fingerprints: of the examples of a run, by split; empty if they may be others.
    """

    source: dict[str, Any]
    reading: ReadingConfig
    load_engine: Callable[[], ModelEngine]
    named: Sequence[str] | None
    fingerprints: Mapping[str, str] = MappingProxyType({})

    def refuse_code(self, *keys: str) -> None:
        """Refuse to import a module that only the run or the export names in one of some keys."""
        if self.named is not None:
            data = self.reading.data
            values = {
                "data.task": data.task,
                "data.metric": data.metric,
                "train.objective": self.reading.objective,
            }
            refuse_code({key: values[key] for key in keys}, self.named)

    def fitted(self) -> ReadingConfig:
        """Return how records are read, cut to what the model can read, with room for a prompt."""
        reading = self.reading
        model_config = load_model_config(resolve_model(reading.model))
        max_length = reading.data.max_length
        max_length = min(max_length, num_positions(model_config) or max_length)
        generation = reading.generation
        if generation.max_new_tokens > max_length - 2:
            generation = replace(generation, max_new_tokens=max(1, max_length // 2))
        data = replace(reading.data, max_length=max_length)
        return reading._replace(data=data, generation=generation)


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
    changed = {override.partition("=")[0] for override in overrides}
    recorded = run.header.config.get("data_fingerprints", {})
    fingerprints = {} if changed & _READING_KEYS else recorded
    return Opened(source, run.config.reading, lambda: restore(run, number), overrides, fingerprints)


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
        of_model = {"path": model, "dtype": stored_dtype(directory)}
        sections = {"model": of_model, "peft": {"kind": "none"}}
    facts = read_facts(directory) or {}
    if has_adapter:
        sections["model"]["bits"] = facts.get("bits")
    moving_key = "model.path" if has_adapter else "model.dtype"
    _assert_same_model(model, sections, overrides, moving_key)
    values: Mapping[str, Any] = {}
    where = f"model {model}"
    folder = None
    keys = overrides
    if recipe is not None:
        values, where, keys, folder = find_recipe(recipe, overrides)
    elif not any(override.startswith(_TASK_OVERRIDES) for override in overrides):
        exported = facts.get("recipe")
        if isinstance(exported, dict):  # of a task, and another one needs other keys
            # A directory may come from anyone: no other key that may be there counts.
            values = {key: exported[key] for key in _RECIPE if key in exported}
        if needs_task and not values:
            raise UserError(f"{model} names no task", fix="add --config RECIPE, or data.prompt=...")
    config = config_from_dict(values, where, keys, folder, opened=sections)
    # The model is scored as it is, not as the recipe would train it.
    config = replace(config, method="icl" if config.method == "icl" else "zero_shot")

    def load_engine() -> ModelEngine:
        shared = shared_by(distributed.world_size(), config)
        engine = ModelEngine(load(shared, config.peft))
        if has_adapter:
            _load_adapter(engine, directory, facts.get("base"))
        return engine

    named = None if recipe is not None else overrides
    return Opened({"model": model}, config.reading, load_engine, named)


def load(
    config: RunConfig, peft: PeftConfig | None, ds_config: dict[str, Any] | None = None
) -> Parts:
    """Load the model of a configuration, sharded over all ranks. A collective.

    Args:
        config: of a run, or of a model.
        peft: the adapter of the model; None if it has none.
        ds_config: the DeepSpeed JSON, if it is known.
    """
    logger.info("loading %s", config.model.path)
    return load_parts(config, ds_config or prepare(config), peft)


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
    shared = shared_by(distributed.world_size(), replace(config, seed=header.config["seed"]))
    peft = config.peft if config.method in TRAINED else None
    engine = ReplayEngine(load(shared, peft), config.zo)
    facts = (engine.base.fingerprint, engine.base.table_hash)
    if facts != (header.model_fingerprint, header.parameter_table_hash):
        raise UserError(
            f"{config.model.path} is not the base model of the run: its fingerprint, or the "
            "hash of its parameters' names, is another",
            fix="add model.path=... with the directory of the base model",
        )
    snapshots = run.directory.snapshots
    if config.method == "adamw" and step > 0:
        engine.load_model(snapshot_path(snapshots, step), step)
        return engine
    engine.load_checkpoint(snapshots, steps_of(run.records), step, run.owner)
    return engine


def _assert_same_model(
    model: str, sections: Mapping[str, Any], overrides: Sequence[str], moving_key: str
) -> None:
    """Refuse overrides, but of `moving_key`, that would make another model of what is opened."""
    values = READER.flatten(sections)
    for key, value in map(READER.override, overrides):
        if key in values and key != moving_key and value != values[key]:
            raise UserError(
                f"{key} of {model} is {values[key]} and cannot be {value}", fix=f"remove {key}=..."
            )


def _assert_undamaged(directory: Path) -> None:
    """Refuse an export whose weights are not those that were written."""
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


def recipe_of(reading: ReadingConfig) -> dict[str, Any]:
    """Return the keys by which an exported model reads a record, for its manifest."""
    sections = {"data": asdict(reading.data), "generation": asdict(reading.generation)}
    values = READER.flatten(sections)
    return {key: values[key] for key in _RECIPE}


def score(opened: Opened, split: str) -> dict[str, Any]:
    """Score weights on a split, "dev" or "test". A collective.

    Returns:
        What --json prints.
    """
    opened.refuse_code("data.task", "data.metric", "train.objective")
    reading = opened.reading
    check_reading(reading)
    data = reading.data
    is_only_tested = "model" in opened.source and reading.method == "zero_shot" and split == "test"
    if is_only_tested and not data.train:
        # A directory may have only a few training and validation examples.
        reading = reading._replace(data=replace(data, num_train=1, num_dev=1))
    reader, splits = load_examples(reading)
    chosen = reader.encode(splits.dev if split == "dev" else splits.test)
    if split == "test":
        warn_of_unreachable(reader, chosen)
    if opened.fingerprints.get(split, chosen.fingerprint()) != chosen.fingerprint():
        logger.warning(
            "the %s examples have changed since the run: this score does not compare with its own",
            split,
        )
    result = evaluate(opened.load_engine(), reader, chosen, reading.batch_size)
    return {
        **opened.source,
        "task": reader.task.name,
        "method": reading.method,
        "protocol": data.protocol,
        "split": split,
        "num_examples": len(chosen.examples),
        "metric": reader.task.metric,
        "score": result.score,
        "majority_class": result.majority_class,
        "macro_f1": result.macro_f1,
        "by_label": asdict(result)["by_label"],
        "objective": reading.objective,
        "loss": result.loss,
    }
