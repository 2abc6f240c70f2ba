"""The tables of LeZO (Wang et al. 2024) as data, and the recipe of each of their cells.

LeZO's authors also ran MeZO (Malladi et al. 2023) themselves. A score is an accuracy in percent, or
the token F1 in percent for SQuAD and DROP. An entry 93.0/0.3 is a mean over five seeds with its
deviation, which only people read; 58.8 is the score of a single run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lezo_ds.errors import UserError, did_you_mean


class Experiment(NamedTuple):
    """A cell of the tables: a model, a task, and how the model is tuned.

    Attributes:
        model: Name of a model in the organization facebook of the hub, such as opt-13b.
        task: Name of a task, such as sst2.
        method: lezo, mezo (lezo with sparsity 0), adamw, zero_shot or icl.
        peft: The adapter that is trained: none, lora or prefix.
    """

    model: str
    task: str
    method: str
    peft: str = "none"


_OPT_1_3B = """
task    zero_shot icl  mezo     lezo
sst2    53.6      67.7 89.7/1.3 91.9/0.3
rte     53.4      53.1 65.4/2.5 64.5/2.4
cb      39.3      44.6 69.3/3.0 69.6/1.8
boolq   61.1      67.2 64.1/0.8 65.3/1.2
wsc     43.3      53.8 63.5/0.0 63.3/1.1
wic     57.5      56.0 58.7/0.5 59.4/1.3
multirc 45.4      44.7 60.4/1.5 61.4/1.2
copa    75.0      70.0 76.0/1.9 76.8/2.3
record  70.6      69.9 71.6/0.5 71.7/0.4
squad   27.2      59.0 76.9/0.8 76.8/0.7
drop    11.2      20.3 23.1/0.3 24.1/0.8
"""

_OPT_13B = """
task  zero_shot icl  adamw mezo     lezo     mezo+lora mezo+prefix lezo+lora lezo+prefix
sst2  58.8      87.0 92.0  91.1/0.1 93.0/0.3 90.6/1.6  90.7/0.9    92.3/0.5  92.1/0.7
rte   59.6      62.1 70.8  70.8/1.4 71.4/2.1 -         -           -         -
cb    46.4      57.1 83.9  68.8/1.8 69.2/1.7 70.4/1.6  67.9/2.5    71.1/0.8  69.7/2.5
boolq 59.0      66.9 77.1  69.1/0.6 74.3/0.8 71.8/1.2  73.2/0.4    73.7/0.8  74.5/0.6
wsc   38.5      39.4 63.5  63.5/1.2 62.7/0.4 -         -           -         -
wic   55.0      50.5 70.1  58.7/0.9 60.7/1.5 -         -           -         -
copa  80.0      87.0 79.0  87.0/1.6 87.2/0.8 86.0/1.2  87.4/1.7    86.4/1.5  87.6/1.1
squad 46.2      75.9 84.9  84.2/1.0 84.3/0.7 81.1/0.8  83.3/1.0    81.5/1.1  83.1/0.4
"""

_OPT_30B = """
task  zero_shot icl  mezo     lezo
sst2  56.7      81.9 90.3/0.5 92.8/0.6
boolq 39.1      66.2 69.5/0.4 73.7/0.9
"""


def _read_table(model: str, table: str) -> dict[Experiment, float]:
    header, *rows = [line.split() for line in table.strip().splitlines()]
    scores = {}
    for task, *entries in rows:
        for column, entry in zip(header[1:], entries, strict=True):
            if entry == "-":
                continue
            method, _, peft = column.partition("+")
            mean = entry.partition("/")[0]
            scores[Experiment(model, task, method, peft or "none")] = float(mean)
    return scores


PAPER_SCORES: Mapping[Experiment, float] = {
    **_read_table("opt-1.3b", _OPT_1_3B),
    **_read_table("opt-13b", _OPT_13B),
    **_read_table("opt-30b", _OPT_30B),
}
"""The score of each cell, in percent."""

LEARNING_RATES: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("lezo", "none"): {"": 1e-6, "opt-1.3b": 3e-6},
    ("mezo", "none"): {"": 1e-6},
    ("lezo", "prefix"): {"": 3e-2},
    ("mezo", "prefix"): {"": 1e-2, "squad": 5e-2},
    ("lezo", "lora"): {"": 3e-5},
    ("mezo", "lora"): {"": 1e-4},
    ("adamw", "none"): {"": 1e-5},
}
"""The first of the learning rates that the paper searched, by method and adapter.

They are under "", or under the name of a task or a model that has its own.
"""

_PERTURBATION_SCALES = {"none": 1e-3, "prefix": 1e-1, "lora": 1e-2}
_SPARSITIES = {"none": 0.75, "prefix": 0.75, "lora": 0.5}

# Tasks with inputs of hundreds of tokens. Those of the others have tens.
_LONG_INPUTS = {"boolq", "multirc", "record", "squad", "drop"}

# Training examples of tasks that have fewer than MeZO's 1000.
_NUM_TRAIN = {"cb": 150, "wsc": 54, "copa": 300}


def paper_recipe(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe of a cell of the tables, and the words that do not name the cell.

    The learning rate is the first that the paper lists. The micro-batches are for one GPU of 16 GB
    or more with OPT-1.3b, for two of the type A100-40G with the others, and for eight of 80 GB with
    AdamW. No recipe has been run on the paper's models.

    Args:
        words: `model=`, `task=`, `method=` and, for an adapter, `peft=` name the cell.

    Raises:
        UserError: A word is missing, or the tables have no such cell.
    """
    cell, others = _find_cell(words)
    # Gradients leave the range of fp16 without a loss scale; bf16 needs none.
    dtype = "bf16" if cell.method == "adamw" else "fp16"
    is_long = cell.task in _LONG_INPUTS
    eval_batch_size = 4 if is_long else 16
    if cell.method == "icl":  # 32 demonstrations fill most of 2048 tokens
        eval_batch_size = 2
    recipe: dict[str, Any] = {
        "run_dir": "runs/" + "-".join(cell).removesuffix("-none"),
        "method": "lezo" if cell.method == "mezo" else cell.method,
        "model": {"path": f"facebook/{cell.model}", "dtype": dtype},
        "data": {"task": cell.task, "protocol": "mezo"},
        "peft": {"kind": cell.peft},
        "train": {"eval_batch_size": eval_batch_size},
        "deepspeed": f"zero3_{dtype}",
    }
    rates = LEARNING_RATES.get((cell.method, cell.peft))
    if rates is None:  # nothing is trained
        return recipe, others
    rate = rates.get(cell.task) or rates.get(cell.model) or rates[""]
    if cell.method == "adamw":
        recipe["adamw"] = {"learning_rate": rate}
        five_epochs = 5 * _NUM_TRAIN.get(cell.task, 1000)
        recipe["train"] |= {"steps": five_epochs // 8, "batch_size": 8, "micro_batch_size": 1}
        return recipe, others
    # The low bits of fp32_master are 60 GB more for OPT-30b, which two A100-40G do not hold.
    is_tight = (cell.model, cell.task) == ("opt-30b", "sst2")
    recipe["zo"] = {
        "learning_rate": rate,
        "perturbation_scale": _PERTURBATION_SCALES[cell.peft],
        "sparsity": _SPARSITIES[cell.peft] if cell.method == "lezo" else 0,
        "update_precision": "stochastic" if is_tight else "fp32_master",
    }
    micro_batch_size = 16 if cell.model == "opt-1.3b" else 8
    if is_long:
        micro_batch_size = 4
    recipe["train"] |= {
        "steps": 20_000,
        "batch_size": 16,
        "micro_batch_size": micro_batch_size,
    }
    return recipe, others


def _find_cell(words: Sequence[str]) -> tuple[Experiment, list[str]]:
    named = {}
    others = []
    for word in words:
        name, _, value = word.partition("=")
        if name in Experiment._fields:
            named[name] = value
        else:
            others.append(word)
    missing = {"model", "task", "method"} - named.keys()
    if missing:
        raise UserError(
            f"--config paper needs {', '.join(sorted(missing))}",
            fix="write it like --config paper model=opt-13b task=sst2 method=lezo",
        )
    cell = Experiment(**named)
    if cell not in PAPER_SCORES:
        fix = did_you_mean(" ".join(cell), map(" ".join, PAPER_SCORES), "choose one of their cells")
        raise UserError(f"the paper's tables have no {' '.join(cell)}", fix=fix)
    return cell, others
