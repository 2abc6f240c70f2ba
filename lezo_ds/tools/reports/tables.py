"""Finished runs as a table in LeZO's layout: mean and deviation over seeds, beside the paper's numbers."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lezo_ds.config import (
    RESUME_MAY_DIFFER,
    Method,
    PeftKind,
    RunConfig,
    config_from_dict,
    config_to_dict,
    flatten,
)
from lezo_ds.errors import UserError
from lezo_ds.files import write_atomically
from lezo_ds.recipes.paper import PAPER_MODELS, PAPER_SCORES, PAPER_TASKS, Experiment, Score
from lezo_ds.runs.run_directory import RunDirectory
from lezo_ds.tasks import get_task

MAJORITY_CLASS = "majority class"

_METHODS: Mapping[Method, str] = {
    "zero_shot": "zero-shot",
    "icl": "ICL",
    "adamw": "FT (AdamW)",
    "mezo": "MeZO",
    "lezo": "LeZO",
}
_PEFT: Mapping[PeftKind, str] = {"none": "", "lora": " LoRA", "prefix": " prefix"}

_SEEDS = ("seed", "data.seed")
_NOT_SETTINGS = (RESUME_MAY_DIFFER - {"train.steps"}).union(
    _SEEDS, ("train.micro_batch_size", "train.cpu_threads")
)
"""Keys that tell apart runs of one experiment: seeds, where things lie, what moves only the last bits."""


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run's directory says of it.

    Attributes:
        path: the directory.
        cell: its experiment; the model is the paper's name of it, or model.path where the paper has no such.
        test: its score, in per cent.
        majority_class: of its test examples, in per cent; None where that means nothing.
        seeds: `seed` and `data.seed`.
        settings: dotted keys and values of all else that decides the score.
        versions: of Python and libraries.
    """

    path: Path
    cell: Experiment
    test: float
    majority_class: float | None
    seeds: tuple[int, int]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        label: the method; where runs of a cell differ in more than their seeds, also in what.
        scores: by task, those that there are.
        num_runs: by task; empty for the majority class and the paper's rows.
        is_paper: whether these are the paper's numbers.
    """

    label: str
    scores: Mapping[str, Score]
    num_runs: Mapping[str, int]
    is_paper: bool = False


@dataclass(frozen=True)
class Table:
    """All runs of one model: its tasks in the paper's order, its rows (the majority class first)."""

    model: str
    tasks: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Report:
    """One table a model.

    Attributes:
        tables: in the order of the models' names.
        versions: values met of each library, and of "data.protocol".
        warnings: what was left out, counted once, or differs though it should not.
    """

    tables: tuple[Table, ...]
    versions: Mapping[str, tuple[str, ...]]
    warnings: tuple[str, ...]


def method_of(config: RunConfig) -> Method:
    """Return what a run is called by in a comparison: LeZO that leaves out no block is MeZO."""
    leaves_out_none = not config.zo.sparsity and not config.zo.num_dropped_layers
    return "mezo" if config.method == "lezo" and leaves_out_none else config.method


def find_runs(patterns: Iterable[str]) -> list[Path]:
    """Return the paths that names or glob patterns stand for, each once, in their order.

    Of what a pattern matches, directories: beside runs lie their logs, and the tables of a sweep.

    Raises:
        UserError: there is nothing of a name or pattern.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern)
        relative = str(path.relative_to(path.anchor))
        matches = [path]
        if not path.exists():
            matches = sorted(match for match in Path(path.anchor).glob(relative) if match.is_dir())
        if not matches:
            raise UserError(
                "there is no such run",
                got=pattern,
                expected="directories of runs, or a pattern such as runs/*",
                fix="correct the name; a run's directory is its run_dir",
            )
        for match in matches:
            found.setdefault(match.resolve(), match)
    return list(found.values())


def read_report(paths: Sequence[Path]) -> Report:
    """Read runs and build their report; what is no finished run is left out, with a warning.

    Raises:
        UserError: none of them is a finished run, or a run's files are damaged.
    """
    read = {path: _read_run(path) for path in paths}
    runs = [run for run in read.values() if isinstance(run, FinishedRun)]
    left_out = [f"left out: {path}: {reason}" for path, reason in read.items() if isinstance(reason, str)]
    if not runs:
        raise UserError(
            "there is no finished run among those given",
            got="; ".join(left_out) or "no path",
            expected="directories with config.yaml and a results.json of a finished run",
            fix="start the same commands again: they resume; or give other directories",
        )
    report = make_report(runs)
    return Report(report.tables, report.versions, (*left_out, *report.warnings))


def make_report(runs: Sequence[FinishedRun]) -> Report:
    """Return the report of at least one run."""
    counted, warnings = _without_duplicates(runs)
    values: dict[str, dict[str, list[str]]] = {}
    for run in counted:
        for name, value in {**run.versions, "data.protocol": run.settings["data.protocol"]}.items():
            values.setdefault(name, {}).setdefault(value, []).append(str(run.path))
    warnings += [
        f"{name} differs: " + "; ".join(f"{value} in {', '.join(paths)}" for value, paths in met.items())
        for name, met in values.items()
        if len(met) > 1
    ]
    models = sorted({run.cell.model for run in counted})
    tables = (_make_table(model, [run for run in counted if run.cell.model == model]) for model in models)
    return Report(tuple(tables), {name: tuple(met) for name, met in values.items()}, tuple(warnings))


def average(table: Table, row: Row) -> float | None:
    """Return the mean of a row over all tasks of its table, in per cent; None if one of them is missing."""
    if row.scores.keys() != set(table.tasks):
        return None
    return statistics.mean(score.mean for score in row.scores.values())


def table_lines(table: Table) -> list[list[str]]:
    """Return a table as text: its header, then a line a row; an average only over several tasks."""
    with_average = len(table.tasks) > 1
    lines = [["", *(PAPER_TASKS[task].title for task in table.tasks), *(["average"] if with_average else [])]]
    for row in table.rows:
        cells = [_cell_text(row, task) for task in table.tasks]
        mean = average(table, row)
        lines.append(
            [row.label, *cells, *(["-" if mean is None else _one_decimal(mean)] if with_average else [])]
        )
    return lines


def to_markdown(report: Report) -> str:
    """Return the tables as Markdown, readable as it stands, with versions and warnings below."""
    f1_tasks = ", ".join(PAPER_TASKS[task].title for task in ("squad", "drop"))
    lines = []
    for table in report.tables:
        lines += [f"## {table.model}", "", *_markdown_table(table), ""]
    lines += [
        f"Per cent: accuracy, token F1 for {f1_tasks}. Mean +- sample deviation over seeds (number of runs).",
        "(paper): Wang et al. 2024, five seeds where there is a deviation.",
        "",
        "Made with " + ", ".join(f"{name} {' / '.join(met)}" for name, met in report.versions.items()) + ".",
    ]
    if report.warnings:
        lines += ["", "Warnings:", "", *(f"- {warning}" for warning in report.warnings)]
    return "\n".join(lines) + "\n"


def to_csv(report: Report) -> str:
    """Return the tables as one CSV: a line a row, per cent, each task's deviation and runs beside it."""
    tasks = [task for task in PAPER_TASKS if any(task in table.tasks for table in report.tables)]
    columns = [
        f"{PAPER_TASKS[task].title}{suffix}" for task in tasks for suffix in ("", " deviation", " runs")
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "method", "source", *columns, "average"])
    for table in report.tables:
        for row in table.rows:
            values: list[object] = [table.model, row.label, "paper" if row.is_paper else "runs"]
            for task in tasks:
                score = row.scores.get(task)
                values += [None, None] if score is None else [_rounded(score.mean), _rounded(score.deviation)]
                values.append(row.num_runs.get(task))
            writer.writerow([*values, _rounded(average(table, row))])
    return text.getvalue()


def write_report(path: Path, text: str) -> None:
    """Write a report to a file, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(
            f"cannot write {path}",
            got=str(error),
            expected="a file in a directory that exists",
            fix="give another --out",
        ) from error


def _read_run(path: Path) -> FinishedRun | str:
    """Return a run, or why there is none to count."""
    files = RunDirectory(path)
    if not (path / "config.yaml").is_file():
        return "not a run directory (it has no config.yaml)"
    if not files.results.is_file():
        return "no results yet (the run was killed, or is still going)"
    try:
        values = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        config = config_from_dict(values, str(path / "config.yaml"))
        results = json.loads(files.results.read_text(encoding="utf-8"))
        if not results["finished"]:
            return f"unfinished, at step {results['steps']}"
        return _finished_run(path, config, results)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(
            f"the run {path} cannot be read",
            got=f"{type(error).__name__}: {error}",
            expected="config.yaml and results.json as a run writes them",
            fix="leave it out, or start its command again",
        ) from error


def _finished_run(path: Path, config: RunConfig, results: Mapping[str, Any]) -> FinishedRun:
    flat = flatten(config_to_dict(config))
    name = Path(config.model.path).name.lower()
    model = name if name in PAPER_MODELS else config.model.path
    majority_class = results["majority_class"]
    return FinishedRun(
        path=path,
        cell=Experiment(model, get_task(config.data.task).name, method_of(config), config.peft.kind),
        test=100.0 * results["test"],
        majority_class=None if majority_class is None else 100.0 * majority_class,
        seeds=(config.seed, config.data.seed),
        settings={key: value for key, value in flat.items() if key not in _NOT_SETTINGS},
        versions=dict(results["versions"]),
    )


def _without_duplicates(runs: Sequence[FinishedRun]) -> tuple[list[FinishedRun], list[str]]:
    first: dict[tuple[object, ...], FinishedRun] = {}
    warnings = []
    for run in runs:
        key = (run.cell, run.seeds, *run.settings.items())
        same = first.setdefault(key, run)
        if same is run:
            continue
        scores = "" if same.test == run.test else f", though they score {same.test:.2f} and {run.test:.2f}"
        warnings.append(f"counted once: {run.path} has the seeds and settings of {same.path}{scores}")
    return list(first.values()), warnings


def _make_table(model: str, runs: Sequence[FinishedRun]) -> Table:
    tasks = tuple(task for task in PAPER_TASKS if any(run.cell.task == task for run in runs))
    rates = {task: _majority_classes(runs, task) for task in tasks}
    majority = {task: Score(statistics.mean(values)) for task, values in rates.items() if values}
    rows = [Row(MAJORITY_CLASS, majority, {})] if majority else []
    for peft in _PEFT:
        for method in _METHODS:
            members = [run for run in runs if (run.cell.method, run.cell.peft) == (method, peft)]
            if members:
                rows += _method_rows(f"{_METHODS[method]}{_PEFT[peft]}", members, tasks)
    return Table(model, tasks, tuple(rows))


def _majority_classes(runs: Sequence[FinishedRun], task: str) -> list[float]:
    found = [run.majority_class for run in runs if run.cell.task == task]
    return [rate for rate in found if rate is not None]


def _method_rows(label: str, runs: Sequence[FinishedRun], tasks: Sequence[str]) -> list[Row]:
    """Return a row for each setting that was tried in one cell, and the paper's below."""
    varying = _varying_settings(runs)
    variants: dict[tuple[object, ...], list[FinishedRun]] = {}
    for run in runs:
        variants.setdefault(tuple(run.settings[key] for key in varying), []).append(run)
    rows = []
    for values, members in variants.items():
        setting = "".join(f", {key}={_shown(value)}" for key, value in zip(varying, values, strict=True))
        by_task = {task: [run.test for run in members if run.cell.task == task] for task in tasks}
        scores = {task: _score(tests) for task, tests in by_task.items() if tests}
        rows.append(Row(label + setting, scores, {task: len(by_task[task]) for task in scores}))
    cells = {task: replace(runs[0].cell, task=task) for task in tasks}
    published = {task: PAPER_SCORES[cell] for task, cell in cells.items() if cell in PAPER_SCORES}
    return rows + ([Row(f"{label} (paper)", published, {}, is_paper=True)] if published else [])


def _varying_settings(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the keys in which runs of one task differ; between tasks settings may differ."""
    first: dict[str, FinishedRun] = {}
    varying: dict[str, None] = {}
    for run in runs:
        other = first.setdefault(run.cell.task, run)
        varying |= {key: None for key, value in run.settings.items() if other.settings[key] != value}
    return list(varying)


def _score(tests: Sequence[float]) -> Score:
    return Score(statistics.mean(tests), statistics.stdev(tests) if len(tests) > 1 else None)


def _markdown_table(table: Table) -> list[str]:
    lines = table_lines(table)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines]


def _cell_text(row: Row, task: str) -> str:
    if task not in row.scores:
        return "-"
    score = row.scores[task]
    deviation = "" if score.deviation is None else f" +- {_one_decimal(score.deviation)}"
    return f"{_one_decimal(score.mean)}{deviation}" + (
        f" ({row.num_runs[task]})" if task in row.num_runs else ""
    )


def _one_decimal(value: float) -> str:
    # 75.35 as a float lies a hair below itself, and the paper rounds it up.
    return f"{value + 1e-9:.1f}"


def _shown(value: object) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
