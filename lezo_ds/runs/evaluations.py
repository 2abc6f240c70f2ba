"""The evaluations of a run: what is recorded and shown of each, which is best, and when to stop."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lezo_ds.errors import UserError
from lezo_ds.journal import EvaluationRecord, JournalRecord
from lezo_ds.sharding.weights import AT_ENDS_BY_QUANTIZATION

if TYPE_CHECKING:  # `export` starts without the libraries of data
    from lezo_ds.data.score import EvaluationResult

logger = logging.getLogger(__name__)

_MORE_AT_ENDS = 0.01
"""Share of codes that updates may bring to an end of their grid without a warning."""

Numbers = dict[str, float | bool | None]
"""Numbers of a step or an evaluation, by the names that they have in metrics.jsonl."""


def refuse_unjudged(result: EvaluationResult, split: str) -> None:
    """Raise UserError if no answer to the examples of a split has a reward, and so no score."""
    if not math.isfinite(result.score):
        raise UserError(
            f"train.objective gives no answer of the split {split} a finite reward",
            fix="return a number for some of them, or correct the weights of the rewards",
        )


def evaluation_record(
    metric: str, split: str, step: int, result: EvaluationResult
) -> EvaluationRecord:
    """Return what a journal has of an evaluation after `step` steps."""
    scores = {
        metric: result.score,
        "majority_class": result.majority_class,
        "macro_f1": result.macro_f1,
        **{f"rewards/{name}": mean for name, mean in result.rewards.items()},
    }
    metrics = {name: score for name, score in scores.items() if score is not None}
    loss = result.loss if math.isfinite(result.loss) else None
    return EvaluationRecord(step=step, split=split, loss=loss, metrics=metrics)


def numbers_of(
    evaluation: EvaluationRecord, result: EvaluationResult, at_ends: float | None
) -> Numbers:
    """Return what metrics.jsonl has of an evaluation, and warn of codes that cannot move on.

    `at_ends` is the share of the trained codes of 8 bits at an end of their grid.
    """
    numbers: Numbers = {"loss": evaluation.loss, **evaluation.metrics, **result.numbers}
    if at_ends is not None:
        numbers["codes_at_ends"] = at_ends
        if at_ends > AT_ENDS_BY_QUANTIZATION + _MORE_AT_ENDS:
            logger.warning(
                "%.1f %% of the codes of 8 bits are at an end of their grid, where they cannot "
                "move on (%.1f %% by quantization); fix: lower zo.learning_rate, or set "
                "model.bits=null",
                100 * at_ends,
                100 * AT_ENDS_BY_QUANTIZATION,
            )
    return {f"{evaluation.split}_{name}": value for name, value in numbers.items()}


def evaluations_of(records: Iterable[JournalRecord]) -> list[EvaluationRecord]:
    """Return the evaluations among the records of a journal."""
    return [record for record in records if isinstance(record, EvaluationRecord)]


def best_evaluation(
    evaluations: Sequence[EvaluationRecord], first_step: int = 0
) -> EvaluationRecord | None:
    """Return the first evaluation with the lowest validation loss, or None if there is none.

    Only those after at least `first_step` steps count. Step 0 is the base model.
    """
    candidates = [
        evaluation
        for evaluation in evaluations
        if evaluation.split == "dev" and evaluation.step >= first_step
    ]
    return min(candidates, key=_loss, default=None)


def _loss(evaluation: EvaluationRecord) -> float:
    """Return the loss of an evaluation, and infinity if it was not finite."""
    return math.inf if evaluation.loss is None else evaluation.loss


def is_worse_than_base(evaluations: Sequence[EvaluationRecord]) -> bool:
    """Return whether no validation loss after a step was below that of the base model."""
    trained = best_evaluation(evaluations, first_step=1)
    return trained is not None and best_evaluation(evaluations) is not trained


def stopping_step(evaluations: Sequence[EvaluationRecord], patience: int | None) -> int | None:
    """Return the step at which a run loses its patience, or None.

    That is the first one with `patience` validations in a row which are not better than the best
    one before. The first validation after step 0 counts as better, because many runs are worse than
    the base model at first.
    """
    lowest = math.inf
    num_worse = 0
    for evaluation in evaluations:
        if evaluation.split != "dev" or evaluation.step == 0:
            continue
        if _loss(evaluation) < lowest:
            lowest = _loss(evaluation)
            num_worse = 0
        else:
            num_worse += 1
        if num_worse == patience:
            return evaluation.step
    return None
