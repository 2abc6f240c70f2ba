"""The recipes of the paper's tables, as YAML to read: hyperparameters, and hardware they fit."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

from lezo_ds.config import TRAINED, ZEROTH_ORDER
from lezo_ds.errors import UserError
from lezo_ds.files import write_atomically
from lezo_ds.recipes.paper import MODELS, SCORES, TASKS, Cell, Hyperparameters, hyperparameters
from lezo_ds.tasks import get_task
from lezo_ds.zo.layers import num_dropped_from_sparsity

RECIPES = Path("launch/recipes")

_LONG_INPUTS = frozenset({"boolq", "multirc", "record", "squad", "drop"})
"""Tasks whose inputs hold a passage: hundreds of tokens, where the others have tens."""

_LARGEST_LONG_BATCH = 4
_FULL_SHARE = 0.75  # of a GPU's memory for weights; the rest is for activations and one gathered block
_ADAMW_BYTES = 16  # weights and gradients in bf16; weights and two moments in fp32
_WIDTH = 100

_METHOD_TITLES = {
    "zero_shot": "Zero-shot",
    "icl": "In-context learning with 32 demonstrations",
    "adamw": "Fine-tuning with AdamW",
    "mezo": "MeZO (Malladi et al. 2023)",
    "lezo": "LeZO (Wang et al. 2024)",
}
_PEFT_TITLES = {"none": "", "lora": " with LoRA", "prefix": " with prefix tuning"}
_SOURCES = {
    "zero_shot": "as LeZO's authors report it",
    "icl": "as LeZO's authors report it",
    "adamw": "as LeZO's authors report it",
    "mezo": "MeZO's, reproduced by LeZO's authors, mean and deviation over five seeds",
    "lezo": "LeZO's mean and deviation over five seeds",
}


@dataclass(frozen=True)
class _Hardware:
    """What a recipe is written for; it has not been run there.

    Attributes:
        gpus: their number and kind, in words.
        num_gpus: number of ranks.
        gigabytes: memory of each, in 10**9 bytes.
    """

    gpus: str
    num_gpus: int
    gigabytes: int


def recipe_name(cell: Cell) -> str:
    """Return the name of a cell's recipe, and of its run.

    >>> recipe_name(Cell("opt-13b", "sst2", "lezo", "lora"))
    'opt-13b-sst2-lezo-lora'
    """
    peft = "" if cell.peft == "none" else f"-{cell.peft}"
    return f"{cell.model}-{cell.task}-{cell.method.replace('_', '-')}{peft}"


def recipe_text(cell: Cell) -> str:
    """Return the recipe of a cell of the paper's tables: a head with what it needs and gives, and YAML."""
    hardware = _hardware(cell)
    sections = [
        [f"run_dir: runs/{recipe_name(cell)}", "seed: 0", f"method: {cell.method}"],
        ["model:", f"  path: facebook/{cell.model}", f"  dtype: {_dtype(cell)}"],
        _data_section(cell),
    ]
    if cell.peft != "none":
        sections.append(_peft_section(cell))
    if cell.method in TRAINED:
        parameters = hyperparameters(cell)
        sections.append(_optimizer_section(cell, parameters, hardware))
        sections.append(_train_section(cell, parameters, hardware))
    else:
        sections.append(["train:", f"  eval_batch_size: {_eval_batch_size(cell)}"])
    sections.append([f"deepspeed: ds_configs/zero3_{_dtype(cell)}.json"])
    return (
        "\n\n".join("\n".join(section) for section in [_head(cell, hardware) + sections[0], *sections[1:]])
        + "\n"
    )


def write_recipes(directory: Path) -> int:
    """Write the recipe of every cell of the paper's tables; return how many there are.

    Raises:
        UserError: the directory is not there.
    """
    if not directory.is_dir():
        raise UserError(
            "the directory of the recipes does not exist",
            got=str(directory),
            expected="a directory, such as launch/recipes in the root of the repository",
            fix="change to the root of the repository, or make the directory",
        )
    for cell in SCORES:
        write_atomically(directory / f"{recipe_name(cell)}.yaml", recipe_text(cell))
    return len(SCORES)


def _hardware(cell: Cell) -> _Hardware:
    if cell.method == "adamw":
        return _Hardware("eight GPUs of 80 GB", 8, 80)
    if cell.model == "opt-1.3b":
        return _Hardware("one GPU of 16 GB or more (the paper does not name the one it used)", 1, 16)
    if cell.model == "opt-13b":
        return _Hardware("two A100-40G (the paper does not name the ones it used)", 2, 40)
    if cell.task == "boolq":
        return _Hardware("four A100-40G, as in the paper", 4, 40)
    return _Hardware("two A100-40G, as in the paper", 2, 40)


def _dtype(cell: Cell) -> str:
    # Gradients leave the range of fp16 without a loss scale, which bf16 does not need.
    return "bf16" if cell.method == "adamw" else "fp16"


def _low_bits_fit(cell: Cell, hardware: _Hardware) -> bool:
    """Return whether fp32_master's 4 bytes a parameter leave room beside them."""
    gigabytes = 4e-9 * MODELS[cell.model].num_parameters / hardware.num_gpus
    return cell.peft != "none" or gigabytes <= _FULL_SHARE * hardware.gigabytes


def _micro_batch_size(cell: Cell, batch_size: int, hardware: _Hardware) -> int:
    share = batch_size // hardware.num_gpus
    return min(share, _LARGEST_LONG_BATCH) if cell.task in _LONG_INPUTS else share


def _eval_batch_size(cell: Cell) -> int:
    if cell.method == "icl":
        return 2  # 32 demonstrations fill most of 2048 tokens
    return _LARGEST_LONG_BATCH if cell.task in _LONG_INPUTS else 16


def _head(cell: Cell, hardware: _Hardware) -> list[str]:
    name = recipe_name(cell)
    title = f"{_METHOD_TITLES[cell.method]}{_PEFT_TITLES[cell.peft]} on {TASKS[cell.task].title}"
    command = f"deepspeed --num_gpus {hardware.num_gpus} launch/train.py --config {RECIPES / name}.yaml"
    lines = [
        f"# {title} with {cell.model.replace('opt', 'OPT')}.",
        "# Written by launch/make_recipes.py from lezo_ds/recipes/paper.py; change a value by key=value.",
        "#",
        f"# Command:  {command}",
        "#           from the root of the repository.",
    ]
    if cell.method in ZEROTH_ORDER:
        again = f"seed=1 data.seed=1 run_dir=runs/{name}-seed-1"
        lines += _entry("Seeds", f"the paper reports five; for the second add {again}")
    lines += _entry("Hardware", f"{hardware.gpus}.")
    lines += _entry("", f"Memory: {_memory(cell, hardware)}.")
    lines += _entry("Expected", _expected(cell))
    return lines + _entry("Time", "not known: we have NOT run this recipe on this hardware.")


def _entry(name: str, text: str) -> list[str]:
    first = f"# {name + ':' if name else '':10}"
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=f"# {'':10}", break_on_hyphens=False
    )


def _memory(cell: Cell, hardware: _Hardware) -> str:
    billions, num_gpus = MODELS[cell.model].num_parameters * 1e-9, hardware.num_gpus
    number_words = {2: "two", 4: "four", 8: "eight"}
    where = f" on each of the {number_words[num_gpus]}" if num_gpus > 1 else ""
    if cell.method == "adamw":
        parts = "weights and gradients in bf16; weights and two moments in fp32"
        total = f"{_ADAMW_BYTES * billions / num_gpus:.1f} GB{where}"
        return f"{total} ({_ADAMW_BYTES} bytes a parameter: {parts}), beside activations"
    weights = f"{2 * billions / num_gpus:.1f} GB of fp16 weights"
    if cell.method not in ZEROTH_ORDER:
        return f"{weights}{where}, beside one layer's activations"
    if cell.peft != "none":
        return f"{weights}{where}, beside one layer's activations; what is tuned is small"
    if _low_bits_fit(cell, hardware):
        return f"{weights} and as much of low bits (fp32_master){where}, beside one layer's activations"
    return f"{weights}{where}; the low bits of fp32_master would not fit beside them"


def _expected(cell: Cell) -> str:
    score, before = SCORES[cell], SCORES[Cell(cell.model, cell.task, "zero_shot")]
    metric = {"accuracy": "accuracy", "f1": "token F1"}[get_task(cell.task).metric]
    deviation = "" if score.deviation is None else f" +- {score.deviation}"
    zero_shot = "" if cell.method == "zero_shot" else f"; zero-shot {before.mean}%"
    text = f"test {metric} {score.mean}{deviation}% ({_SOURCES[cell.method]}{zero_shot})."
    if cell.method not in TRAINED:
        return text
    searched = _searched(hyperparameters(cell))
    return (
        f"{text} The paper searched learning rates {searched} and does not say which was best for this task."
    )


def _data_section(cell: Cell) -> list[str]:
    task = TASKS[cell.task]
    sizes = f"{task.num_train} training, {task.num_dev} validation and {task.num_test} test examples"
    lines = ["data:", f"  task: {cell.task}", f"  protocol: mezo  # {sizes}"]
    if cell.method == "icl":
        lines.append("  num_demonstrations: 32")
    return lines


def _peft_section(cell: Cell) -> list[str]:
    lines = ["peft:", f"  kind: {cell.peft}"]
    if cell.peft == "lora":
        return [*lines, "  lora_rank: 8", "  lora_alpha: 16", "  lora_targets: q_proj,v_proj"]
    return [*lines, "  prefix_length: 5"]


def _optimizer_section(cell: Cell, parameters: Hyperparameters, hardware: _Hardware) -> list[str]:
    rate = f"  learning_rate: {_number(parameters.learning_rates[0])}  # searched: {_searched(parameters)}"
    if cell.method == "adamw":
        return ["adamw:", rate, "  weight_decay: 0", f"  epochs: {parameters.epochs}"]
    assert parameters.perturbation_scale is not None
    lines = ["zo:", rate, f"  perturbation_scale: {_number(parameters.perturbation_scale)}"]
    if cell.method == "lezo":
        assert parameters.sparsity is not None
        num_blocks = MODELS[cell.model].num_blocks
        dropped = num_dropped_from_sparsity(parameters.sparsity, num_blocks)
        lines.append(
            f"  sparsity: {parameters.sparsity}  # {dropped} of {num_blocks} blocks are left out of a step"
        )
    if _low_bits_fit(cell, hardware):
        return [*lines, "  update_precision: fp32_master"]
    more = f"{2e-9 * MODELS[cell.model].num_parameters:.0f} GB more, over all ranks"
    return [*lines, f"  update_precision: stochastic  # fp32_master needs {more}"]


def _train_section(cell: Cell, parameters: Hyperparameters, hardware: _Hardware) -> list[str]:
    micro = _micro_batch_size(cell, parameters.batch_size, hardware)
    number = parameters.batch_size // micro
    note = "" if number == 1 else f"  # {number} micro-batches, {number // hardware.num_gpus} for each GPU"
    lines = ["train:"] + ([f"  steps: {parameters.steps}"] if parameters.steps is not None else [])
    lines += [f"  batch_size: {parameters.batch_size}", f"  micro_batch_size: {micro}{note}"]
    lines.append(f"  eval_batch_size: {_eval_batch_size(cell)}")
    if parameters.steps is None:
        return lines  # a tenth of the run is the default
    return [*lines, f"  eval_every: {parameters.steps // 10}"]


def _searched(parameters: Hyperparameters) -> str:
    return "{" + ", ".join(map(_number, parameters.learning_rates)) + "}"


def _number(value: float) -> str:
    """Write a number of one digit as the paper does.

    >>> _number(7e-7)
    '7e-7'
    """
    return f"{value:.0e}".replace("e-0", "e-")
