"""Names of models and experiments; the runs of one experiment differ only in their seeds."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lezo_ds.config import paper
from lezo_ds.tools.reports.results_table import RATES, SEEDS, best_setting, over_seeds, settings_columns

_METHODS = {
    "zero_shot": "zero-shot",
    "zero_shot_sfc": "zero-shot SFC",
    "icl": "ICL",
    "icl_sfc": "ICL SFC",
    "adamw": "FT (AdamW)",
    "mezo": "MeZO",
    "lezo": "LeZO",
}
_ADAPTERS = {"none": "", "lora": " LoRA", "prefix": " prefix"}
_ORDER = {name: place for names in (_METHODS, _ADAPTERS) for place, name in enumerate(names)}

MAX_SETTINGS = 8
"""Number of experiments on a task above which a report shows only the best learning rate of each method."""

_LONGEST_SETTING = 60


def name_experiments(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with names to show, in the order of the paper's rows.

    Args:
        runs: of `read_runs`; each row has a configuration.

    Returns:
        The same columns, with `model` shortened where that is clear (a model of the paper has the paper's
        name), and `task` followed by the metric where runs on it have several; and with title: method and
        adapter, such as "LeZO LoRA"; setting: the title and what else tells apart the experiments on one
        task, such as "LeZO, sparsity=0.5". Where that gets long, it is the name of the folder around the
        directories of the experiment's runs, if each experiment has its own, as in a study.
    """
    runs = runs.sort_values(
        ["peft", "method", "sparsity", "learning_rate"],
        key=lambda column: column if column.dtype == float else column.map(_ORDER),
        kind="stable",
    )
    names = runs["model"].map(lambda path: Path(path).name).astype("str")
    is_clear = runs["model"].groupby(names).transform("nunique") == 1
    is_paper = names.str.lower().isin(paper.PAPER_MODELS)
    num_metrics = runs.groupby(["model", "task"])["metric"].transform("nunique")
    is_apart = (num_metrics > 1) & runs["metric"].notna()
    runs = runs.assign(
        model=names.str.lower().where(is_paper, names.where(is_clear, runs["model"])),
        task=runs["task"].where(
            ~is_apart, runs["task"].astype("str") + " (" + runs["metric"].astype("str") + ")"
        ),
        title=runs["method"].replace(_METHODS) + runs["peft"].replace(_ADAPTERS),
    )
    settings = [_settings(group) for _, group in runs.groupby(["model", "title"], sort=False)]
    runs = runs.assign(setting=pd.concat(settings) if settings else None)
    return runs.assign(setting=_shortened(runs)) if len(runs) else runs


def drop_repeats(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the runs without those that repeat another finished run, and a warning for each of these."""
    done = runs[runs["finished"]]
    repeats = done[done.duplicated(["model", "task", "method", *settings_columns(runs), *SEEDS])]
    reason = "it has the settings and seeds of another run"
    return runs.drop(repeats.index), [f"left out: {path}: {reason}" for path in repeats["directory"]]


def best_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs without those at poor learning rates, if there are too many experiments to show.

    If a task has more than `MAX_SETTINGS`, only the best rate of each method is kept: the one with the lowest
    mean validation loss, of those that were run with the most seeds. Where no finished run has a validation
    loss, all rates are kept.

    Args:
        runs: of `name_experiments`, finished or not.
    """
    if runs.empty or runs.groupby(["model", "task"])["setting"].nunique().max() <= MAX_SETTINGS:
        return runs
    kept = []
    keys = ["model", "task", "method", *(name for name in settings_columns(runs) if name not in RATES)]
    for _, group in runs.groupby(keys, sort=False, dropna=False):
        rates = over_seeds(group[group["finished"]], RATES)
        best = best_setting(rates[rates["finished"] == rates["finished"].max()])
        is_best = pd.Series(True, group.index)
        for name in RATES if best is not None else []:
            is_best &= group[name].eq(rates.loc[best, name]) | group[name].isna()
        kept.append(group[is_best])
    return name_experiments(pd.concat(kept))


def task_title(task: str) -> str:
    """Return how the paper's tables write a task; the name itself for a task that they lack."""
    return paper.PAPER_TASKS[task].title if task in paper.PAPER_TASKS else task


def values_text(run: pd.Series, keys: list[str]) -> str:
    """Return config values of a run as "key=value, ...", without sections and missing values."""
    known = {key.rpartition(".")[2]: run[key] for key in keys if pd.notna(run[key])}
    return ", ".join(f"{k}={v:g}" if isinstance(v, int | float) else f"{k}={v}" for k, v in known.items())


def _settings(group: pd.DataFrame) -> pd.Series:
    """Return the name of each run's experiment among those of one model and title."""
    counts = group.groupby("task")[settings_columns(group)].nunique(dropna=False)
    varying = list(counts.columns[(counts > 1).any()])
    for rate in [name for name in RATES if name in varying]:
        # The other settings may tell which rate was used.
        others = ["task", *(name for name in varying if name != rate)]
        if group.groupby(others, dropna=False)[rate].nunique(dropna=False).max() == 1:
            varying.remove(rate)
    values = group.apply(values_text, axis=1, keys=varying)
    return group["title"] + values.where(values == "", ", " + values)


def _shortened(runs: pd.DataFrame) -> pd.Series:
    """Return the names of the runs' experiments, or those of their folders (see `name_experiments`)."""
    folders = runs["directory"].map(lambda directory: Path(directory).absolute().parent.name)
    pairs = pd.DataFrame({"setting": runs["setting"], "folder": folders}).drop_duplicates()
    is_long = runs["setting"].str.len().max() > _LONGEST_SETTING
    have_folders = pairs["setting"].is_unique and pairs["folder"].is_unique
    return folders if is_long and have_folders else runs["setting"]
