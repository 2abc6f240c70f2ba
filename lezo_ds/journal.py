"""The journal: a write-ahead log from which the weights after every step can be rebuilt.

Rank 0 writes the line of a step before any rank applies the step. The lines are a header, then steps,
numbered from 0 without gaps, and evaluations; docs/file-formats.md describes them. The checksum of each
continues that of the line before. A last line without newline was cut short by a crash and is dropped, as
nothing on the disk depends on its step. Any other damage is an error.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from lezo_ds.errors import JournalError, UserError
from lezo_ds.files import failures_named, write_atomically
from lezo_ds.zo.records import StepRecord, check_finite

FORMAT = 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation after `step` steps: mean loss (None if not finite or not measured), scores by name."""

    step: int
    split: str
    loss: float | None
    metrics: dict[str, float]

    def __post_init__(self) -> None:
        if type(self.step) is not int or not isinstance(self.split, str):
            raise ValueError(f"step {self.step!r} or split {self.split!r} has another type")
        check_finite(*([] if self.loss is None else [self.loss]), *self.metrics.values())


JournalRecord = StepRecord | EvaluationRecord


@dataclass(frozen=True, kw_only=True)
class Header:
    """The inputs of a run, without which its steps mean nothing. `arithmetic` only serves warnings."""

    noise_version: int
    model_fingerprint: str
    parameter_table_hash: str
    config: dict[str, Any]
    libraries: dict[str, str]
    arithmetic: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hashes, facts = (
            (self.model_fingerprint, self.parameter_table_hash),
            self.libraries | self.arithmetic,
        )
        strings = all(isinstance(value, str) for value in (*hashes, *facts.values()))
        if not (strings and type(self.noise_version) is int and isinstance(self.config, dict)):
            raise ValueError("a value of the header has another type")
        # The round trip makes a new header equal to the same header read from a file.
        object.__setattr__(self, "config", json.loads(_to_json(self.config, sort_keys=True)))


class Journal(AbstractContextManager["Journal"]):
    """A journal that is open for appending: made by `create` or `open`, closed by `close` or a `with`."""

    def __init__(
        self, path: Path, header: Header, records: list[JournalRecord], marks: list[_Mark]
    ) -> None:
        self.header = header
        self._path = path
        self._records = records
        self._marks = marks  # one after the header, and one after each record
        self._num_synced = len(records)
        self._thread = ThreadPoolExecutor(1, "journal-sync")
        self._syncing: Future[None] | None = None
        self._file = -1
        with self._failures():
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
            self._shorten()  # syncs an intact file too: a writer may have died between a write and its sync
            self._inode = os.fstat(self._file).st_ino

    @classmethod
    def create(cls, path: Path, header: Header) -> Self:
        """Start a journal. The file appears with a complete, synced header, or not at all."""
        if path.exists():
            raise UserError(
                f"the journal {path} already exists", fix="resume that run, or set run_dir"
            )
        with failures_named(path, JournalError):
            write_atomically(path, _encode(header, 0)[0])
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a journal for appending. A torn last line is dropped with a warning."""
        path = path.absolute()  # the working directory may change
        (header, *records), marks = map(list, zip(*scan_journal(path), strict=True))
        if path.stat().st_size > marks[-1].end:
            text = "%s line %d: the last write was cut short; last good step: %s"
            logger.warning(text, path, len(marks) + 1, marks[-1].last_step)
        return cls(path, header, records, marks)

    @property
    def records(self) -> tuple[JournalRecord, ...]:
        """All records, oldest first."""
        return tuple(self._records)

    @property
    def checksums(self) -> tuple[str, str]:
        """The crc of the header and of the last line, which depends on all lines."""
        return f"{self._marks[0].crc:08x}", f"{self._marks[-1].crc:08x}"

    def append(self, record: JournalRecord, *, wait: bool = True) -> None:
        """Write the next record. Without `wait`, a thread syncs it: a power cut can lose it alone.

        Raises ValueError for a record out of order, and JournalError if this record or the last one cannot be
        written, or if another process changed the file. The file then ends with the last synced record.
        """
        self.sync()
        line, crc = _encode(record, self._marks[-1].crc)
        self._write(line, [record], [self._marks[-1].after(record, len(line), crc)])
        if wait:
            self.sync()

    def extend(self, lines: bytes) -> list[JournalRecord]:
        """Append and sync the next lines of another copy, and return their records. JournalError: damage."""
        self.sync()
        records: list[JournalRecord] = []
        marks = self._marks[-1:]
        try:
            for line in lines.split(b"\n")[:-1]:
                record, crc = _decode(line, marks[-1].crc)
                records.append(record)
                marks.append(marks[-1].after(record, len(line) + 1, crc))
        except ValueError as error:
            raise JournalError(
                f"a replica sends damaged lines: {error}; fix: restart it"
            ) from error
        self._write(lines[: marks[-1].end - marks[0].end], records, marks[1:])
        self.sync()
        return records

    def _write(self, lines: bytes, records: list[JournalRecord], marks: list[_Mark]) -> None:
        with self._failures():
            self._assert_unchanged()
            rest = lines
            while (
                rest
            ):  # on a full disk, the first write may be partial; the next one raises the error
                rest = rest[os.write(self._file, rest) :]
        self._records += records
        self._marks += marks
        self._syncing = self._thread.submit(os.fsync, self._file)

    def sync(self) -> None:
        """Wait until every record is synced. Remove one that cannot be (JournalError)."""
        syncing, self._syncing = self._syncing, None
        with self._failures():
            if syncing is not None:
                syncing.result()
        self._num_synced = len(self._records)

    def cut(self, num_steps: int) -> None:
        """Keep the first steps and the evaluations up to them. Move the rest to `<name>.damaged`."""
        self.sync()
        is_late = [r.step + isinstance(r, StepRecord) > num_steps for r in self._records]
        if not any(is_late):
            return
        num_kept = is_late.index(True)
        with self._failures():
            self._assert_unchanged()
            damaged = self._path.with_name(f"{self._path.name}.damaged")
            earlier = damaged.read_bytes() if damaged.exists() else b""
            # The copy is synced before the journal gets shorter, so a crash between the two loses nothing.
            write_atomically(
                damaged, earlier + self._path.read_bytes()[self._marks[num_kept].end :]
            )
            self._num_synced = num_kept
            self._shorten()

    def close(self) -> None:
        """Sync and close the file. The records stay readable, but nothing can be appended."""
        if self._file < 0:
            return
        try:
            self.sync()
        finally:
            self._thread.shutdown()
            os.close(self._file)
            self._file = -1

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _assert_unchanged(self) -> None:
        status = self._path.stat()
        if (status.st_ino, status.st_size) != (self._inode, self._marks[-1].end):
            raise JournalError(
                f"{self._path} was changed by another process; last good step: {self._marks[-1].last_step}; "
                "fix: stop the other run in this directory, then run the same command again"
            )

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Remove what is not synced after an OSError, and name the file."""
        try:
            yield
        except OSError as error:
            with suppress(OSError):  # the next `open` drops what is left of a line
                self._shorten()
            raise JournalError(
                f"{self._path} cannot be written: {error.strerror}; "
                f"last good step: {self._marks[-1].last_step}; "
                "fix: free space on its disk and check that it is writable, then run the same command again"
            ) from error

    def _shorten(self) -> None:
        """End the file after the last record that is synced."""
        del self._records[self._num_synced :], self._marks[self._num_synced + 1 :]
        os.ftruncate(self._file, self._marks[-1].end)
        os.fsync(self._file)


def read_journal(path: Path) -> tuple[Header, list[JournalRecord]]:
    """Read a journal without changing it, even while it grows: an incomplete last line is left out."""
    header, *records = (
        item for item, _ in scan_journal(path)
    )  # without marks, which take as much memory
    return header, records


def encode_journal(header: Header, records: Iterable[JournalRecord]) -> bytes:
    """Return the content of a journal with this header and these records."""
    lines, crc = [], 0
    for item in (header, *records):
        line, crc = _encode(item, crc)
        lines.append(line)
    return b"".join(lines)


def step_checksums(header: Header, records: Iterable[JournalRecord]) -> tuple[str, ...]:
    """Return the chained checksums after 0, 1, ... steps, without those of evaluations."""
    checksums, crc = [], 0
    for item in (header, *records):
        crc = _encode(item, crc)[1]
        if not isinstance(item, EvaluationRecord):
            checksums.append(f"{crc:08x}")
    return tuple(checksums)


@dataclass(frozen=True, slots=True)
class _Mark:
    """The end of a line in the file, the crc of that line, and the number of steps up to it."""

    end: int = 0
    crc: int = 0
    num_steps: int = 0

    @property
    def last_step(self) -> str:
        return str(self.num_steps - 1) if self.num_steps else "none"

    def after(self, item: Header | JournalRecord | None, length: int, crc: int) -> _Mark:
        """Return the mark after the line of an item. ValueError if the item cannot be there."""
        if isinstance(item, Header) != (self.end == 0):
            raise ValueError("it is a second header" if self.end else "it is not a complete header")
        if isinstance(item, StepRecord) and item.step != self.num_steps:
            raise ValueError(f"its step is {item.step}, the next one is {self.num_steps}")
        if isinstance(item, EvaluationRecord) and not 0 <= item.step <= self.num_steps:
            raise ValueError(f"it evaluates after {item.step} steps, {self.num_steps} are recorded")
        return _Mark(self.end + length, crc, self.num_steps + isinstance(item, StepRecord))


def scan_journal(path: Path, max_line: int = -1) -> Iterator[tuple[Any, _Mark]]:
    """Yield the header and each record with its mark, from one line in memory (of less than `max_line`)."""
    mark, number = _Mark(), 1
    try:
        with path.open("rb") as file:
            while (
                (line := file.readline(max_line)).endswith(b"\n")
                or not mark.end
                or len(line) == max_line
            ):
                if len(line) == max_line:
                    raise ValueError(f"it has {max_line} bytes or more")
                item, crc = _decode(line[:-1], mark.crc) if line.endswith(b"\n") else (None, 0)
                mark, number = mark.after(item, len(line), crc), number + 1
                yield item, mark
    except OSError as error:
        fix = "use the directory of a run that has a journal"
        raise UserError(f"the journal {path} cannot be read: {error.strerror}", fix=fix) from error
    except (ValueError, RecursionError) as error:
        keep = f", or keep its first {mark.end} bytes (head -c)" if mark.end else ""
        raise JournalError(
            f"{path} line {number} is damaged: {error}; last valid step: {mark.last_step}; "
            f"fix: restore the file from a copy (in binary mode){keep}"
        ) from error


_KINDS: dict[str, Any] = {"header": Header, "step": StepRecord, "evaluation": EvaluationRecord}
_NAMES = {
    "dropped_layers": "dropped",
    "projected_grads": "gradients",
    "learning_rate": "lr",
    "perturbation_scale": "scale",
    "layer_weights": "weights",
}
_FIELDS = {name: attribute for attribute, name in _NAMES.items()}
_LEFT_OUT = {"loss": None, "applied": True, "layer_weights": ()}


def _encode(item: Header | JournalRecord, previous_crc: int) -> tuple[bytes, int]:
    """Return the line of an item, with its newline, and the line's crc."""
    if isinstance(item, StepRecord):
        fields = {
            name: value for name, value in vars(item).items() if value != _LEFT_OUT.get(name, "")
        }
        members = {
            "kind": "step",
            **{_NAMES.get(name, name): value for name, value in fields.items()},
        }
    elif isinstance(item, EvaluationRecord):
        members = {"kind": "evaluation", **vars(item)}
    else:
        members = {"kind": "header", "format": FORMAT, **vars(item)}
    body = _to_json(members).encode()
    crc = zlib.crc32(body, previous_crc)
    return body[:-1] + b',"crc":"%08x"}\n' % crc, crc


def _decode(line: bytes, previous_crc: int) -> tuple[Any, int]:
    """Return the item of a line without its newline, and the line's crc. ValueError if it is damaged."""
    body, _, stored = line.rpartition(b',"crc":')
    crc = zlib.crc32(body + b"}", previous_crc)
    if stored != b'"%08x"}' % crc:
        raise ValueError("its checksum does not match")
    members = json.loads(str(body + b"}", "utf-8"))
    kind = members.pop("kind", None)
    if kind == "header" and (version := members.pop("format", 0)) != FORMAT:
        what = (
            f"the journal has format {version}, and this version of lezo_ds reads format {FORMAT}"
        )
        raise UserError(what, fix="use the version of lezo_ds that wrote it")
    if kind == "step":  # every list was a tuple
        named = ((_FIELDS.get(name, name), value) for name, value in members.items())
        members = {
            name: tuple(value) if isinstance(value, list) else value for name, value in named
        }
    try:
        return _KINDS[kind](**members), crc
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"its members are not those of format {FORMAT}: {error!r}") from error


def _to_json(value: object, *, sort_keys: bool = False) -> str:
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
