"""LeZO's experiments as data: every cell of its tables, and its hyperparameters (Wang et al. 2024).

The rows of MeZO (Malladi et al. 2023) were reproduced by LeZO's authors. Scores are accuracies in percent,
and token F1 in percent for SQuAD and DROP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from lezo_ds.config import PeftKind


@dataclass(frozen=True)
class Experiment:
    """One experiment: a model (such as opt-13b), a task, and how it is tuned."""

    model: str
    task: str
    method: str
    peft: PeftKind = "none"


@dataclass(frozen=True)
class Score:
    """Mean and sample standard deviation over seeds, in percent; a single run has no deviation."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class PaperModel:
    """Size of a model. The tied embedding and head are counted once."""

    num_blocks: int
    num_parameters: int


@dataclass(frozen=True)
class PaperTask:
    """Title of a task in the tables, and its numbers of examples with MeZO's protocol.

    WSC has 54 training examples because 500 of its 554 records are used for validation.
    """

    title: str
    num_train: int
    num_dev: int
    num_test: int


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of an experiment; weight decay is 0 everywhere.

    Attributes:
        learning_rates: all that were searched, in the paper's order.
        batch_size: number of examples in a step.
        perturbation_scale: "eps" in the paper's table; None for AdamW.
        sparsity: share of the transformer blocks that a step drops, 0 for MeZO; None for AdamW.
        steps: number of steps; None for AdamW.
        epochs: number of epochs of AdamW, whose learning rate falls linearly; None for the other methods,
            whose learning rate is constant.
    """

    learning_rates: tuple[float, ...]
    batch_size: int = 16
    perturbation_scale: float | None = None
    sparsity: float | None = None
    steps: int | None = None
    epochs: int | None = None


PAPER_MODELS: Mapping[str, PaperModel] = {
    "opt-1.3b": PaperModel(num_blocks=24, num_parameters=1_315_758_080),
    "opt-13b": PaperModel(num_blocks=40, num_parameters=12_853_473_280),
    "opt-30b": PaperModel(num_blocks=48, num_parameters=29_974_540_288),
}

PAPER_TASKS: Mapping[str, PaperTask] = {
    "sst2": PaperTask("SST-2", 1000, 500, 872),
    "rte": PaperTask("RTE", 1000, 500, 277),
    "cb": PaperTask("CB", 150, 100, 56),
    "boolq": PaperTask("BoolQ", 1000, 500, 1000),
    "wsc": PaperTask("WSC", 54, 500, 104),
    "wic": PaperTask("WiC", 1000, 500, 638),
    "multirc": PaperTask("MultiRC", 1000, 500, 1000),
    "copa": PaperTask("COPA", 300, 100, 100),
    "record": PaperTask("ReCoRD", 1000, 500, 1000),
    "squad": PaperTask("SQuAD", 1000, 500, 1000),
    "drop": PaperTask("DROP", 1000, 500, 1000),
}
"""In the order of the tables' columns."""

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


def _read_table(model: str, text: str) -> dict[Experiment, Score]:
    header, *rows = (line.split() for line in text.strip().splitlines())
    scores = {}
    for name, *entries in rows:
        method, _, peft = name.partition("+")
        for task, entry in zip(header, entries, strict=True):
            if entry != "-":
                experiment = Experiment(model, task, method, cast("PeftKind", peft or "none"))
                scores[experiment] = Score(*map(float, entry.split("/")))
    return scores


PAPER_SCORES: Mapping[Experiment, Score] = {
    **_read_table("opt-1.3b", _OPT_1_3B),
    **_read_table("opt-13b", _OPT_13B),
    **_read_table("opt-30b", _OPT_30B),
}
"""Every cell of the paper's tables, with its score."""

_LEARNING_RATES: Mapping[tuple[str, PeftKind], Mapping[str, tuple[float, ...]]] = {
    ("lezo", "none"): {"": (1e-6, 7e-7), "opt-1.3b": (3e-6, 1e-6)},
    ("mezo", "none"): {"": (1e-6, 1e-7), "rte": (1e-6, 5e-7, 1e-7), "squad": (1e-6, 5e-7, 1e-7)},
    ("lezo", "prefix"): {"": (3e-2, 1e-2)},
    ("mezo", "prefix"): {"": (1e-2, 1e-3), "squad": (5e-2, 1e-2, 5e-3)},
    ("lezo", "lora"): {"": (3e-5, 5e-5, 7e-5)},
    ("mezo", "lora"): {"": (1e-4, 5e-5), "squad": (1e-4, 5e-5, 1e-5)},
    ("adamw", "none"): {"": (1e-5, 5e-5, 8e-5)},
}
"""The learning rates that were searched: under "", and under a task or model that has its own."""

_PERTURBATION_SCALES: Mapping[PeftKind, float] = {"none": 1e-3, "prefix": 1e-1, "lora": 1e-2}
_SPARSITIES: Mapping[PeftKind, float] = {"none": 0.75, "prefix": 0.75, "lora": 0.5}


def hyperparameters(experiment: Experiment) -> Hyperparameters:
    """Return the hyperparameters of an experiment that trains.

    >>> hyperparameters(Experiment("opt-1.3b", "sst2", "lezo")).learning_rates
    (3e-06, 1e-06)
    """
    rates = _LEARNING_RATES[experiment.method, experiment.peft]
    searched = rates.get(experiment.task) or rates.get(experiment.model) or rates[""]
    if experiment.method == "adamw":
        return Hyperparameters(searched, batch_size=8, epochs=5)
    return Hyperparameters(
        searched,
        perturbation_scale=_PERTURBATION_SCALES[experiment.peft],
        sparsity=_SPARSITIES[experiment.peft] if experiment.method == "lezo" else 0.0,
        steps=20_000,
    )
