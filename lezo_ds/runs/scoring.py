"""Open a model, or a run at any step, without training, and score it: lezo-ds evaluate and predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import DTYPES, load_model_config, resolve_model
from lezo_ds.checkpoints.snapshots import read_facts
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
from lezo_ds.config.schema import READER, ModelConfig, PeftConfig
from lezo_ds.data.evaluation import evaluate, prediction_rows
from lezo_ds.data.task_data import load_task_data
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import UserError
from lezo_ds.registry import names_code
from lezo_ds.runs.records import read_run
from lezo_ds.runs.trainer import make_engine, restore

_RECIPE = (
    "data.task",
    *(f"data.{name}" for name in DESCRIBING_KEYS),
    "data.metric",
    "data.max_length",
)
_RECIPE += ("generation.max_new_tokens", "generation.stop")
_TASK = ("data.task=", "data.prompt=", "data.messages=")

Opened = tuple[dict[str, Any], RunConfig, Callable[[], LezoEngine]]
"""What was opened, how its records become inputs, and a collective that loads the weights."""


def open_run(path: Path, step: str, overrides: Sequence[str] = ()) -> Opened:
    """Open the weights of a run at a step ("best", "last" or a number). A collective."""
    distributed.init_distributed()
    run = distributed.on_rank_zero(lambda: read_run(path, overrides))
    number = run.find_step(step)
    _refuse_recorded_code(run.config, overrides)
    return {"run": str(path), "step": number}, run.config, lambda: restore(run, number)


def open_model(
    model: str, overrides: Sequence[str] = (), recipe: str | None = None, *, has_task: bool = False
) -> Opened:
    """Open a model (directory or hub id) as it is. A collective.

    The task and so on come from a recipe (name or path), or else from the model's own export, and from
    `key=value` overrides. With `has_task`, one of them must name the task.
    """
    distributed.init_distributed()
    directory = resolve_model(model)
    dtype = _stored_dtype(directory)
    if recipe is None:
        is_named = any(text.startswith(_TASK) for text in overrides)
        found = {} if is_named else (read_facts(directory) or {}).get("recipe")
        # A directory may come from anyone: no other key that may be there counts.
        exported = (
            {key: found[key] for key in _RECIPE if key in found} if isinstance(found, dict) else {}
        )
        if has_task and not (is_named or exported):
            raise UserError(f"{model} names no task", fix="add --config RECIPE, or data.prompt=...")
        values = {
            "method": "zero_shot",
            "run_dir": "",
            "model": {"path": model, "dtype": dtype},
            **exported,
        }
        config = config_from_dict(values, f"model {model}", overrides, recorded=has_task)
        _refuse_recorded_code(config, overrides)
    else:
        config = load_config(recipe, ("run_dir=none", *overrides))
        method: Method = "zero_shot" if config.method in TRAINED else config.method
        config = replace(
            config, method=method, model=ModelConfig(path=model, dtype=dtype), peft=PeftConfig()
        )
    return {"model": model}, config, lambda: make_engine(config)


def recipe_of(config: RunConfig) -> dict[str, Any]:
    """Return the keys by which an exported model reads a record, for its manifest."""
    values = READER.flatten(config_to_dict(config))
    return {key: values[key] for key in _RECIPE}


def _refuse_recorded_code(config: RunConfig, overrides: Sequence[str]) -> None:
    """Refuse to import a module that only the run names: a run may come from anyone."""
    data = {"data.task": config.data.task, "data.metric": config.data.metric or ""}
    named = {override.partition("=")[0] for override in overrides}
    for key, value in {**data, "train.objective": config.train.objective}.items():
        if names_code(value) and key not in named:
            text = f"{key}={value} of the run is in a module, which is imported only if the command names it"
            raise UserError(text, fix=f"if you trust this module, add {key}={value}")


def score(opened: Opened, split: str) -> dict[str, Any]:
    """Score weights on "dev" or "test", with the predictions of each example. A collective."""
    facts, config, load = opened
    if (
        "model" in facts
        and split == "test"
        and config.method == "zero_shot"
        and not config.data.train
    ):
        # No training or validation example is used here, and a directory may have only a few.
        config = replace(config, data=replace(config.data, num_train=1, num_dev=1))
    data = load_task_data(config)
    chosen = data.dev if split == "dev" else data.test
    result = evaluate(load(), data, chosen, batch_size=config.train.eval_batch_size)
    return {
        **facts,
        "task": data.task.name,
        "method": config.method,
        "protocol": config.data.protocol,
        "split": split,
        "num_examples": len(chosen.examples),
        "metric": data.task.metric,
        "score": result.score,
        "majority_class": result.majority_class,
        "objective": config.train.objective,
        "loss": result.loss,
        "predictions": prediction_rows(chosen.examples, result.predicted),
    }


def _stored_dtype(directory: Path) -> Dtype:
    """Return the dtype in the model's config if the engine supports it, and fp32 otherwise."""
    stored = getattr(load_model_config(directory), "dtype", None)
    dtypes: tuple[Dtype, ...] = get_args(Dtype)
    return next((name for name in dtypes if DTYPES[name] == stored), "fp32")
