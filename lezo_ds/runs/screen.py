"""What a run shows on the screen: progress, and short summaries with rounded numbers."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from lezo_ds.errors import cut
from lezo_ds.journal import EvaluationRecord
from lezo_ds.runs.results import RunResults

if TYPE_CHECKING:  # `export` starts without the libraries of data
    from lezo_ds.data.score import EvaluationResult

T = TypeVar("T")

WORSE = "Worse than before training: no step has a lower validation loss than the base model"

_SPLITS = {"dev": "validation", "test": "test"}
"""Names of splits as a user reads them."""

_LINE_FORMAT = "{unit} {n_fmt}/{total_fmt}: {rate_fmt}, {remaining} left{postfix}"
_LINE_SECONDS = 20
_SHOWN_ANSWER = 80  # characters


class _Lines(tqdm):  # type: ignore[type-arg]  # a class of stubs only
    """A bar each of whose states is a line, from the first progress on."""

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> None:
        # After a line of the log, tqdm shows the state again, without a lock.
        if self.n > self.initial and not nolock:
            self.fp.write(f"{self}\n")

    def clear(self, nolock: bool = False) -> None:
        """Leave what is written."""

    def close(self) -> None:
        """Write no last state."""
        self.disable = True


def progress_bar(
    num_total: int, *, num_done: int = 0, is_shown: bool, unit: str = "step"
) -> tqdm[Any]:
    """Return a bar on a terminal; elsewhere, it writes a line every 20 seconds.

    Args:
        num_total: number of steps, or other units.
        num_done: number of those that earlier processes have done.
        is_shown: whether this rank shows anything.
        unit: what is counted.
    """
    is_terminal = sys.stderr.isatty()
    bar = tqdm if is_terminal else _Lines
    return bar(
        total=num_total,
        initial=num_done,
        disable=not is_shown,
        unit=unit,
        smoothing=0.05,
        bar_format=None if is_terminal else _LINE_FORMAT,
        mininterval=0.1 if is_terminal else _LINE_SECONDS,
        leave=is_terminal,
    )


def unclocked(bar: tqdm[Any], work: Callable[[], T]) -> T:
    """Return what some work returns. Its time does not count for the rate that a bar shows."""
    began = time.time()
    result = work()
    if not bar.disable:
        seconds = time.time() - began
        bar.start_t += seconds
        bar.last_print_t += seconds
    return result


def number(value: float | None) -> str:
    """Return a number with four significant digits; None is one that was not finite."""
    return "not finite" if value is None else f"{value + 0.0:.4g}"  # 0 for -0


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds, such as 2:05:00."""
    return str(timedelta(seconds=round(seconds)))


def evaluation_line(evaluation: EvaluationRecord, metric: str) -> str:
    """Return an evaluation as one line of a log."""
    of_screen = {metric, "macro_f1"} & evaluation.metrics.keys()
    scores = ", ".join(f"{name} {evaluation.metrics[name]:.3f}" for name in sorted(of_screen))
    # The loss of a test split is None if it was not measured, and that of a validation is measured.
    if evaluation.loss is not None or evaluation.split == "dev":
        scores = f"loss {number(evaluation.loss)}, {scores}"
    return f"step {evaluation.step}: {_SPLITS[evaluation.split]} {scores}"


def samples_line(result: EvaluationResult) -> str:
    """Return the share of answers that ended, and an answer with its reward, as a log line."""
    sample = result.samples[0]
    answer = cut(" ".join(sample["answer"].split()), _SHOWN_ANSWER)
    reward = "no reward" if sample["reward"] is None else f"reward {number(sample['reward'])}"
    return f"{result.numbers['share_ended']:.0%} of the answers ended; {reward} for {answer!r}"


def run_summary(run_dir: str, results: RunResults) -> str:
    """Return what a user wants to know at the end of a run, in a few lines."""
    seconds = duration(results.seconds)
    if not results.finished:
        return (
            f"Stopped after step {results.steps} ({seconds}). The same command continues.\n"
            f"Run directory: {run_dir}"
        )
    early = " (train.patience ran out)" if results.early_stop_step is not None else ""
    lines = [
        f"Finished: {results.steps} steps in {seconds}{early}.",
        f"Test {results.metric}: {number(results.zero_shot)} before, {number(results.test)} after"
        f"{_context(vars(results))}.",
        f"Best step: {results.best_step} (validation loss {number(results.best_dev_loss)}).",
    ]
    if results.worse_than_base:
        advice = "Lower the learning rate, or do more steps."
        if results.flat_steps == results.steps:
            advice = "Change the reward, because it gave all probes the same number."
        lines.append(f"{WORSE}, which is what export writes. {advice}")
    if results.flat_steps > 0:
        lines.append(
            f"All losses or rewards were equal in {results.flat_steps} of {results.steps} steps, "
            "which changed nothing. A finer reward or generation.temperature=1 gives probes "
            "different rewards; a lower zo.learning_rate or a larger zo.perturbation_scale gives "
            "them different losses."
        )
    if results.skipped_steps > 0:
        lines.append(f"Skipped steps: {results.skipped_steps}.")
    return "\n".join([*lines, f"Run directory: {run_dir}"])


def _context(scores: Mapping[str, Any]) -> str:
    """Return the majority class and macro F1 in parentheses, where they are known.

    `scores` are the fields of `RunResults`, or what `score` returns.
    """
    names = {"majority_class": "majority class", "macro_f1": "macro F1"}
    shown = [
        f"{names[name]} {scores[name]:.3f}"
        for name in names
        if scores[name] is not None and scores["metric"] != name
    ]
    return f" ({', '.join(shown)})" if shown else ""


def scores_summary(scores: Mapping[str, Any]) -> str:
    """Return the scores of `score` on one line."""
    source = scores["model"] if "model" in scores else f"step {scores['step']} of {scores['run']}"
    examples = f"{scores['num_examples']} {_SPLITS[scores['split']]} examples"
    shown = ""
    if scores["num_demonstrations"]:
        shown = f" after {scores['num_demonstrations']} solved ones"
    loss = "" if math.isnan(scores["loss"]) else f", loss {number(scores['loss'])}"
    return (
        f"{source}, task {scores['task']}: {scores['metric']} {scores['score']:.3f} on "
        f"{examples}{shown}{_context(scores)}{loss}"
    )
