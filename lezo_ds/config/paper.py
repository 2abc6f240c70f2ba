"""The tables of LeZO (Wang et al. 2024) as data, and the recipe of each of their cells.

The rows of MeZO (Malladi et al. 2023) were reproduced by LeZO's authors. Scores are accuracies in percent,
and token F1 in percent for SQuAD and DROP: a mean over five seeds with its deviation, or of a single run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lezo_ds.errors import UserError, did_you_mean


class Experiment(NamedTuple):
    """A cell: a model, a task, and how the model is tuned (method mezo is lezo with sparsity 0)."""

    model: str
    task: str
    method: str
    peft: str = "none"


_NUM_GPUS = {"opt-1.3b": 1, "opt-13b": 2, "opt-30b": 2}  # of 16 GB or more; A100-40G for the others
_NUM_TRAIN = {
    "cb": 150,
    "wsc": 54,
    "copa": 300,
}  # examples of MeZO's protocol; 1000 for the other tasks

_OPT_13B = """
            sst2     rte      cb       boolq    wsc      wic      copa     squad
zero_shot   58.8     59.6     46.4     59.0     38.5     55.0     80.0     46.2
icl         87.0     62.1     57.1     66.9     39.4     50.5     87.0     75.9
adamw       92.0     70.8     83.9     77.1     63.5     70.1     79.0     84.9
mezo        91.1/0.1 70.8/1.4 68.8/1.8 69.1/0.6 63.5/1.2 58.7/0.9 87.0/1.6 84.2/1.0
lezo        93.0/0.3 71.4/2.1 69.2/1.7 74.3/0.8 62.7/0.4 60.7/1.5 87.2/0.8 84.3/0.7
mezo+lora   90.6/1.6 -        70.4/1.6 71.8/1.2 -        -        86.0/1.2 81.1/0.8
mezo+prefix 90.7/0.9 -        67.9/2.5 73.2/0.4 -        -        87.4/1.7 83.3/1.0
lezo+lora   92.3/0.5 -        71.1/0.8 73.7/0.8 -        -        86.4/1.5 81.5/1.1
lezo+prefix 92.1/0.7 -        69.7/2.5 74.5/0.6 -        -        87.6/1.1 83.1/0.4
"""

_OPT_1_3B = """
          sst2     rte      cb       boolq    wsc      wic      multirc  copa     record   squad    drop
zero_shot 53.6     53.4     39.3     61.1     43.3     57.5     45.4     75.0     70.6     27.2     11.2
icl       67.7     53.1     44.6     67.2     53.8     56.0     44.7     70.0     69.9     59.0     20.3
mezo      89.7/1.3 65.4/2.5 69.3/3.0 64.1/0.8 63.5/0.0 58.7/0.5 60.4/1.5 76.0/1.9 71.6/0.5 76.9/0.8 23.1/0.3
lezo      91.9/0.3 64.5/2.4 69.6/1.8 65.3/1.2 63.3/1.1 59.4/1.3 61.4/1.2 76.8/2.3 71.7/0.4 76.8/0.7 24.1/0.8
"""

_OPT_30B = """
          sst2     boolq
zero_shot 56.7     39.1
icl       81.9     66.2
mezo      90.3/0.5 69.5/0.4
lezo      92.8/0.6 73.7/0.9
"""


def _read_table(model: str, text: str) -> dict[Experiment, float]:
    header, *rows = (line.split() for line in text.strip().splitlines())
    scores = {}
    for name, *entries in rows:
        method, _, peft = name.partition("+")
        for task, entry in zip(header, entries, strict=True):
            if entry != "-":
                scores[Experiment(model, task, method, peft or "none")] = float(
                    entry.partition("/")[0]
                )
    return scores


PAPER_SCORES: Mapping[Experiment, float] = {
    **_read_table("opt-1.3b", _OPT_1_3B),
    **_read_table("opt-13b", _OPT_13B),
    **_read_table("opt-30b", _OPT_30B),
}

LEARNING_RATES: Mapping[tuple[str, str], Mapping[str, tuple[float, ...]]] = {
    ("lezo", "none"): {"": (1e-6, 7e-7), "opt-1.3b": (3e-6, 1e-6)},
    ("mezo", "none"): {"": (1e-6, 1e-7), "rte": (1e-6, 5e-7, 1e-7), "squad": (1e-6, 5e-7, 1e-7)},
    ("lezo", "prefix"): {"": (3e-2, 1e-2)},
    ("mezo", "prefix"): {"": (1e-2, 1e-3), "squad": (5e-2, 1e-2, 5e-3)},
    ("lezo", "lora"): {"": (3e-5, 5e-5, 7e-5)},
    ("mezo", "lora"): {"": (1e-4, 5e-5), "squad": (1e-4, 5e-5, 1e-5)},
    ("adamw", "none"): {"": (1e-5, 5e-5, 8e-5)},
}
"""The learning rates that were searched: under "", and under a task or model that has its own."""

_PERTURBATION_SCALES = {"none": 1e-3, "prefix": 1e-1, "lora": 1e-2}
_SPARSITIES = {"none": 0.75, "prefix": 0.75, "lora": 0.5}
_LONG_INPUTS = {
    "boolq",
    "multirc",
    "record",
    "squad",
    "drop",
}  # hundreds of tokens; the others have tens


def paper_recipe(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe of the cell that `model= task= method= [peft=]` name, and the other words.

    The learning rate is the first that the paper lists. No recipe has been run on the paper's models.
    """
    named = dict(
        word.split("=", 1) for word in words if word.partition("=")[0] in Experiment._fields
    )
    others = [word for word in words if word.partition("=")[0] not in Experiment._fields]
    if missing := {"model", "task", "method"} - named.keys():
        example = "--config paper model=opt-13b task=sst2 method=lezo"
        raise UserError(
            f"--config paper needs {', '.join(sorted(missing))}", fix=f"write it like {example}"
        )
    cell = Experiment(**named)
    if cell not in PAPER_SCORES:
        fix = did_you_mean(" ".join(cell), map(" ".join, PAPER_SCORES), "choose one of their cells")
        raise UserError(f"the paper's tables have no {' '.join(cell)}", fix=fix)
    is_long, trains = cell.task in _LONG_INPUTS, (cell.method, cell.peft) in LEARNING_RATES
    # Gradients leave the range of fp16 without a loss scale; bf16 needs none.
    dtype = "bf16" if cell.method == "adamw" else "fp16"
    recipe: dict[str, Any] = {
        "run_dir": "runs/" + "-".join(cell).removesuffix("-none"),
        "method": "lezo" if cell.method == "mezo" else cell.method,
        "model": {"path": f"facebook/{cell.model}", "dtype": dtype},
        "data": {"task": cell.task, "protocol": "mezo"},
        "peft": {"kind": cell.peft},
        # 32 demonstrations fill most of 2048 tokens.
        "train": {"eval_batch_size": 2 if cell.method == "icl" else 4 if is_long else 16},
        "deepspeed": f"zero3_{dtype}",
    }
    if not trains:
        return recipe, others
    by_name = LEARNING_RATES[cell.method, cell.peft]
    rate = (by_name.get(cell.task) or by_name.get(cell.model) or by_name[""])[0]
    if cell.method == "adamw":  # five epochs, on eight GPUs of 80 GB
        steps, batch_size, num_gpus = 5 * _NUM_TRAIN.get(cell.task, 1000) // 8, 8, 8
        recipe["adamw"] = {"learning_rate": rate}
    else:
        steps, batch_size = 20_000, 16
        num_gpus = 4 if (cell.model, cell.task) == ("opt-30b", "boolq") else _NUM_GPUS[cell.model]
        recipe["zo"] = {
            "learning_rate": rate,
            "perturbation_scale": _PERTURBATION_SCALES[cell.peft],
            "sparsity": _SPARSITIES[cell.peft] if cell.method == "lezo" else 0,
            # The low bits of fp32_master are 60 GB more for OPT-30b, which two A100-40G do not hold.
            "update_precision": "stochastic" if cell[:2] == ("opt-30b", "sst2") else "fp32_master",
        }
    micro = batch_size // num_gpus
    recipe["train"] |= {"steps": steps, "eval_every": max(1, steps // 10), "batch_size": batch_size}
    recipe["train"]["micro_batch_size"] = min(micro, 4) if is_long else micro
    return recipe, others
