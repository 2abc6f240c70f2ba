"""The trackers that a run reports to: checked before the weights load, and of no harm to the run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec

from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, make_directory
from lezo_ds.trackers import TRACKERS, RunFacts, Tracker

logger = logging.getLogger(__name__)


def check_trackers(names: Sequence[str] | None) -> None:
    """Refuse trackers whose libraries are not installed, and those that would not open.

    Args:
        names: `train.report_to`.

    Raises:
        UserError: the first of them.
    """
    for name in names or ():
        tracker = TRACKERS.find(name)
        library = tracker.library
        if library is not None and find_spec(library) is None:
            raise UserError(
                f"train.report_to names {name}, which is not installed",
                got=f"no package {library}",
                expected=f"the package {library}",
                fix=f"pip install {library}, or remove {name} from train.report_to",
            )
        with _failures_named(name):
            tracker.check()


class Trackers:
    """Some trackers of a run. One that fails is dropped with a warning, and the run goes on.

    Args:
        names: `train.report_to`.
        run: the run. Its folder is created if there is a tracker.

    Raises:
        UserError: a tracker cannot be opened.
    """

    def __init__(self, names: Sequence[str] | None, run: RunFacts) -> None:
        self._open: dict[str, Tracker] = {}
        for name in names or ():
            with failures_named(run.folder):
                make_directory(run.folder)
            with _failures_named(name):
                self._open[name] = TRACKERS.find(name)(run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Give the values of a step or an evaluation to all trackers."""
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(step, values)
            except Exception as error:
                self._drop(name, error)

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self._open.items()):
            try:
                with redirect_stdout(sys.stderr):
                    tracker.close()
            except Exception as error:
                self._drop(name, error)
        self._open.clear()

    def _drop(self, name: str, error: Exception) -> None:
        del self._open[name]
        text = "%s failed and gets no more metrics, which metrics.jsonl keeps: %s: %s"
        logger.warning(text, name, type(error).__name__, error)


@contextmanager
def _failures_named(name: str) -> Iterator[None]:
    try:
        with redirect_stdout(sys.stderr):  # stdout is for the results
            yield
    except Exception as error:  # services raise many types
        raise UserError(
            f"train.report_to names {name}, which cannot be opened",
            got=f"{type(error).__name__}: {error}",
            expected=f"a {name} that works",
            fix=f"set it up, or remove {name} from train.report_to",
        ) from error
