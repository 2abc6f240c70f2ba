"""What a run shows on the screen: progress, and short summaries with rounded numbers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tqdm import tqdm

from lezo_ds.journal import EvaluationRecord

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


def run_summary(run_dir: str, results: Mapping[str, Any]) -> str:
    """Return what a user wants to know at the end of a run, from the content of its results.json."""
    steps, seconds = results["steps"], duration(results["seconds"])
    if not results["finished"]:
        stopped = f"Stopped after step {steps} ({seconds}). The same command continues."
        return f"{stopped}\nRun directory: {run_dir}"
    trained = results["best_step"] is not None
    lines = [f"Finished{f': {steps} steps' if trained else ''} in {seconds}."]
    if results["early_stop_step"] is not None:
        lines.append(
            f"Stopped early, at step {results['early_stop_step']}: train.patience ran out."
        )
    scores = [("zero_shot", " before"), ("test", " after")] if trained else [("test", "")]
    shown = [f"{results[key]:.3f}{when}" for key, when in scores if results[key] is not None]
    majority = results["majority_class"]
    suffix = "" if majority is None else f" (majority class {majority:.3f})"
    lines.append(f"Test {results['metric']}: {', '.join(shown)}{suffix}.")
    if trained:
        best = number(results["best_dev_loss"])
        lines.append(f"Best step: {results['best_step']} (validation loss {best}).")
    if results["worse_than_base"]:
        lines.append(
            f"{WORSE}, which is what export writes. Lower the learning rate, or do more steps."
        )
    if results["skipped_steps"]:
        lines.append(f"Skipped steps: {results['skipped_steps']}.")
    return "\n".join([*lines, f"Run directory: {run_dir}"])


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
