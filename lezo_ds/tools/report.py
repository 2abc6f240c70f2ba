"""Runs as a table with a row for each experiment, averaged over seeds, and as one HTML page with curves."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from lezo_ds.config import RESUME_MAY_DIFFER, config_from_dict, config_to_dict, flatten, load_yaml
from lezo_ds.config.paper import PAPER_SCORES, Experiment
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, write_atomically
from lezo_ds.tasks.custom import CUSTOM
from lezo_ds.tasks.metrics import REWARD

SEEDS = ["seed", "data.seed"]  # in which the repetitions of one experiment differ
MEASURED = ["test", "zero_shot", "majority_class", "best_dev_loss", "best_step", "steps", "seconds"]
MEASURED += ["trained_dev_loss", "peak_memory_bytes"]  # numbers of results.json
_COLUMNS = ["directory", "model", "task", "method", *SEEDS, "metric", *MEASURED, "finished", "problem"]
_NOT_SETTINGS = (RESUME_MAY_DIFFER - {"train.steps"}) | {"train.micro_batch_size", *SEEDS}
_METHODS = {"zero_shot": "zero-shot", "icl": "ICL", "adamw": "AdamW", "mezo": "MeZO", "lezo": "LeZO"}

# What reading a damaged file of a run raises.
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, yaml.YAMLError, UserError)

_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Zeroth-order fine-tuning</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ margin: 0 auto; padding: 1rem; max-width: 80rem; font: 16px/1.5 system-ui, sans-serif; }}
table {{ border-collapse: collapse; font-size: .9rem; display: block; overflow-x: auto; }}
th, td {{ padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #d8dee4; white-space: nowrap; }}
</style>
<script>{plotly}</script></head>
<body><h1>Zeroth-order fine-tuning</h1>
{table}
<p>{note}</p>
{figures}
<h2>Runs</h2>
{runs}
</body></html>
"""
_NOTE = "Scores are means over seeds ± the sample standard deviation (number of runs)."

logger = logging.getLogger(__name__)


def main(arguments: Namespace) -> None:
    """Print the table of the runs, or write the page, if arguments.html is a file."""
    runs = read_runs(find_runs(arguments.runs))
    for run in runs[~runs["finished"]].itertuples():
        logger.warning("warning: %s: %s", run.directory, run.problem)
    if runs["method"].isna().all():
        raise UserError("none of these directories holds a run", fix="give the run_dir of runs, or a pattern")
    runs = name_experiments(runs)
    if arguments.html is not None:
        with failures_named(arguments.html):
            write_atomically(arguments.html, page(runs))
    elif runs["finished"].any():
        print(markdown(score_table(runs)))
    else:
        raise UserError("none of these runs is finished", fix="start them again (they resume), or use --html")


def find_runs(patterns: Iterable[str]) -> list[Path]:
    """Return the directories that names and glob patterns stand for, each once, in this order."""
    matches: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern)
        relative = str(path.relative_to(path.anchor))
        paths = [path] if path.is_dir() else sorted(p for p in Path(path.anchor).glob(relative) if p.is_dir())
        if not paths:
            raise UserError(f"there is no run {pattern}", fix="give the run_dir of runs, or a pattern")
        for match in paths:
            matches.setdefault(match.resolve(), match)
    return list(matches.values())


def read_runs(directories: Iterable[Path]) -> pd.DataFrame:
    """Return one row for each directory, whether or not it holds a finished run.

    The columns are _COLUMNS and every key of config.yaml. The method "mezo" is LeZO that drops no block, and
    problem says why a run is not finished. A value that does not exist is missing.
    """
    frame = pd.DataFrame([_read_run(Path(directory)) for directory in directories])
    frame = frame.reindex(columns=[*_COLUMNS, *(name for name in frame if name not in _COLUMNS)])
    return frame.astype(dict.fromkeys(MEASURED, float) | {"finished": bool})


def over_seeds(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return one row for each combination of the keys' values, in the order of appearance.

    The columns are the keys; runs and finished, their numbers; and over the finished runs each of MEASURED as
    a mean, missing if any lacks the value, and NAME_deviation as the sample standard deviation.
    """
    groups = frame.groupby(list(keys) or (lambda _: 0), sort=False, dropna=False).ngroup()
    done = frame[frame["finished"]].groupby(groups)[MEASURED]
    parts = [
        frame.loc[~groups.duplicated(), list(keys)].reset_index(drop=True),
        frame["finished"].groupby(groups).agg(runs="size", finished="sum"),
        done.mean(skipna=False),
        done.std(skipna=False).add_suffix("_deviation"),
    ]
    return pd.concat(parts, axis=1)


def name_experiments(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the column experiment: the method, and the settings that differ between its runs."""
    settings = [name for name in runs if "." in name and name not in _NOT_SETTINGS]
    experiments = pd.Series(None, runs.index, dtype=object)
    for (_, _, method, adapter), group in runs.groupby(["model", "task", "method", "peft.kind"]):
        title = _METHODS.get(method, method) + ("" if adapter == "none" else f" {adapter}")
        varying = [name for name in settings if group[name].nunique(dropna=False) > 1]
        for index, run in group.iterrows():
            values = [f"{key.rpartition('.')[2]}={_short(run[key])}" for key in varying if pd.notna(run[key])]
            experiments[index] = ", ".join([title, *values])
    return runs.assign(experiment=experiments)


def score_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the texts of a table with a row for each experiment of `name_experiments`."""
    keys = ["model", "task", "experiment", "metric", "method", "peft.kind"]
    summary = over_seeds(runs[runs["finished"]], keys)
    rows = [
        {
            "model": Path(row["model"]).name,
            "task": row["task"],
            "method": row["experiment"],
            "metric": row["metric"],
            "test": _score(row),
            "paper": _paper_score(row),
            "before": _unit(row["zero_shot"], row["metric"]),
            "majority": _unit(row["majority_class"], row["metric"]),
            "validation loss": _number(row["best_dev_loss"]),
            "steps": _number(row["steps"]),
            "seconds": _number(row["seconds"]),
            "GB": _number(row["peak_memory_bytes"] / 1e9),
        }
        for row in summary.to_dict("records")
    ]
    return pd.DataFrame(rows)


def markdown(table: pd.DataFrame) -> str:
    """Return a table of texts as Markdown that is readable as plain text, too."""
    rows = [[str(value).replace("|", "\\|") for value in row] for row in [table.columns, *table.to_numpy()]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows) + f"\n\n{_NOTE}"


def page(runs: pd.DataFrame) -> str:
    """Return one self-contained page: the table, the curves of each model and task, and the runs."""
    try:
        import plotly.express as px
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise UserError("a page needs plotly", fix="pip install 'lezo_ds[report]'") from error
    curves = read_curves(runs)
    figures = []
    for (model, task), group in curves.groupby(["model", "task"], sort=False):
        figures.append(f"<h2>{escape(task)}, {escape(Path(model).name)}</h2>")
        for over in ("step", "minutes"):
            labels = {"dev_loss": "validation loss", over: over, "experiment": ""}
            shown = group.assign(experiment=group["experiment"].map(escape))  # plotly reads HTML in names
            figure = px.line(shown, x=over, y="dev_loss", color="experiment", labels=labels, markers=True)
            figures.append(figure.to_html(full_html=False, include_plotlyjs=False))
    state = runs["problem"].where(~runs["finished"], "finished")
    columns = {name: runs[name] for name in ("directory", "experiment", *SEEDS, "test", "best_dev_loss")}
    return _PAGE.format(
        plotly=get_plotlyjs(),
        table=score_table(runs).to_html(index=False, border=0) if runs["finished"].any() else "",
        note=_NOTE,
        figures="\n".join(figures),
        runs=pd.DataFrame(columns | {"state": state}).to_html(index=False, border=0, na_rep="-"),
    )


def read_curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the validation losses of each experiment by step, as means over its runs."""
    parts = [pd.DataFrame(columns=["model", "task", "experiment", "step", "minutes", "dev_loss"])]
    for run in runs[runs["method"].notna()].to_dict("records"):
        try:
            lines = (Path(run["directory"]) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines if line.endswith("}")]  # a crash may cut the last one
            part = pd.DataFrame(rows, columns=["step", "seconds", "dev_loss"]).dropna()
        except DAMAGE as error:
            logger.warning("warning: no curve of %s: %s", run["directory"], error)
            continue
        names = {name: run[name] for name in ("model", "task", "experiment")}
        parts.append(part.assign(minutes=part["seconds"] / 60, **names))
    keys = ["model", "task", "experiment", "step"]
    return pd.concat(parts).groupby(keys, sort=False)[["minutes", "dev_loss"]].mean().reset_index()


def _read_run(directory: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"directory": str(directory), "finished": False, "peft.kind": "none"}
    try:
        values = load_yaml((directory / "config.yaml").read_text(encoding="utf-8"))
        config = config_to_dict(config_from_dict(values, str(directory), recorded=True))
        for key, value in flatten(config).items():
            row[key] = str(value) if isinstance(value, list | tuple) else value
        is_mezo = row["method"] == "lezo" and row["zo.sparsity"] == 0
        source = row["data.train"] or row["data.path"] if row["data.task"] == CUSTOM else None
        row |= {"model": row["model.path"], "method": "mezo" if is_mezo else row["method"]}
        row["task"] = Path(source).stem if source else row["data.task"]
    except DAMAGE as error:
        return {**row, "problem": f"not a run, or damaged ({' '.join(str(error).split())})"}
    try:
        results = json.loads((directory / "results.json").read_text(encoding="utf-8"))
        numbers = {name: results[name] for name in MEASURED if results.get(name) is not None}
        row |= {"metric": results.get("metric")} | {name: float(value) for name, value in numbers.items()}
        if results["finished"]:
            return {**row, "test": float(results["test"]), "finished": True, "problem": ""}
        return {**row, "test": None, "problem": f"unfinished, at step {results['steps']}"}
    except FileNotFoundError:
        return {**row, "problem": "no results yet: it was killed, or is still going"}
    except DAMAGE as error:
        return {**row, "problem": f"damaged results.json ({' '.join(str(error).split())})"}


def _score(row: Mapping[str, Any]) -> str:
    deviation = row["test_deviation"]
    spread = "" if pd.isna(deviation) else f" ± {_unit(deviation, row['metric'])}"
    return f"{_unit(row['test'], row['metric'])}{spread} ({row['finished']})"


def _paper_score(row: Mapping[str, Any]) -> str:
    """Return the score of LeZO's tables (Wang et al. 2024) for the same model, task and method."""
    cell = Experiment(Path(row["model"]).name.lower(), row["task"].lower(), row["method"], row["peft.kind"])
    return f"{PAPER_SCORES[cell].mean:.1f}" if cell in PAPER_SCORES else "-"


def _unit(score: float, metric: str) -> str:
    """Return a score in percent, but a reward as it is."""
    if pd.isna(score):
        return "-"
    return f"{score:.3f}" if metric == REWARD else f"{100 * score:.1f}"


def _number(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.4g}"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
