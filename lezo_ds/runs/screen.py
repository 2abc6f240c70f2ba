"""What a run shows on the screen: progress, and short summaries with rounded numbers."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from lezo_ds.journal import EvaluationRecord

PROGRESS_VARIABLE = "LEZO_DS_PROGRESS"
"""If this environment variable is set, a run shows its progress bar even where there is no terminal."""

SECONDS_BETWEEN_LINES = 20.0
"""How often a run writes a line where it shows no progress bar."""

logger = logging.getLogger(__name__)


class Progress:
    """Shows how far training is: a bar on a terminal, elsewhere a line every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, num_steps: int, num_done: int, metric: str, is_shown: bool) -> None:
        is_bar = sys.stderr.isatty() or PROGRESS_VARIABLE in os.environ
        self._bar = tqdm(
            total=num_steps,
            initial=num_done,
            disable=not (is_shown and is_bar),
            desc="training",
            ncols=_columns(),
            nrows=24,  # of a terminal without rows, tqdm would show nothing
            smoothing=0.05,
        )
        self._writes_lines = is_shown and not is_bar
        self._num_steps = num_steps
        self._num_before = num_done
        self._metric = metric
        self._started = self._last_line = time.monotonic()
        self._losses: list[float] = []  # these two since the last line
        self._step_seconds: list[float] = []

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(
        self,
        step: int,
        loss: float | None,
        seconds: float,
        last: EvaluationRecord | None,
        best: EvaluationRecord | None,
    ) -> None:
        """Show that `step` steps are done. A loss of None is not finite."""
        if loss is not None:
            self._losses.append(loss)
        self._step_seconds.append(seconds)
        if not self._bar.disable:
            shown = {"loss": number(loss)}
            if last is not None:
                shown[f"validation {self._metric}"] = _score_text(last, self._metric)
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()
        now = time.monotonic()
        if self._writes_lines and now - self._last_line >= SECONDS_BETWEEN_LINES and step < self._num_steps:
            logger.info("%s", self._line(step, now - self._started, last, best))
            self._last_line = now
            self._losses.clear()
            self._step_seconds.clear()

    def _line(
        self, step: int, elapsed: float, last: EvaluationRecord | None, best: EvaluationRecord | None
    ) -> str:
        parts = [f"loss {number(_mean(self._losses))}"]
        if last is not None and best is not None:
            earlier = f"{_score_text(best, self._metric)} at step {best.step}"
            at = "the best so far" if best is last else earlier
            parts.append(f"validation {self._metric} {_score_text(last, self._metric)} ({at})")
        parts.append(_speed(_mean(self._step_seconds)))
        # The evaluations between the steps so far count, too.
        left = elapsed / (step - self._num_before) * (self._num_steps - step)
        return f"step {step}/{self._num_steps}: {', '.join(parts)}, {duration(left)} left"


def _columns() -> int:
    """Return the width of the terminal; 100 if there is none, or if it does not tell (as under `script`)."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 100
    except (OSError, ValueError):
        return 100


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def number(value: float | None) -> str:
    """Return a number with four significant digits.

    >>> number(0.69314718), number(-1234567.0), number(None)
    ('0.6931', '-1.235e+06', 'not finite')
    """
    return "not finite" if value is None else f"{value:.4g}"


def _score_text(record: EvaluationRecord, metric: str) -> str:
    return f"{record.metrics[metric]:.3f}"


def _speed(seconds: float | None) -> str:
    """Format the speed of steps that take this many seconds each.

    >>> _speed(1.234), _speed(0.04)
    ('1.23 s/step', '25.0 steps/s')
    """
    if not seconds:
        return "no speed yet"
    return f"{seconds:.2f} s/step" if seconds >= 1 else f"{1 / seconds:.1f} steps/s"


def duration(seconds: float) -> str:
    """Return a time in the largest two units that it has.

    >>> duration(7.4), duration(125), duration(7500), duration(200_000)
    ('7 s', '2 min 5 s', '2 h 5 min', '2 d 7 h')
    """
    whole = round(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def evaluation_line(record: EvaluationRecord, metric: str) -> str:
    """Return the line that tells of an evaluation."""
    split = {"dev": "validation"}.get(record.split, record.split)
    is_measured = record.loss is not None or record.split == "dev"
    loss = f"loss {number(record.loss)}, " if is_measured else ""
    return f"step {record.step}: {split} {loss}{metric} {_score_text(record, metric)}"


def run_summary(run_dir: str, results: Mapping[str, Any]) -> str:
    """Return what a user wants to know at the end of a run, from the content of its results.json."""
    steps, seconds = results["steps"], duration(results["seconds"])
    if not results["finished"]:
        stopped = f"Stopped after step {steps} ({seconds}). The same command continues."
        return f"{stopped}\nRun directory: {run_dir}"
    stop, trained = results["early_stop_step"], results["best_step"] is not None
    lines = [f"Finished{f': {steps} steps' if trained else ''} in {seconds}."]
    if stop is not None:
        lines.append(f"Stopped early, at step {stop}: train.patience ran out.")
    scores = [("zero_shot", " before"), ("test", " after")] if trained else [("test", "")]
    shown = [f"{results[key]:.3f}{when}" for key, when in scores if results[key] is not None]
    majority = results["majority_class"]
    suffix = "" if majority is None else f" (majority class {majority:.3f})"
    lines.append(f"Test {results['metric']}: {', '.join(shown)}{suffix}.")
    if trained:
        loss = number(results["best_dev_loss"])
        lines.append(f"Best step: {results['best_step']} (validation loss {loss}).")
    skipped = results.get("skipped_steps")
    if skipped:
        lines.append(f"Skipped steps: {skipped}.")
    lines.append(f"Run directory: {run_dir}")
    return "\n".join(lines)


def scores_summary(scores: Mapping[str, Any]) -> str:
    """Return the scores of `score_run` or `score_model` on one line."""
    what = f"step {scores['step']} of {scores['run']}" if "run" in scores else scores["model"]
    split = {"dev": "validation"}.get(scores["split"], scores["split"])
    parts = [f"{scores['metric']} {scores['score']:.3f} on {scores['num_examples']} {split} examples"]
    if scores["majority_class"] is not None:
        parts.append(f"majority class {scores['majority_class']:.3f}")
    if scores["loss"] == scores["loss"]:  # a loss that was not measured is NaN
        parts.append(f"loss {number(scores['loss'])}")
    return f"{what}: {', '.join(parts)}"
