r"""Label the records of a file with a model, for lezo-ds predict.

Records are predicted in chunks. Until the output is complete, the predictions are in a folder:

    OUT.part/
        .lock                names the process that works here
        chunk-0-HASH.json    [row, ...]: a row has the predicted fields of a record. HASH is of all
        chunk-1-HASH.json    that they depend on: the chunk's records, the settings, the weights

The same command continues a killed one with the chunks that are missing. A chunk counts as long as
its own records stay the same, so another record may be corrected meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lezo_ds import distributed
from lezo_ds.data.described import find_task
from lezo_ds.data.examples import Example
from lezo_ds.data.reader import load_reader
from lezo_ds.data.records import read_records, suffix_of, write_records
from lezo_ds.data.score import PREDICTED, PROBABILITY, predict
from lezo_ds.data.splits import checked_example, json_text
from lezo_ds.data.tasks import Task
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, remove_directory, write_output
from lezo_ds.runs.cross_check import check_scoring
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.opening import Opened, recipe_of
from lezo_ds.runs.screen import progress_bar

_BATCHES_A_CHUNK = 32  # a kill costs at most one chunk


def predict_file(
    opened: Opened,
    source: Path,
    out: Path,
    *,
    probabilities: bool = False,
    threshold: float = 0.0,
) -> int:
    """Label the records of a file, or continue to. A collective.

    Args:
        opened: the model, and how its records become inputs.
        source: the records, which need no right answers.
        out: becomes a file of the same kind and order, with `predicted`: the text of the label, the
            chosen candidate, or the written answer. A candidate also has a `probability` (see
            data.score.predict).
        probabilities: whether the output also has the probability of each label.
        threshold: below this probability, `predicted` is "".

    Returns:
        The number of records.

    Raises:
        UserError: a record does not fit the task, `out` exists, OUT.part is in use, or a task
            without labels has probabilities or a threshold.
        LezoError: the output cannot be written.
    """
    opened.refuse_code("data.task")
    config = opened.config
    data = config.data
    label_field = data.label_field
    if label_field is None and (data.labels or data.choices):
        label_field = "label"  # that of the right answer, if records have one
    # No user metric is needed. Each record needs its row in the output.
    changes = {"metric": None, "label_field": label_field, "skip_unusable": False}
    config = config.with_section("data", **changes)
    data = config.data
    task = find_task(data).unanswered()
    if (probabilities or threshold) and not task.has_classes:
        raise UserError(
            f"--probabilities and --threshold are about labels, and {task.kind} has none",
            fix="remove them",
        )
    _refuse_output(source, out)
    records = list(read_records(str(source), data.separator, data.encoding))
    _refuse_taken(records)
    examples = [_example(task, number, record) for number, record in enumerate(records)]
    reader = load_reader(task, config)
    batch_size = config.train.eval_batch_size
    size = _BATCHES_A_CHUNK * batch_size
    folder = RunDirectory(f"{out}.part")
    rows: list[dict[str, Any]] = []
    with ExitStack() as lock:
        distributed.on_rank_zero(lambda: lock.enter_context(folder.locked()))
        engine = opened.load_engine()
        settings = [probabilities, threshold, recipe_of(config), batch_size]
        settings.append(engine.weights.digest())
        with progress_bar(len(records), is_shown=distributed.rank() == 0, unit="record") as bar:
            for start in range(0, len(records), size):
                of_chunk = records[start : start + size]
                chunk = folder.path / f"chunk-{start // size}-{_digest(settings, of_chunk)}.json"
                if not distributed.on_rank_zero(chunk.is_file):
                    split = reader.encode(examples[start : start + size])
                    if start == 0:
                        check_scoring(engine, reader, split, config)
                    found = predict(
                        engine,
                        reader,
                        split,
                        batch_size,
                        probabilities=probabilities,
                        threshold=threshold,
                    )
                    distributed.on_rank_zero(partial(write_output, chunk, json.dumps(found)))
                rows += json.loads(distributed.on_rank_zero(chunk.read_text))
                bar.update(len(of_chunk))
        labelled = [record | row for record, row in zip(records, rows, strict=True)]

        def write() -> None:
            with failures_named(out):
                write_records(out, labelled, source, data.separator, data.encoding)
            remove_directory(folder.path)

        distributed.on_rank_zero(write)
    return len(records)


def _example(task: Task, number: int, record: dict[str, Any]) -> Example:
    """Return the example of a record. UserError: it does not fit the task."""
    try:
        return replace(checked_example(task, json_text(record)), index=number)
    except UserError as error:
        raise UserError(f"record {number + 1}: {error}") from error


def _refuse_output(source: Path, out: Path) -> None:
    if out.exists():
        raise UserError(f"--out {out} exists", fix="set another --out")
    if suffix_of(out) != suffix_of(source):
        raise UserError(
            f"--out {out} is not of the kind of {source}, {suffix_of(source)}",
            fix="set another --out",
        )


def _refuse_taken(records: Sequence[dict[str, Any]]) -> None:
    """Refuse a field that the output would overwrite."""
    for name in {name for record in records for name in record}:
        if name == PREDICTED or name.startswith(PROBABILITY):
            raise UserError(f"the records already have a field {name}", fix="rename it")


def _digest(settings: Sequence[Any], records: Sequence[dict[str, Any]]) -> str:
    """Return a hash of what the predictions of some records depend on."""
    # Parquet may hold dates and bytes, which are hashed as text.
    content = json.dumps([settings, records], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()
