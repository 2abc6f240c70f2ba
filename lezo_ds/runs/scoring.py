"""Score a model, or a run at any step, without training. lezo-ds evaluate calls this module."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lezo_ds import distributed
from lezo_ds.config import (
    TRAINED,
    Dtype,
    Method,
    ModelConfig,
    PeftConfig,
    RunConfig,
    config_from_dict,
    described_task,
)
from lezo_ds.data.evaluation import Model, evaluate
from lezo_ds.data.objectives import OBJECTIVES
from lezo_ds.data.predictions import answer_text
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.recipes import load_recipe
from lezo_ds.registry import names_code
from lezo_ds.runs.restore import read_run, restore
from lezo_ds.runs.trainer import make_engine, set_threads
from lezo_ds.sharding.checkpoint_files import DTYPES, load_model_config, resolve_model
from lezo_ds.tasks.custom import CUSTOM
from lezo_ds.tasks.metrics import REWARD


def score_run(path: Path, step: str, split: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Score the weights that a run had at a step. A collective.

    No module that the run names is imported, unless an override names it: instead of an objective
    "module:function", the loss is that of the task, and instead of such a metric, its own score is given.

    Args:
        path: directory of the run.
        step: "best", "last" or a number of updates.
        split: "dev" or "test".
        overrides: key=value changes to the run's configuration, such as a model that has moved or other data.

    Returns:
        The score and what it belongs to. "predictions" has an entry for each example. A prediction is the
        index of the chosen candidate, with its text, or the generated answer. For a conversation, it is the
        numbers of right and of all tokens of the assistant.

    Raises:
        UserError: there is no such run or step, or the input is bad; or the task, or the reward of a task
            without right answers, is in a module that no override names.
    """
    distributed.init_distributed()
    run = distributed.on_rank_zero(lambda: read_run(path, overrides))
    number = run.find_step(step)
    config = _without_recorded_code(run.config, overrides)
    set_threads()
    engine = restore(run, number)
    return {"run": str(path), "step": number, **_score(config, engine, split)}


def _without_recorded_code(config: RunConfig, overrides: tuple[str, ...]) -> RunConfig:
    """Return the configuration without the modules that only the run names: it may come from anyone."""
    given = {override.partition("=")[0] for override in overrides}
    if names_code(config.data.task) and "data.task" not in given:
        raise UserError(
            "the run's task is in a module, which is imported only if you name it",
            got=f"data.task={config.data.task}",
            expected="data.task=... on the command line",
            fix=f"if you trust this module, add data.task={config.data.task}",
        )
    if config.train.objective not in OBJECTIVES and "train.objective" not in given:
        if config.data.task == CUSTOM and not described_task(config.data).has_answers:
            raise UserError(
                "the run's reward is in a module, which is imported only if you name it",
                got=f"train.objective={config.train.objective}",
                expected="train.objective=... on the command line",
                fix=f"if you trust this module, add train.objective={config.train.objective}",
            )
        if config.data.metric == REWARD:
            config = replace(config, data=replace(config.data, metric=None))
        config = replace(config, train=replace(config.train, objective="task"))
    if config.data.metric is not None and names_code(config.data.metric) and "data.metric" not in given:
        config = replace(config, data=replace(config.data, metric=None))
    return config


def score_model(
    model: str, split: str, overrides: tuple[str, ...] = (), recipe: str | None = None
) -> dict[str, Any]:
    """Score a model as it is. A collective.

    Args:
        model: directory or hub id.
        split: "dev" or "test".
        overrides: key=value configuration: the task, its data, demonstrations.
        recipe: name or path of a recipe with the configuration; None takes all of it from the overrides.

    Returns:
        The same as `score_run`.

    Raises:
        UserError: the input is bad.
    """
    distributed.init_distributed()
    dtype = _stored_dtype(model)
    if recipe is None:
        values = {"method": "zero_shot", "run_dir": "", "model": {"path": model, "dtype": dtype}}
        config = config_from_dict(values, "the command line", overrides)
    else:
        config = load_recipe(recipe, ("run_dir=none", *overrides))
        method: Method = "zero_shot" if config.method in TRAINED else config.method
        config = replace(config, method=method, model=ModelConfig(path=model, dtype=dtype), peft=PeftConfig())
    if split == "test" and config.method == "zero_shot" and config.data.train is None:
        # No training or validation example is used here, and a directory may have only a few.
        config = replace(config, data=replace(config.data, num_train=1, num_dev=1))
    set_threads()
    return {"model": model, **_score(config, make_engine(config), split)}


def _score(config: RunConfig, engine: Model, split: str) -> dict[str, Any]:
    data = load_task_data(config)
    chosen = data.dev if split == "dev" else data.test
    result = evaluate(engine, data, chosen, batch_size=config.train.eval_batch_size)
    return {
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
        "predictions": [
            {"index": example.index, "prediction": predicted, "text": answer_text(example, predicted)}
            for example, predicted in zip(chosen.examples, result.predicted, strict=True)
        ],
    }


def _stored_dtype(model: str) -> Dtype:
    """Return the dtype in the model's config if the engine supports it, and fp32 otherwise."""
    stored = getattr(load_model_config(resolve_model(model)), "dtype", None)
    found: Dtype = next((name for name in get_args(Dtype) if DTYPES[name] == stored), "fp32")
    return found
