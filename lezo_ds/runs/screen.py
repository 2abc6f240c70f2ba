"""What a run shows on the screen: progress, and short summaries with rounded numbers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tqdm import tqdm

from lezo_ds.journal import EvaluationRecord
from lezo_ds.runs.results import RunResults

_SPLITS = {"dev": "validation", "test": "test"}
WORSE = "Worse than before training: no step has a lower validation loss than the base model"
_LINE_FORMAT = "{unit} {n_fmt}/{total_fmt}:{rate_fmt}, {remaining} left{postfix}\n"


def progress_bar(num_steps: int, num_done: int, *, is_shown: bool, what: str = "step") -> tqdm[Any]:
    """Return a bar on a terminal; elsewhere, it writes a line every 20 seconds."""
    is_terminal = sys.stderr.isatty()
    return tqdm(
        total=num_steps,
        initial=num_done,
        disable=not is_shown,
        unit=what,
        smoothing=0.05,
        bar_format=None if is_terminal else _LINE_FORMAT,
        mininterval=0.1 if is_terminal else 20,
        leave=is_terminal,
    )


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds, such as 2:05:00."""
    return str(timedelta(seconds=round(seconds)))


def evaluation_line(record: EvaluationRecord, metric: str) -> str:
    is_measured = record.loss is not None or record.split == "dev"
    loss = f"loss {number(record.loss)}, " if is_measured else ""
    return (
        f"step {record.step}: {_SPLITS[record.split]} {loss}{metric} {record.metrics[metric]:.3f}"
    )


def run_summary(run_dir: str, results: RunResults) -> str:
    """Return what a user wants to know at the end of a run, in a few lines."""
    if results.finished:
        lines = _finished_lines(results)
    else:
        seconds = duration(results.seconds)
        lines = [f"Stopped after step {results.steps} ({seconds}). The same command continues."]
    return "\n".join([*lines, f"Run directory: {run_dir}"])


def _finished_lines(results: RunResults) -> list[str]:
    is_trained = results.best_step is not None
    seconds = duration(results.seconds)
    if is_trained:
        lines = [f"Finished: {results.steps} steps in {seconds}."]
    else:
        lines = [f"Finished in {seconds}."]
    if results.early_stop_step is not None:
        lines.append(f"Stopped early, at step {results.early_stop_step}: train.patience ran out.")
    lines.append(f"Test {results.metric}: {_test_scores(results)}.")
    if is_trained:
        best_loss = number(results.best_dev_loss)
        lines.append(f"Best step: {results.best_step} (validation loss {best_loss}).")
    if results.worse_than_base:
        lines.append(
            f"{WORSE}, which is what export writes. Lower the learning rate, or do more steps."
        )
    if results.skipped_steps:
        lines.append(f"Skipped steps: {results.skipped_steps}.")
    return lines


def _test_scores(results: RunResults) -> str:
    if results.best_step is None:
        scores = f"{results.test:.3f}"
    else:
        scores = f"{results.zero_shot:.3f} before, {results.test:.3f} after"
    if results.majority_class is None:
        return scores
    return f"{scores} (majority class {results.majority_class:.3f})"


def scores_summary(scores: Mapping[str, Any]) -> str:
    """Return the scores of `score` on one line."""
    what = f"step {scores['step']} of {scores['run']}" if "run" in scores else scores["model"]
    examples = f"{scores['num_examples']} {_SPLITS[scores['split']]} examples"
    parts = [f"{scores['metric']} {scores['score']:.3f} on {examples}"]
    if scores["majority_class"] is not None:
        parts.append(f"majority class {scores['majority_class']:.3f}")
    if scores["loss"] == scores["loss"]:  # a loss that was not measured is NaN
        parts.append(f"loss {number(scores['loss'])}")
    return f"{what}: {', '.join(parts)}"
