"""What a run asks at named points, because other launches may take part in it.

A launch is what one command starts: one rank or many. Most runs have one launch, and `SingleLaunch`
does what is due at once. With `elastic.lighthouse`, several launches do the steps of a run
together, and one of them evaluates while the others go on: `ReplicaMembership` in elastic.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from lezo_ds.journal import EvaluationRecord
from lezo_ds.runs.method import StepMetrics
from lezo_ds.runs.signals import Stopped

if TYPE_CHECKING:
    from lezo_ds.runs.run import Run


class Membership(ABC):
    """Which launch does what of a run, and when. The head of run.py has the order of the calls.

    Each method is a collective of this launch. `begin`, `evaluate_and_save` and `finish` may raise
    `Stopped`.
    """

    @abstractmethod
    def open(self, run: Run) -> None:
        """Open the run's records, and bring the engine to the step at which this launch begins."""

    @abstractmethod
    def begin(self, run: Run) -> None:
        """Score the base model, if this launch is the one to do it, and get ready for steps."""

    @abstractmethod
    def evaluate_and_save(self, run: Run) -> None:
        """Do the evaluation and write the snapshot that are due at this step, if any."""

    @abstractmethod
    def step(self, run: Run) -> StepMetrics:
        """Bring the run forward by a step, and return the numbers of the newest step."""

    @abstractmethod
    def finish(self, run: Run) -> None:
        """Wait, after the last step, until all evaluations of the run are recorded here."""

    @abstractmethod
    def record(self, run: Run, evaluation: EvaluationRecord) -> None:
        """See that an evaluation that this launch has done is recorded."""


class SingleLaunch(Membership):
    """The only launch of a run. It does everything, as soon as it is due."""

    def open(self, run: Run) -> None:
        run.method.open()

    def begin(self, run: Run) -> None:
        run.evaluate("test", at=0)

    def evaluate_and_save(self, run: Run) -> None:
        if run.is_validation_due():
            try:
                run.evaluate("dev", at=run.engine.global_steps)
            except Stopped:
                if run.method.needs_snapshot_to_stop:
                    run.save_if_due()
                raise
        run.save_if_due()

    def step(self, run: Run) -> StepMetrics:
        return run.method.step()

    def finish(self, run: Run) -> None:
        pass

    def record(self, run: Run, evaluation: EvaluationRecord) -> None:
        run.method.record(evaluation)
