"""The model of a run, or of a packed run, as a Hugging Face directory: the work behind launch/export.py."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lezo_ds import distributed
from lezo_ds.config import ZEROTH_ORDER
from lezo_ds.errors import LezoError, UserError
from lezo_ds.files import make_directory
from lezo_ds.runs.model_card import model_card
from lezo_ds.runs.packing import recorded_digests, unpack_run
from lezo_ds.runs.restore import RecordedRun, read_run, restore

_ANY_MACHINE = ("deepspeed=null", "partition_size=null")
"""A pack's run need not go on as it was spread over its own machine."""

logger = logging.getLogger(__name__)


def export_run(path: Path, step: str, target: Path, overrides: tuple[str, ...] = ()) -> int:
    """Write a run's model at a step as a Hugging Face directory, with a model card. A collective.

    Args:
        path: the run's directory.
        step: "best", "last" or a number of updates.
        target: directory to make; it must not exist, or be empty.
        overrides: as in `read_run`.

    Returns:
        The number of updates the exported weights have seen.

    Raises:
        UserError: no such run or step, or `target` is in use.
        LezoError: the weights are not those that the run had.
    """
    distributed.init_distributed()

    def look() -> tuple[RecordedRun, int, Mapping[str, str]]:
        _refuse_in_use(target)
        run = read_run(path, overrides)
        return run, run.find_step(step), recorded_digests(run) if run.config.method in ZEROTH_ORDER else {}

    run, number, digests = distributed.on_rank_zero(look)
    _export(run, number, digests, target)
    return number


def export_pack(file: Path, step: str, target: Path, overrides: tuple[str, ...] = ()) -> int:
    """Turn the base model and a pack into the tuned model; `export_run` of a packed run. A collective.

    Args:
        file: the pack.
        step: as in `export_run`; the pack has hashes of the best and the last.
        target: as in `export_run`.
        overrides: key=value changes to the run's config, such as model.path: where the base model is here.

    Raises:
        UserError: as `export_run`; the file is not a sound pack; another base model.
        LezoError: the weights are not those that the run had.
    """
    distributed.init_distributed()
    unpacked: list[Path] = []

    def look() -> tuple[RecordedRun, int, Mapping[str, str]]:
        _refuse_in_use(target)
        directory = _make_temporary_directory(target)
        unpacked.append(directory)
        digests = unpack_run(file, directory).digests
        run = read_run(directory, (*_ANY_MACHINE, *overrides))
        return run, run.find_step(step), digests

    try:
        run, number, digests = distributed.on_rank_zero(look)
        _export(run, number, digests, target)
    finally:
        for directory in unpacked:
            shutil.rmtree(directory, ignore_errors=True)
    return number


def _make_temporary_directory(target: Path) -> Path:
    """Make a directory next to `target` under a name that nobody could have made before."""
    try:
        make_directory(target.parent)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UserError(
            f"{target} cannot be written",
            got=str(error),
            expected="a directory that can be made",
            fix="give another --out",
        ) from error


def _refuse_in_use(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"{target} exists",
            expected="a directory that does not, or is empty",
            fix="give another --out",
        )


def _export(run: RecordedRun, step: int, digests: Mapping[str, str], target: Path) -> None:
    engine = restore(run, step)
    digest = engine.weights.digest()
    expected = digests.get(str(step), digest)
    if digest != expected:
        raise LezoError(
            f"the weights of step {step} are not those that the run had; got: {digest}; "
            f"expected: {expected}; fix: use the package's version and the settings of the run"
        )
    if distributed.rank() == 0:
        known = "as the run had them" if str(step) in digests else "whose hash the run did not keep"
        logger.info("weights %s, %s", digest, known)
    engine.write_model(target, distributed.on_rank_zero(lambda: model_card(run, step, digest)))
