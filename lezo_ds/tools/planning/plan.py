"""How to run a model on given GPUs: what fits, which settings, the command; from the model's config alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lezo_ds.config import (
    TRAINED,
    ZEROTH_ORDER,
    Dtype,
    Method,
    PeftKind,
    RunConfig,
    config_from_dict,
    num_dropped,
)
from lezo_ds.errors import UserError
from lezo_ds.noise import UpdatePrecision
from lezo_ds.recipes.paper import PAPER_SCORES, Experiment, hyperparameters
from lezo_ds.recipes.paper_recipes import paper_recipe, recipe_name
from lezo_ds.sharding.checkpoint_files import load_model_config
from lezo_ds.tasks import get_task
from lezo_ds.tools.benchmark.shapes import TASKS
from lezo_ds.tools.planning.known_models import PUBLISHED, hub_id, published_config, published_name
from lezo_ds.tools.planning.memory import GPU_RESERVE, Memory
from lezo_ds.tools.planning.model_facts import ModelFacts, model_facts
from lezo_ds.tools.planning.run_memory import run_memory, typical_inputs
from lezo_ds.tools.planning.speed import StepWork, step_work

GIB = 1 << 30

_LARGEST_EVAL_BATCH = 16


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        model: hub id, directory, or one of OPT's sizes such as opt-30b.
        num_gpus: number of ranks.
        gpu_bytes: memory of each.
        method: as in a recipe.
        peft: what is trained.
        task: whose inputs are run.
        dtype: of the weights; None for fp16, and bf16 with adamw.
        batch_size: examples of a step; None for the papers'.
        length: of every input in tokens; None for the task's typical length, and in memory more.
        offload: weights are to lie in the host's memory; else they do only where nothing fits without.
        reserve: bytes of each GPU that are not for tensors.
    """

    model: str
    num_gpus: int
    gpu_bytes: int
    method: Method = "lezo"
    peft: PeftKind = "none"
    task: str = "sst2"
    dtype: Dtype | None = None
    batch_size: int | None = None
    length: int | None = None
    offload: bool = False
    reserve: int = GPU_RESERVE


@dataclass(frozen=True)
class Choice:
    """What can be chosen of a run without changing what it is to do.

    Attributes:
        partition_size: ranks that share the weights.
        precision: how updates are stored.
        offload: shards lie in the host's memory.
        micro_batch_size: examples in one forward pass of training.
        eval_batch_size: sequences in one of evaluation.
    """

    partition_size: int
    precision: UpdatePrecision
    offload: bool
    micro_batch_size: int
    eval_batch_size: int


@dataclass(frozen=True)
class Option:
    """One way to run it.

    Attributes:
        config: of the run, with the largest micro-batch that fits, or the smallest there is.
        choice: what in it was chosen.
        memory: of each rank.
        fits: into the memory of a GPU.
        work: of a rank in a step with inputs of typical length; None for methods that are not zeroth-order.
    """

    config: RunConfig
    choice: Choice
    memory: Memory
    fits: bool
    work: StepWork | None


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        request: what was asked.
        model: its facts.
        options: all that were looked at.
        chosen: the best that fits.
    """

    request: Request
    model: ModelFacts
    options: tuple[Option, ...]
    chosen: Option


def make_plan(request: Request) -> Plan:
    """Look at every way to run a model, and choose.

    Of those that fit, updates that keep all bits go before those that round; then the fewest ranks that share
    weights, as what they gather is most of what crosses the network; then the largest micro-batch. Weights
    are offloaded only if nothing fits without.

    Raises:
        UserError: no such model or task, a batch that does not go into the GPUs, or nothing fits.
    """
    get_task(request.task)
    transformers_config = _model_config(request.model)
    first = _config(request, Choice(request.num_gpus, "fp32_master", request.offload, 1, 1))
    peft = first.peft if first.method in TRAINED else None
    model = model_facts(transformers_config, first.model.dtype, peft)
    _check_length(request, model)
    options = _options(request, model, offload=False)
    if request.offload or not any(option.fits for option in options):
        options += _options(request, model, offload=True)
    wanted = [option for option in options if option.choice.offload or not request.offload]
    chosen = next((option for option in wanted if option.fits), None)
    if chosen is None:
        raise _nothing_fits(request, options)
    return Plan(request, model, tuple(options), chosen)


def plan_command(plan: Plan) -> str:
    """Return the command that starts the run, from the root of the repository."""
    request = plan.request
    values = _values(request, plan.chosen.choice)
    cell = _cell(request)
    start = [f"deepspeed --num_gpus {request.num_gpus} launch/train.py"]
    if cell in PAPER_SCORES:
        start.append(f"--config {recipe_name(cell)}")
        recipe = paper_recipe(cell).values
        values = {key: value for key, value in values.items() if _differs(recipe.get(key), value)}
    return " ".join([*start, *(f"{key}={_text(value)}" for key, value in values.items())])


def typical_length(request: Request) -> int:
    """Return the length of an input in tokens, as the request or its task has it."""
    return request.length or TASKS[get_task(request.task).name].length


def _cell(request: Request) -> Experiment:
    """Return the request as an experiment; one of the papers' if the model is one of theirs."""
    model = published_name(request.model) or request.model
    return Experiment(model, get_task(request.task).name, request.method, request.peft)


def _values(request: Request, choice: Choice) -> dict[str, Any]:
    """Return the keys of a run that follow from a request and a choice."""
    cell = _cell(request)
    trained, zeroth_order = request.method in TRAINED, request.method in ZEROTH_ORDER
    parameters = hyperparameters(cell) if trained else None
    path = hub_id(cell.model) if cell.model in PUBLISHED else request.model
    dtype = _dtype(request)
    section = "zo" if zeroth_order else "adamw"
    values: dict[str, Any] = {
        "run_dir": f"runs/{Path(cell.model).name}-{cell.task}-{cell.method}".lower(),
        "method": request.method,
        "model.path": path,
        "model.dtype": dtype,
        "data.task": cell.task,
    }
    if request.peft != "none":
        values["peft.kind"] = request.peft
    if parameters is not None:
        values[f"{section}.learning_rate"] = parameters.learning_rates[0]
        values["train.steps"] = parameters.steps
        values["train.batch_size"] = _batch_size(request)
        values["train.micro_batch_size"] = choice.micro_batch_size
    if parameters is not None and zeroth_order:
        values["zo.perturbation_scale"] = parameters.perturbation_scale
        values["zo.sparsity"] = parameters.sparsity if request.method == "lezo" else None
        values["zo.update_precision"] = choice.precision
    if request.method != "adamw" and choice.partition_size < request.num_gpus:
        values["partition_size"] = choice.partition_size
    values["train.eval_batch_size"] = choice.eval_batch_size
    values["deepspeed"] = _ds_config(dtype, choice.offload)
    return {key: value for key, value in values.items() if value is not None}


def _ds_config(dtype: Dtype, offload: bool) -> str | None:
    if offload:
        return "ds_configs/zero3_cpu_offload.json"
    return None if dtype == "fp32" else f"ds_configs/zero3_{dtype}.json"


def _dtype(request: Request) -> Dtype:
    # Gradients leave the range of fp16 without a loss scale, which bf16 does not need.
    return request.dtype or ("bf16" if request.method == "adamw" else "fp16")


def _batch_size(request: Request) -> int:
    return request.batch_size or hyperparameters(_cell(request)).batch_size


def _differs(written: object, value: object) -> bool:
    """Return whether a value of YAML is another; YAML 1.1 takes 1e-6 for text."""
    if isinstance(value, float) and isinstance(written, str | float | int):
        return float(written) != value
    return written != value


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _config(request: Request, choice: Choice) -> RunConfig:
    return config_from_dict(_values(request, choice), "the plan")


def _model_config(model: str) -> Any:  # noqa: ANN401
    """Return the transformers config of a model; OPT's own are known without the hub."""
    config = published_config(model)
    if config is not None:
        return config
    try:
        return load_model_config(Path(model))
    except UserError as error:
        raise UserError(
            f"there is no model {model} to plan for",
            got=str(error.__cause__).strip().partition("\n")[0],
            expected=f"a directory with a config.json, a hub id, or one of {', '.join(PUBLISHED)}",
            fix="check the name; offline, download its config.json and give its directory",
        ) from error


def _check_length(request: Request, model: ModelFacts) -> None:
    limit = model.max_length
    if request.length is not None and limit is not None and request.length > limit:
        raise UserError(
            "--length is more than the model has positions for",
            got=request.length,
            expected=f"1 to {limit}",
            fix=f"give --length {limit}",
        )


def _options(request: Request, model: ModelFacts, offload: bool) -> list[Option]:
    """Return the options in the order of preference."""
    sixteen_bits = request.method in ZEROTH_ORDER and _dtype(request) != "fp32"
    precisions: tuple[UpdatePrecision, ...] = ("fp32_master",)
    if sixteen_bits and request.peft == "none":
        precisions = ("fp32_master", "stochastic")
    sizes = [size for size in range(1, request.num_gpus + 1) if request.num_gpus % size == 0]
    if request.method == "adamw" or offload:  # a host has room for its model once
        sizes = [request.num_gpus]
    return [
        _option(request, model, precision, size, offload)
        for precision, size in itertools.product(precisions, sizes)
    ]


def _option(
    request: Request, model: ModelFacts, precision: UpdatePrecision, size: int, offload: bool
) -> Option:
    """Return the option with the largest batches that fit, training's first."""
    found = None
    for micro, evaluated in itertools.product(_micro_batch_sizes(request), _eval_batch_sizes()):
        choice = Choice(size, precision, offload, micro, evaluated)
        config = _config(request, choice)
        inputs = typical_inputs(config, model, request.length)
        memory = run_memory(config, model, request.num_gpus, inputs, on_cpu=False, reserve=request.reserve)
        fits = memory.total <= request.gpu_bytes
        found = Option(config, choice, memory, fits, _work(request, model, config, memory))
        if found.fits:
            break
    assert found is not None, "there is a batch size"
    return found


def _micro_batch_sizes(request: Request) -> list[int]:
    """Return the micro-batch sizes that give every rank equally many, the largest first.

    Raises:
        UserError: there is none.
    """
    if request.method not in TRAINED:
        return [1]
    batch, ranks = _batch_size(request), request.num_gpus
    if batch % ranks:
        raise UserError(
            "the batch does not go evenly into the GPUs",
            got=f"{batch} examples, {ranks} GPUs",
            expected=f"a multiple of {ranks}",
            fix=f"give --batch {-(-batch // ranks) * ranks}, or another --gpus",
        )
    return [size for size in range(batch // ranks, 0, -1) if batch // ranks % size == 0]


def _eval_batch_sizes() -> list[int]:
    return [_LARGEST_EVAL_BATCH >> shift for shift in range(_LARGEST_EVAL_BATCH.bit_length())]


def _nothing_fits(request: Request, options: list[Option]) -> UserError:
    least = min(options, key=lambda option: option.memory.total).memory
    limit = f"{request.gpu_bytes / GIB:g} GiB"
    return UserError(
        f"{request.model} does not fit, not even with its weights in the hosts' memory",
        got=f"at least {least.total / GIB:.1f} GiB on each of {request.num_gpus} GPUs: {parts_text(least)}",
        expected=f"at most {limit}",
        fix="more or larger GPUs, a smaller model, or a shorter --length",
    )


def parts_text(memory: Memory) -> str:
    """Return the parts of a rank's memory that are not 0, in GiB."""
    parts = {name.replace("_", " "): size for name, size in memory.parts().items() if size}
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())


def _work(request: Request, model: ModelFacts, config: RunConfig, memory: Memory) -> StepWork | None:
    if request.method not in ZEROTH_ORDER:
        return None
    length = typical_length(request)
    num_examples = config.train.batch_size // request.num_gpus
    return step_work(
        model,
        tokens=num_examples * length,
        length=length,
        num_passes=num_examples // config.train.micro_batch_size,
        kept=1 - num_dropped(config.zo, model.num_blocks) / model.num_blocks,
        partition_size=config.partition_size or request.num_gpus,
        memory=memory,
    )
