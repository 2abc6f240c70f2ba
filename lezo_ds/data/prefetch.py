"""The batches of a run's steps, laid out ahead by a thread.

    main thread     step 0          | step 1          | step 2          | ...
    other thread      lays out 1    |   lays out 2    |   lays out 3    |

A rank reads few of a step's micro-batches: those of its forward passes, and those of the rank that
it watches. The thread lays out the ones that were read in the step before the current one. Any
other is laid out when it is read, as without this module, so a wrong guess costs time only.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from lezo_ds.config import RunConfig
from lezo_ds.data.task_data import TaskData
from lezo_ds.forward.batch import MicroBatch, StepBatch


class StepBatches:
    """The batches of the steps of a run, which are those of `TaskData.step_batch`.

    The thread ends with the process, or when this object is gone.
    """

    def __init__(self, data: TaskData, config: RunConfig) -> None:
        self._data = data
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lezo_ds batches")
        self._current: _RecordedBatch | None = None
        self._next: Future[_RecordedBatch] | None = None
        self._next_step = 0

    def at(self, step: int) -> StepBatch:
        """Return the batch of a step, and start to lay out the next one.

        An error of the thread is raised here, at the step whose batch it was laying out.
        """
        indices: frozenset[int] = frozenset()
        if self._current is not None:
            indices = frozenset(self._current.read)
        if self._next is not None and self._next_step == step:
            self._current = self._next.result()
        else:  # the first step here, or one that is repeated
            self._current = self._laid_out(step, ())
        self._next_step = step + 1
        self._next = self._thread.submit(self._laid_out, step + 1, indices)
        return self._current.batch

    def _laid_out(self, step: int, indices: Iterable[int]) -> _RecordedBatch:
        """Return the batch of a step, with the micro-batches at `indices` laid out."""
        batch = self._data.step_batch(self._config, step)
        for index in indices:
            if index < len(batch):
                batch[index]
        return _RecordedBatch(batch)


class _RecordedBatch:
    """A batch, and the indices of its micro-batches that have been read."""

    def __init__(self, batch: StepBatch) -> None:
        self.read: set[int] = set()
        self._source = batch
        self.batch = StepBatch(batch.weights, self._read, batch.content)

    def _read(self, index: int) -> MicroBatch:
        self.read.add(index)
        return self._source[index]
