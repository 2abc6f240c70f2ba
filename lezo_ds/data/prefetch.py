"""The batches of a run's steps, laid out ahead by a thread.

    main thread     step 0          | step 1          | step 2          | ...
    other thread      lays out 1    |   lays out 2    |   lays out 3    |

A rank reads few of a step's micro-batches: those of its forward passes. The thread lays out the
ones that were read in the step before the current one. Any other is laid out when it is read, as
without this module, so a wrong guess costs time only.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from lezo_ds.config import RunConfig
from lezo_ds.data.task_data import TaskData
from lezo_ds.forward.batch import StepBatch


class StepBatches:
    """The batches of the steps of a run, which are those of `TaskData.step_batch`.

    The thread ends with the process, or when this object is gone.
    """

    def __init__(self, data: TaskData, config: RunConfig) -> None:
        self._data = data
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lezo_ds batches")
        self._current: StepBatch | None = None
        self._ahead: dict[int, Future[StepBatch]] = {}  # the next step, and its batch

    def at(self, step: int) -> StepBatch:
        """Return the batch of a step, and start to lay out the next one.

        An error of the thread is raised here, at the step whose batch it was laying out.
        """
        last_read = [] if self._current is None else list(self._current.read)
        if step in self._ahead:
            self._current = self._ahead[step].result()
        else:  # the first step here, or one that is repeated
            self._current = self._data.step_batch(self._config, step)
        self._ahead = {step + 1: self._thread.submit(self._laid_out, step + 1, last_read)}
        return self._current

    def _laid_out(self, step: int, indices: Iterable[int]) -> StepBatch:
        """Return the batch of a step, with the micro-batches at `indices` laid out."""
        batch = self._data.step_batch(self._config, step)
        for index in indices:
            batch[index]
        batch.read.clear()  # what the step itself reads is added again
        return batch
