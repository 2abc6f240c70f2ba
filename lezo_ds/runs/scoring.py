"""Open a model, or a run at any step, without training: lezo-ds evaluate and predict.

What they need to know besides weights, such as the task, comes from one of these, and from
overrides:

    --run DIR                  the configuration of the run
    --model DIR --config R     the recipe R
    --model DIR                the recipe in DIR/lezo_manifest.json, if DIR is an export

The export of an adapter names its base model, and `model.path=` says where that is now.

A run and an export may come from anyone. Of an export's recipe, only the keys in `_RECIPE` count. A
module that a run or an export names is imported only if the command line names it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import DTYPES, load_model_config, resolve_model
from lezo_ds.checkpoints.snapshots import MANIFEST, damage_of, load_weights, read_facts
from lezo_ds.config import (
    TRAINED,
    Dtype,
    Method,
    RunConfig,
    config_from_dict,
    config_to_dict,
    load_config,
)
from lezo_ds.config.components import DESCRIBING_KEYS
from lezo_ds.config.deepspeed import shared_by
from lezo_ds.config.schema import READER
from lezo_ds.data.evaluation import evaluate
from lezo_ds.data.task_data import load_task_data
from lezo_ds.engine import ModelEngine
from lezo_ds.errors import UserError
from lezo_ds.forward.adapters import LoraAdapter, PrefixAdapter, read_adapter
from lezo_ds.registry import names_code
from lezo_ds.runs.records import read_run
from lezo_ds.runs.trainer import open_engine, restore

_RECIPE = (
    "data.task",
    *(f"data.{name}" for name in DESCRIBING_KEYS),
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
        config: the configuration to read records with.
        load_engine: loads the weights. A collective.
    """

    source: dict[str, Any]
    config: RunConfig
    load_engine: Callable[[], ModelEngine]


def open_run(path: Path, step: str, overrides: Sequence[str] = ()) -> Opened:
    """Open the weights of a run. A collective.

    Args:
        path: the directory of the run.
        step: "best", "last" or a number.
        overrides: `key=value` changes of its configuration.

    Raises:
        UserError: the run or the step is not there, an override would change its weights, or the
            run names code (see the module).
    """
    distributed.init_distributed()
    run = distributed.on_rank_zero(lambda: read_run(path, overrides, _READING_KEYS))
    number = run.find_step(step)
    _refuse_recorded_code(run.config, overrides)
    source = {"run": str(path), "step": number}
    return Opened(source, run.config, lambda: restore(run, number))


def open_model(
    model: str,
    overrides: Sequence[str] = (),
    recipe: str | None = None,
    *,
    needs_task: bool = False,
    is_checked: bool = True,
) -> Opened:
    """Open a model as it is. A collective.

    Args:
        model: directory or hub id.
        overrides: `key=value` changes of the configuration.
        recipe: name or path of a recipe. None takes the keys that the model's own export has.
        needs_task: whether the recipe, the export or an override must name the task. If not, the
            task may be the default one.
        is_checked: whether the keys are checked against each other, as those of a run to start are.

    Raises:
        UserError: the model is not there, names no task, or names code (see the module), or an
            override would change its weights.
    """
    distributed.init_distributed()
    directory = Path(model)
    distributed.on_rank_zero(lambda: _assert_undamaged(directory))
    sections = read_adapter(directory)
    has_adapter = bool(sections)
    if has_adapter:
        sections["model"]["bits"] = (read_facts(directory) or {}).get("bits")
    else:
        directory = resolve_model(model)
        sections = {"model": {"path": model, "dtype": _stored_dtype(directory)}, "peft": {}}
    where = f"model {model}"
    moving_key = "model.path" if has_adapter else "model.dtype"
    _assert_same_model(model, sections, overrides, moving_key)
    if recipe is not None:
        config = load_config(recipe, ("run_dir=none", *overrides))
        # The model is scored as it is, not as the recipe would train it.
        method: Method = "zero_shot" if config.method in TRAINED else config.method
        values = {**config_to_dict(config), **sections, "method": method}
        # The base model of an adapter may have moved.
        moved = [override for override in overrides if override.startswith("model.path=")]
        config = config_from_dict(values, where, moved if has_adapter else (), recorded=True)
    else:
        is_named = any(override.startswith(_TASK_OVERRIDES) for override in overrides)
        exported = {}
        of_export = (read_facts(directory) or {}).get("recipe")
        if isinstance(of_export, dict) and not is_named:  # another task needs other keys
            # A directory may come from anyone: no other key that may be there counts.
            exported = {key: of_export[key] for key in _RECIPE if key in of_export}
        if needs_task and not is_named and not exported:
            raise UserError(f"{model} names no task", fix="add --config RECIPE, or data.prompt=...")
        values = {"method": "zero_shot", "run_dir": "", **sections, **exported}
        config = config_from_dict(values, where, overrides, recorded=not is_checked)
        _refuse_recorded_code(config, overrides)

    def load_engine() -> ModelEngine:
        shared = shared_by(distributed.world_size(), config)
        engine = open_engine(shared, has_adapter=has_adapter)
        if has_adapter:
            _load_adapter(engine, directory)
        return engine

    return Opened({"model": model}, config, load_engine)


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


def _load_adapter(engine: ModelEngine, directory: Path) -> None:
    """Set the weights of an adapter to those in its export. A collective."""
    facts = distributed.on_rank_zero(lambda: read_facts(directory)) or {}
    if facts.get("base") != engine.base.fingerprint:
        raise UserError(
            f"{directory} is not an adapter of {engine.base.name} that lezo_ds exported",
            fix="add model.path=... with the directory of its base model, or export it again",
        )
    load_weights(engine.sharded, directory)


def recipe_of(config: RunConfig) -> dict[str, Any]:
    """Return the keys by which an exported model reads a record, for its manifest."""
    values = READER.flatten(config_to_dict(config))
    return {key: values[key] for key in _RECIPE}


def _refuse_recorded_code(config: RunConfig, overrides: Sequence[str]) -> None:
    """Refuse to import a module that only the run or the export names."""
    named = [override.partition("=")[0] for override in overrides]
    values = READER.flatten(config_to_dict(config))
    for key in ("data.task", "data.metric", "train.objective"):
        value = values[key]
        if value is not None and names_code(value) and key not in named:
            raise UserError(
                f"{key}={value} of the run is in a module, "
                "which is imported only if the command names it",
                fix=f"if you trust this module, add {key}={value}",
            )


def score(opened: Opened, split: str) -> dict[str, Any]:
    """Score weights on a split, "dev" or "test". A collective.

    Returns:
        What --json prints.
    """
    source, config, load_engine = opened
    is_only_tested = "model" in source and config.method == "zero_shot" and split == "test"
    if is_only_tested and not config.data.train:
        # A directory may have only a few training and validation examples.
        config = replace(config, data=replace(config.data, num_train=1, num_dev=1))
    data = load_task_data(config)
    chosen = data.dev if split == "dev" else data.test
    result = evaluate(load_engine(), data.reader, chosen, batch_size=config.train.eval_batch_size)
    return {
        **source,
        "task": data.task.name,
        "method": config.method,
        "protocol": config.data.protocol,
        "split": split,
        "num_examples": len(chosen.examples),
        "metric": data.task.metric,
        "score": result.score,
        "majority_class": result.majority_class,
        "macro_f1": result.macro_f1,
        "by_label": asdict(result)["by_label"],
        "objective": config.train.objective,
        "loss": result.loss,
    }


def _stored_dtype(directory: Path) -> Dtype:
    """Return the dtype in the model's config if the engine supports it, and fp32 otherwise."""
    stored = getattr(load_model_config(directory), "dtype", None)
    names: Sequence[Dtype] = get_args(Dtype)
    return next((name for name in names if DTYPES[name] == stored), "fp32")
