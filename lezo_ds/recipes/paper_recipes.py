"""The recipe of each experiment in the paper's tables: its hyperparameters, and hardware that it fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lezo_ds.recipes.paper import PAPER_MODELS, PAPER_SCORES, PAPER_TASKS, Experiment, hyperparameters
from lezo_ds.recipes.recipe import Recipe
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.metrics import METRICS
from lezo_ds.zo.layers import num_dropped as num_dropped_from_sparsity

ZEROTH_ORDER = ("lezo", "mezo")
TRAINED = (*ZEROTH_ORDER, "adamw")

_LONG_INPUTS = frozenset({"boolq", "multirc", "record", "squad", "drop"})
"""Tasks whose inputs contain a passage: hundreds of tokens, while the others have tens."""

_LARGEST_LONG_BATCH = 4
_WEIGHTS_SHARE = 0.75  # of a GPU's memory; the rest is for activations and one gathered block

_METHOD_TITLES = {
    "zero_shot": "Zero-shot",
    "icl": "In-context learning with 32 demonstrations",
    "adamw": "Fine-tuning with AdamW",
    "mezo": "MeZO (Malladi et al. 2023)",
    "lezo": "LeZO (Wang et al. 2024)",
}
_PEFT_TITLES = {"none": "", "lora": " with LoRA", "prefix": " with prefix tuning"}
_PEFT_VALUES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "lora": {"kind": "lora", "lora_rank": 8, "lora_alpha": 16, "lora_targets": "q_proj,v_proj"},
    "prefix": {"kind": "prefix", "prefix_length": 5},
}


class _Hardware(NamedTuple):
    """The hardware that a recipe is written for."""

    gpus: str
    num_gpus: int
    gigabytes: int  # memory of each GPU, in 10**9 bytes


def recipe_name(experiment: Experiment) -> str:
    """Return the name of an experiment's recipe and of its run.

    >>> recipe_name(Experiment("opt-13b", "sst2", "lezo", "lora"))
    'opt-13b-sst2-lezo-lora'
    """
    peft = "" if experiment.peft == "none" else f"-{experiment.peft}"
    return f"{experiment.model}-{experiment.task}-{experiment.method.replace('_', '-')}{peft}"


def paper_recipe(experiment: Experiment) -> Recipe:
    """Return the recipe of an experiment in the paper's tables."""
    hardware = _hardware(experiment)
    task, is_long = PAPER_TASKS[experiment.task], experiment.task in _LONG_INPUTS
    # Gradients leave the range of fp16 without a loss scale; bf16 does not need one.
    dtype = "bf16" if experiment.method == "adamw" else "fp16"
    values: dict[str, Any] = {
        "run_dir": f"runs/{recipe_name(experiment)}",
        "method": "lezo" if experiment.method == "mezo" else experiment.method,
        "model.path": f"facebook/{experiment.model}",
        "model.dtype": dtype,
        "data.task": experiment.task,
        "data.protocol": "mezo",
        "train.eval_batch_size": _LARGEST_LONG_BATCH if is_long else 16,
        "deepspeed": f"ds_configs/zero3_{dtype}.json",
    }
    sizes = f"{task.num_train} training, {task.num_dev} validation, {task.num_test} test examples"
    notes = {"data.protocol": sizes}
    values |= {f"peft.{name}": value for name, value in _PEFT_VALUES[experiment.peft].items()}
    if experiment.method == "icl":
        # 32 demonstrations fill most of 2048 tokens.
        values |= {"data.num_demonstrations": 32}
        values["train.eval_batch_size"] = 2
    if experiment.method in TRAINED:
        _add_training(experiment, hardware, values, notes)
    model = experiment.model.replace("opt", "OPT")
    method = _METHOD_TITLES[experiment.method] + _PEFT_TITLES[experiment.peft]
    return Recipe(
        title=f"{method} on {task.title} with {model}",
        values=values,
        notes=notes,
        num_gpus=hardware.num_gpus,
        about={
            "Hardware": f"{hardware.gpus}; we have NOT run this recipe on this hardware. "
            f"lezo-ds plan --config {recipe_name(experiment)} estimates the memory.",
            "Expected": _expected(experiment),
        },
    )


def _hardware(experiment: Experiment) -> _Hardware:
    if experiment.method == "adamw":
        return _Hardware("eight GPUs of 80 GB", 8, 80)
    if experiment.model == "opt-1.3b":
        return _Hardware("one GPU of 16 GB or more (the paper does not name its GPU)", 1, 16)
    if experiment.model == "opt-13b":
        return _Hardware("two A100-40G (the paper does not name its GPUs)", 2, 40)
    if experiment.task == "boolq":
        return _Hardware("four A100-40G, as in the paper", 4, 40)
    return _Hardware("two A100-40G, as in the paper", 2, 40)


def _add_training(
    experiment: Experiment, hardware: _Hardware, values: dict[str, Any], notes: dict[str, str]
) -> None:
    """Add the hyperparameters, and the largest micro-batch that is expected to fit."""
    found = hyperparameters(experiment)
    section = "zo" if experiment.method in ZEROTH_ORDER else "adamw"
    values[f"{section}.learning_rate"] = found.learning_rates[0]
    notes[f"{section}.learning_rate"] = f"searched: {_rates(found.learning_rates)}"
    values["train.batch_size"] = found.batch_size
    share = found.batch_size // hardware.num_gpus
    micro = min(share, _LARGEST_LONG_BATCH) if experiment.task in _LONG_INPUTS else share
    values["train.micro_batch_size"] = micro
    if experiment.method == "adamw":
        assert found.epochs is not None
        steps = found.epochs * PAPER_TASKS[experiment.task].num_train // found.batch_size
        values |= {"adamw.weight_decay": 0, "train.steps": steps}
        return
    assert found.steps is not None
    values["zo.perturbation_scale"] = found.perturbation_scale
    values |= {"train.steps": found.steps, "train.eval_every": found.steps // 10}
    if experiment.method == "mezo":
        values["zo.sparsity"] = 0
    if experiment.method == "lezo":
        assert found.sparsity is not None
        num_blocks = PAPER_MODELS[experiment.model].num_blocks
        dropped = num_dropped_from_sparsity(found.sparsity, num_blocks)
        values["zo.sparsity"] = found.sparsity
        notes["zo.sparsity"] = f"a step drops {dropped} of {num_blocks} transformer blocks"
    num_parameters = PAPER_MODELS[experiment.model].num_parameters
    master_gigabytes = 4e-9 * num_parameters / hardware.num_gpus  # 2 bytes of weights, 2 of low bits
    if experiment.peft == "none" and master_gigabytes > _WEIGHTS_SHARE * hardware.gigabytes:
        values["zo.update_precision"] = "stochastic"
        more = f"{2e-9 * num_parameters:.0f} GB more, summed over all ranks"
        notes["zo.update_precision"] = f"fp32_master needs {more}"


def _expected(experiment: Experiment) -> str:
    score = PAPER_SCORES[experiment]
    metric = METRICS.find(TASKS.find(experiment.task).metric).title
    deviation = "" if score.deviation is None else f" +- {score.deviation}"
    zero_shot = PAPER_SCORES[Experiment(experiment.model, experiment.task, "zero_shot")]
    text = f"test {metric} {score.mean}{deviation}% (Wang et al. 2024; zero-shot {zero_shot.mean}%)."
    if experiment.method in ZEROTH_ORDER:
        text += " This is the mean and deviation over five seeds."
    if experiment.method in TRAINED:
        text += " The paper does not say which of the learning rates that it searched was best here."
    return text


def _rates(rates: tuple[float, ...]) -> str:
    return ", ".join(f"{rate:.0e}".replace("e-0", "e-") for rate in rates)
