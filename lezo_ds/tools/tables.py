"""Runs as tables: a row for each run, and a row for each experiment with means over its seeds.

    run directories --read_runs--> a row for each run: its settings, its results, its problem
                    --name_experiments--> the column `experiment`
                    --score_table--> a row for each experiment, as texts

An experiment is a group of runs that differ in their seeds only: their settings, base model and
test data are the same. Runs may be unfinished or damaged, and may come from anyone: their values
are read, and nothing that they name is imported.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from lezo_ds import files
from lezo_ds.config import RunConfig, config_from_dict, flatten, keys_with, load_yaml
from lezo_ds.errors import UserError, one_line
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.results import RunResults
from lezo_ds.tasks.custom import CUSTOM
from lezo_ds.tasks.metrics import REWARD, LabelScore, best_f1, normalize

T = TypeVar("T")

# What reading a damaged JSON or YAML file may raise. YamlError is a ValueError.
DAMAGE = (*files.DAMAGE, UserError)

# The settings in which the repetitions of an experiment differ.
SEEDS = ["seed", "data.seed"]
# The numbers of results.json that tables have.
_RESULTS = [
    "test",
    "zero_shot",
    "majority_class",
    "macro_f1",
    "best_dev_loss",
    "steps",
    "seconds",
    "trained_dev_loss",
    "peak_memory_bytes",
    "worse_than_base",
]
# The same, and the standard error of `test`.
MEASURED = [*_RESULTS, "standard_error"]
# Columns that every row has. They are empty where a run cannot be read.
_COLUMNS = ["model", "task", "method", "data.test", "data.num_test", "data.seed"]
_COLUMNS += ["metric", "model_fingerprint", "test_data", *MEASURED]
_MAY_DIFFER = keys_with("may_differ_on_resume")
# These may change when a run resumes, and yet decide its score.
_OF_SCORES = {"train.steps", "train.epochs", "train.eval_every", "train.patience"}
_OF_SCORES |= {key for key in _MAY_DIFFER - {"data.date"} if key.startswith("data.")}
# Runs that differ in these settings only belong to the same experiment.
_NO_DIFFERENCE = {*SEEDS, "train.micro_batch_size", *(_MAY_DIFFER - _OF_SCORES)}

_METHOD_NAMES = {
    "zero_shot": "zero-shot",
    "icl": "ICL",
    "adamw": "AdamW",
    "mezo": "MeZO",
    "lezo": "LeZO",
}

logger = logging.getLogger(__name__)

NOTE = """\
Scores and errors are in percent, rewards as they are. A score is a mean over seeds
± the sample standard deviation (number of runs). The standard error is that of one
run, over its test examples."""


@dataclass(frozen=True)
class Answer:
    """What a model answered to an example of the test split: a line of predictions/step-N.jsonl.

    Attributes:
        prompt: What the model read.
        predicted: The answer.
        right: The right answers.
    """

    prompt: str
    predicted: str
    right: list[str]


@dataclass(frozen=True)
class JudgedAnswer:
    """An answer that an evaluation has shown: a line of samples.jsonl.

    Attributes:
        step: The number of steps before the evaluation.
        split: dev or test.
        prompt: What the model read.
        answer: What it wrote.
        reward: Of the answer.
        ended: Whether it ended before generation.max_new_tokens.
    """

    step: int
    split: str
    prompt: str
    answer: str
    reward: float
    ended: bool


@dataclass(frozen=True)
class HarnessScores:
    """What lm-evaluation-harness measured of a run: a line of lm_eval.jsonl.

    Attributes:
        step: Of the weights.
        limit: Most examples of a task; None for all.
        results: By task, the scores and their standard errors, such as "acc,none".
    """

    step: int
    limit: int | None
    results: dict[str, dict[str, Any]]


# By the name of a metric that is a mean over answers, how right an answer is, from 0 to 1.
JUDGES: Mapping[str, Callable[[Answer], float]] = {
    "accuracy": lambda answer: answer.predicted in answer.right,
    "exact_match": lambda answer: normalize(answer.predicted) in map(normalize, answer.right),
    "f1": lambda answer: best_f1(answer.predicted, answer.right),
}


def read_runs(directories: Iterable[Path]) -> pd.DataFrame:
    """Return one row for each directory, whether or not it holds a finished run.

    The columns are those of `_read_run` and every key of config.yaml. A value that does not exist
    is missing.
    """
    frame = pd.DataFrame([_read_run(directory) for directory in directories])
    return frame.astype(dict.fromkeys(MEASURED, float))


def _read_run(directory: Path) -> dict[str, Any]:
    """Return the row of a run: its settings, its results, and the answers to its test examples.

    The method "mezo" is LeZO that drops no block. `problem` says why the run is not finished.
    """
    row: dict[str, Any] = {
        **dict.fromkeys(_COLUMNS),
        "directory": str(directory),
        "finished": False,
        "peft.kind": "none",
        "answers": [],
        "labels": [],
    }
    try:
        row |= _settings(recorded_config(directory))
    except DAMAGE as error:
        return {**row, "problem": f"not a run, or damaged ({one_line(error)})"}
    run = RunDirectory(directory)
    if not run.results.exists():
        return {**row, "problem": "no results yet: it was killed, or is still going"}
    results = RunResults.read(run.results)
    if results is None:
        return {**row, "problem": "damaged results.json"}
    row |= {name: getattr(results, name) for name in ("metric", "model_fingerprint", *_RESULTS)}
    if not results.finished:
        return {**row, "test": None, "problem": f"unfinished, at step {results.steps}"}
    answers = _read_lines(run.predictions_at(results.best_step or 0), Answer)
    if answers:
        row["test_data"] = _digest_of_test(answers)
    judge = JUDGES.get(results.metric)
    if judge is not None:
        scores = pd.Series([judge(answer) for answer in answers], dtype=float)
        row["standard_error"] = scores.sem()
    labels = label_table(results.by_label or {})
    return {**row, "answers": answers, "labels": labels, "finished": True, "problem": ""}


def _digest_of_test(answers: Sequence[Answer]) -> str:
    """Return a hash of the test examples in any order, since data.seed shuffles them.

    What all prompts begin with is left out: a chat template may write the day of the run there.
    """
    start = len(commonprefix([answer.prompt for answer in answers]))  # noqa: RUF071
    examples = sorted(f"{answer.prompt[start:]!r} {answer.right!r}" for answer in answers)
    return hashlib.sha256("\n".join(examples).encode()).hexdigest()


def recorded_config(directory: Path) -> RunConfig:
    """Return the configuration of a run. One of DAMAGE: it cannot be read."""
    values = load_yaml(files.read_regular(RunDirectory(directory).config).decode())
    return config_from_dict(values, str(directory))


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a run by their dotted keys, and what identifies its experiment."""
    settings: dict[str, Any] = {}
    for key, value in flatten(config.model_dump()).items():
        # pandas would take a list for several values.
        settings[key] = str(value) if isinstance(value, list | tuple) else value
    settings["train.objective"] = str(config.train.objective)
    settings["model"] = config.model.path
    settings["task"] = config.data.task
    source = config.data.train or config.data.path
    if config.data.task == CUSTOM and source is not None:
        settings["task"] = Path(source).stem
    settings["learning_rate"] = config.zo.learning_rate
    settings["method"] = "mezo" if config.zo.sparsity == 0 else "lezo"
    return settings


def read_judged_answers(directory: Path) -> list[JudgedAnswer]:
    """Return the answers that the first and the last evaluation of a run have shown."""
    answers = _read_lines(RunDirectory(directory).samples, JudgedAnswer)
    if not answers:
        return []
    shown_steps = (answers[0].step, answers[-1].step)
    return [answer for answer in answers if answer.step in shown_steps]


def harness_table(directory: Path) -> pd.DataFrame:
    """Return the texts of a table with a row for each score of lm-evaluation-harness.

    Its columns are steps of the run: what the model knew before training is at step 0.
    """
    rows = []
    for measured in _read_lines(RunDirectory(directory).harness_scores, HarnessScores):
        examples = "all" if measured.limit is None else str(measured.limit)
        for task, scores in sorted(measured.results.items()):
            for name, value in scores.items():
                metric = name.partition(",")[0]
                if isinstance(value, float) and not metric.endswith("_stderr"):
                    rows.append((task, metric, examples, measured.step, f"{value:.4f}"))
    keys = ["lm-eval", "metric", "examples"]
    scores_by_step = pd.DataFrame(rows, columns=[*keys, "step", "score"])
    table = scores_by_step.pivot_table("score", keys, "step", aggfunc="last", sort=False)
    return table.sort_index(axis=1).add_prefix("step ").fillna("-").reset_index()


def _read_lines(path: Path, kind: type[T]) -> list[T]:
    """Return the lines of a JSONL file, or none if the file is missing or damaged."""
    reader = TypeAdapter(kind)
    try:
        lines = files.read_regular(path).decode().splitlines()
        return [reader.validate_json(line) for line in lines]
    except DAMAGE:
        return []


def over_seeds(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return one row for each combination of the keys' values, in the order of appearance.

    The columns are

        the keys
        runs, finished   their numbers
        MEASURED         means over the finished runs, missing if any of them lacks the value
        NAME_deviation   sample standard deviations over the finished runs
    """
    groups = frame.groupby(list(keys) or (lambda _: 0), sort=False, dropna=False).ngroup()
    done = frame[frame["finished"]].groupby(groups)[MEASURED]
    tables = [
        frame.loc[~groups.duplicated(), list(keys)].reset_index(drop=True),
        frame["finished"].groupby(groups).agg(runs="size", finished="sum"),
        done.agg(lambda values: values.mean(skipna=False)),
        done.agg(lambda values: values.std(skipna=False)).add_suffix("_deviation"),
    ]
    return pd.concat(tables, axis=1)


def name_experiments(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the column `experiment`, such as "LeZO lora, learning_rate=1e-06".

    That is the method, the adapter, and the settings that differ between the runs of both on the
    same model and task. Runs on other test data have experiments of their own (`kept_apart`).
    """
    settings = [name for name in runs if "." in name and name not in _NO_DIFFERENCE]
    experiments = pd.Series(None, runs.index, dtype=object)
    for (_, _, method, adapter), group in runs.groupby(["model", "task", "method", "peft.kind"]):
        title = _METHOD_NAMES.get(method, method)
        if adapter != "none":
            title = f"{title} {adapter}"
        varying = [key for key in settings if group[key].nunique(dropna=False) > 1]
        for index, run in group.iterrows():
            words = [title]
            for key in varying:
                value = run[key]
                if isinstance(value, float):  # all its digits: near values are other settings
                    value = f"{value:.15g}"
                if pd.notna(run[key]):
                    words.append(f"{key.rpartition('.')[2]}={value}")
            experiments[index] = ", ".join(words)
    named = runs.assign(experiment=experiments)
    named["experiment"] += kept_apart(named, ["model", "task", "experiment"])
    return named


def each_seed_once(runs: pd.DataFrame) -> pd.DataFrame:
    """Return named runs without finished ones that repeat the seeds of one of their experiment."""
    keys = ["model", "task", "experiment", "finished", *SEEDS]
    is_repeated = runs["finished"] & runs.duplicated(keys)
    for directory in runs.loc[is_repeated, "directory"]:
        logger.warning("warning: %s is left out: another run has its settings and seeds", directory)
    return runs[~is_repeated]


def kept_apart(runs: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Return what to add to the name of each run, among those with equal values of the keys.

    That is "", or such as ", other test data (3f9a0c)" for a run that is not to be averaged with
    the first one. A warning says so. An older or unfinished run has no value to compare.
    """
    names = pd.Series("", runs.index)
    same = [runs[key] for key in keys]
    # data.seed draws the test examples from their file, or the demonstrations in their prompts.
    takes_all = runs["data.test"].notna() & runs["data.num_test"].isna() & (runs["method"] != "icl")
    drawn_by = runs["data.seed"].mask(takes_all, 0)
    everyone = pd.Series(0, runs.index)
    for problem, column, others in (
        ("another base model", "model_fingerprint", everyone),
        ("other test data", "test_data", drawn_by),
    ):
        values = runs[column]
        first = values.groupby([*same, others], sort=False, dropna=False).transform("first")
        for index in runs.index[values.notna() & (values != first)]:
            names[index] += f", {problem} ({values[index][:6]})"
            message = "warning: %s is not averaged with others of its settings: it has %s"
            logger.warning(message, runs.loc[index, "directory"], problem)
    return names


def score_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the texts of a table with a row for each experiment of `name_experiments`.

    A column that says nothing of any of them is left out.
    """
    keys = ["model", "task", "experiment", "metric", "method", "peft.kind", "learning_rate"]
    rows = []
    for row in over_seeds(runs[runs["finished"]], keys).to_dict("records"):
        score = shown_score(row, "test")
        if pd.notna(row["test_deviation"]):
            score += f" ± {shown_score(row, 'test_deviation')}"
        model = Path(row["model"]).name
        # A narrow screen shows the first columns.
        texts = {
            "method": row["experiment"],
            "test": f"{score} ({row['finished']})",
            "": _verdict(row),
            "standard error": shown_score(row, "standard_error"),
            "before": shown_score(row, "zero_shot"),
            "majority": shown_score(row, "majority_class"),
            "macro F1": _percent(row["macro_f1"]),
            "validation loss": short(row["best_dev_loss"]),
            "minutes": short(row["seconds"] / 60),
            "GB": short(row["peak_memory_bytes"] / 1e9),
            "learning rate": short(row["learning_rate"]),
            "steps": short(row["steps"]),
            "task": row["task"],
            "metric": row["metric"],
            "model": model,
        }
        rows.append(texts)
    table = pd.DataFrame(rows)
    return table.loc[:, ~table.isin(["", "-"]).all()]


def label_table(by_label: Mapping[str, LabelScore]) -> list[dict[str, object]]:
    """Return the texts of a table with a row for each label: its test examples and its scores."""
    return [
        {
            "label": label,
            "examples": score.examples,
            "predicted": score.predicted,
            "precision": _percent(score.precision),
            "recall": _percent(score.recall),
            "F1": _percent(score.f1),
        }
        for label, score in by_label.items()
    ]


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}"


def _verdict(row: Mapping[str, Any]) -> str:
    """Return what is wrong with an experiment's score, or nothing."""
    if row["worse_than_base"] > 0:
        return "worse than before training"
    if row["test"] < row["zero_shot"]:
        return "below zero-shot"
    if row["test"] < row["majority_class"]:
        return "below the majority class"
    return ""


def shown_score(row: Mapping[str, Any], name: str) -> str:
    """Return a score of a row in percent, but a reward as it is, and a missing one as "-"."""
    score = row[name]
    if pd.isna(score):
        return "-"
    return f"{score:.3f}" if row["metric"] == REWARD else _percent(score)


def short(value: Any) -> str:
    """Return a value with at most four digits, and a missing one as "-"."""
    if pd.isna(value):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
