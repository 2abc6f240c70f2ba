"""Score a model, or a run at any step, without training, for lezo-ds evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lezo_ds import distributed
from lezo_ds.config import TRAINED, Dtype, Method, RunConfig, config_from_dict, load_config
from lezo_ds.config.schema import ModelConfig, PeftConfig
from lezo_ds.data.evaluation import Model, answer_text, evaluate
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.model.checkpoint import DTYPES, load_model_config, resolve_model
from lezo_ds.registry import names_code
from lezo_ds.runs.records import read_run
from lezo_ds.runs.trainer import make_engine, restore


def score_run(path: Path, step: str, split: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Score the weights of a run at a step ("best", "last" or a number) on "dev" or "test". A collective.

    "predictions" has for each example the index of the chosen candidate with its text, the generated answer,
    or for a conversation the numbers of right and of all tokens of the assistant.
    """
    distributed.init_distributed()
    run = distributed.on_rank_zero(lambda: read_run(path, overrides))
    number = run.find_step(step)
    _refuse_recorded_code(run.config, overrides)
    engine = restore(run, number)
    return {"run": str(path), "step": number, **_score(run.config, engine, split)}


def _refuse_recorded_code(config: RunConfig, overrides: Sequence[str]) -> None:
    """Refuse to import a module that only the run names: a run may come from anyone."""
    data = {"data.task": config.data.task, "data.metric": config.data.metric or ""}
    named = {override.partition("=")[0] for override in overrides}
    for key, value in {**data, "train.objective": config.train.objective}.items():
        if names_code(value) and key not in named:
            text = f"{key}={value} of the run is in a module, which is imported only if the command names it"
            raise UserError(text, fix=f"if you trust this module, add {key}={value}")


def score_model(
    model: str, split: str, overrides: Sequence[str] = (), recipe: str | None = None
) -> dict[str, Any]:
    """Score a model (directory or hub id) as it is, like `score_run`. A collective.

    The task, its data and so on come from a recipe (name or path) and `key=value` overrides.
    """
    distributed.init_distributed()
    dtype = _stored_dtype(model)
    if recipe is None:
        values = {"method": "zero_shot", "run_dir": "", "model": {"path": model, "dtype": dtype}}
        config = config_from_dict(values, "the command line", overrides)
    else:
        config = load_config(recipe, ("run_dir=none", *overrides))
        method: Method = "zero_shot" if config.method in TRAINED else config.method
        config = replace(config, method=method, model=ModelConfig(path=model, dtype=dtype), peft=PeftConfig())
    if split == "test" and config.method == "zero_shot" and config.data.train is None:
        # No training or validation example is used here, and a directory may have only a few.
        config = replace(config, data=replace(config.data, num_train=1, num_dev=1))
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
    dtypes: tuple[Dtype, ...] = get_args(Dtype)
    return next((name for name in dtypes if DTYPES[name] == stored), "fp32")
