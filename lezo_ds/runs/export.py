"""Write the model of a run, or of a packed run, as a Hugging Face directory, for lezo-ds export."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from lezo_ds import distributed
from lezo_ds.config import ZEROTH_ORDER
from lezo_ds.errors import LezoError, UserError
from lezo_ds.files import make_directory
from lezo_ds.runs.model_card import model_card
from lezo_ds.runs.pack import read_pack, recorded_digests
from lezo_ds.runs.restore import RecordedRun, read_run, restore
from lezo_ds.runs.run_directory import refuse_unwritable

_ANY_MACHINE = ("deepspeed=null", "partition_size=null")
"""A packed run need not be sharded here as it was on the machine that made it."""

logger = logging.getLogger(__name__)


def export_run(path: Path, step: str, target: Path, overrides: tuple[str, ...] = ()) -> int:
    """Write a run's model at a step as a Hugging Face directory with a model card. A collective.

    Args:
        path: directory of the run.
        step: "best", "last" or a number of updates.
        target: directory to create. It must not exist, or must be empty.
        overrides: key=value changes to the run's configuration; see `read_run`.

    Returns:
        The number of updates that the exported weights have seen.

    Raises:
        UserError: there is no such run or step, or `target` is in use.
        LezoError: the weights differ from those that the run had.
    """
    distributed.init_distributed()

    def find() -> tuple[RecordedRun, int, Mapping[str, str]]:
        _refuse_in_use(target)
        run = read_run(path, overrides)
        return run, run.find_step(step), recorded_digests(run) if run.config.method in ZEROTH_ORDER else {}

    run, number, digests = distributed.on_rank_zero(find)
    _export(run, number, digests=digests, target=target)
    return number


def export_pack(file: Path, step: str, target: Path, overrides: tuple[str, ...] = ()) -> int:
    """Do what `export_run` does for a packed run and its base model. A collective.

    Args:
        file: the pack.
        step: as in `export_run`. The pack has digests of the best step, the last one and each snapshot.
        target: as in `export_run`.
        overrides: key=value changes to the run's configuration, such as model.path for the base model.

    Raises:
        UserError: as in `export_run`, or the file is not a valid pack, or the base model is another one.
        LezoError: the weights differ from those that the run had.
    """
    distributed.init_distributed()
    with ExitStack() as cleanup:

        def find() -> tuple[RecordedRun, int, Mapping[str, str]]:
            _refuse_in_use(target)
            with refuse_unwritable(str(target), option="--out"):
                make_directory(target.parent)
                unpacked = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
            directory = Path(cleanup.enter_context(unpacked))
            run, pack = read_pack(file, directory, (*_ANY_MACHINE, *overrides))
            return run, run.find_step(step), pack.digests

        run, number, digests = distributed.on_rank_zero(find)
        _export(run, number, digests=digests, target=target)
    return number


def _refuse_in_use(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"{target} exists",
            expected="a directory that does not exist or is empty",
            fix="give another --out",
        )


def _export(run: RecordedRun, step: int, digests: Mapping[str, str], target: Path) -> None:
    engine = restore(run, step)
    digest = engine.weights.digest()
    expected = digests.get(str(step))
    if expected not in (None, digest):
        raise LezoError(
            f"the weights of step {step} differ from those that the run had; got: {digest}; "
            f"expected: {expected}; fix: use the same package version and settings as the run"
        )
    if distributed.rank() == 0:
        known = "no digest in the run to compare with" if expected is None else "the same as in the run"
        logger.info("digest of the weights: %s (%s)", digest, known)
    engine.write_model(target, distributed.on_rank_zero(lambda: model_card(run, step, digest)))
