"""The journal: a write-ahead log from which, with the base weights, every step's weights can be rebuilt.

A zeroth-order update is lr * g * z, and z is a pure function of a seed (MeZO, Malladi et al. 2023, section
2.1), so one short line a step is the whole training state. Rank 0 writes and syncs the line before any rank
applies the update: a crash loses no accepted step.

The file is JSON lines, ASCII, one newline a line, keys sorted, the header first. Each line ends with the
member "crc": eight hexadecimal digits of the CRC-32 of the line without that member, started from the crc of
the line before (0 for the header), so a changed, missing, doubled or moved line is noticed.

A write cut short by a crash leaves a last line without its newline (or NULs after a power cut). It is
dropped: its step was never applied. Any other damage is an error, never a guess.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lezo_ds.errors import JournalError, UserError
from lezo_ds.files import write_atomically
from lezo_ds.zo.records import StepRecord, check_finite

FORMAT_VERSION = 1
"""Of the journal's lines; raised when a reader of the old lines would misread the new ones."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation.

    Args:
        step: number of steps the evaluated weights had seen; 0 is the base model.
        split: which examples, such as "dev" or "test".
        loss: mean loss over them; None when not finite or not measured.
        metrics: finite numbers by name, such as {"accuracy": 0.93}.

    Raises:
        ValueError: a number is not finite.

    """

    step: int
    split: str
    loss: float | None
    metrics: dict[str, float]

    def __post_init__(self) -> None:
        check_finite(self.loss, *self.metrics.values())


Record = StepRecord | EvaluationRecord


@dataclass(frozen=True, kw_only=True)
class Header:
    """What the journal's steps were made from; they mean nothing with anything else.

    Args:
        noise_version: version of the noise function z(key, parameter, element); a text if version 0.1.0 wrote
            it with fast noise, which is refused.
        model_fingerprint: hash of the base model.
        parameter_table_hash: hash of the parameters' names, ids and shapes.
        config: the run's whole config; kept as JSON keeps it (tuples become lists).
        libraries: versions by name.
        format_version: of the file.

    Raises:
        TypeError, ValueError: the config is not plain JSON, or holds a number that is not finite.

    """

    noise_version: int | str
    model_fingerprint: str
    parameter_table_hash: str
    config: dict[str, Any]
    libraries: dict[str, str]
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", json.loads(_to_json(self.config)))


def assert_compatible(header: Header, expected: Header, may_differ: Collection[str] = ()) -> None:
    """Refuse to continue a journal with another model, noise or config than it was begun with.

    Other library versions only cause a warning.

    Args:
        header: the journal's; its config must have the keys of this version (lezo_ds.runs.header).
        expected: what this run would write.
        may_differ: dotted config keys (or whole sections) that may differ, such as "train.steps".

    Raises:
        UserError: naming the first item that differs, both values, and both versions if they differ.

    """
    items: dict[str, tuple[object, object]] = {
        "format version": (header.format_version, expected.format_version),
        "noise version": (header.noise_version, expected.noise_version),
        "model fingerprint": (header.model_fingerprint, expected.model_fingerprint),
        "parameter table": (header.parameter_table_hash, expected.parameter_table_hash),
    }
    versions = _versions(header.libraries.get("lezo_ds"), expected.libraries.get("lezo_ds"))
    for name, (journals, ours) in items.items():
        if journals != ours:
            raise _mismatch(f"the {name}", ours, journals, versions)
    for key, journals, ours in _differences(header.config, expected.config, may_differ):
        raise _mismatch(f"config {key}", ours, journals, versions)
    for key, journals, ours in _differences(header.libraries, expected.libraries, ()):
        logger.warning("%s was %r when the journal was begun and is %r now", key, journals, ours)


class Journal:
    """A journal open for appending; make one with `create` or `open`, close it or use it in a `with`."""

    def __init__(self, path: Path, descriptor: int, content: _Content) -> None:
        self._path = path
        self._descriptor = descriptor
        self._inode = os.fstat(descriptor).st_ino
        self._header = content.header
        self._records = content.records
        self._num_steps = content.num_steps
        self._crc = content.crc
        self._end = content.end

    @classmethod
    def create(cls, path: Path, header: Header) -> Self:
        """Begin a journal: the file appears with its header whole and synced, or not at all.

        Raises:
            UserError: the file exists.
            JournalError: it cannot be written.

        """
        if path.exists():
            raise UserError(
                "the journal exists already",
                got=str(path),
                fix="resume that run, or use another run directory",
            )
        try:
            write_atomically(path, _encode_line(header, 0)[0])
        except OSError as error:
            raise _write_error(path, error, 0) from error
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a journal, drop a torn last line with a warning, and get ready to append.

        Raises:
            UserError: the file is missing, unreadable, or of another format version.
            JournalError: the file is damaged or cannot be written.

        """
        path = path.absolute()  # append looks at it again, perhaps from another working directory
        data = _read(path)
        content = _parse(path, data)
        rest = data[content.end :]
        if content.damage:
            raise _damage_error(path, content, data)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            if rest:
                os.ftruncate(descriptor, content.end)
            os.fsync(descriptor)  # also a last line whose writer was killed before it synced
        except OSError as error:
            raise _write_error(path, error, content.num_steps) from error
        if rest:
            place = f"{path} line {content.num_lines + 1}: dropped {len(rest)} bytes"
            last = _last_step(content.num_steps)
            logger.warning("%s: the last write was cut short; last good step: %s", place, last)
        return cls(path, descriptor, content)

    @property
    def header(self) -> Header:
        """The first line."""
        return self._header

    @property
    def records(self) -> tuple[Record, ...]:
        """All records, oldest first."""
        return tuple(self._records)

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The step records; `steps[t].step == t`."""
        return tuple(record for record in self._records if isinstance(record, StepRecord))

    @property
    def evaluations(self) -> tuple[EvaluationRecord, ...]:
        """The evaluation records, oldest first."""
        return tuple(record for record in self._records if isinstance(record, EvaluationRecord))

    def append(self, record: Record) -> None:
        """Write one record and sync it; once this returns, no crash loses it.

        Raises:
            ValueError: a step that is not the next one, or an evaluation of a step not yet taken.
            JournalError: the disk is full, the file was changed by another process, and the like; the
                file still ends with the record before.

        """
        _check_order(record, self._num_steps)
        line, crc = _encode_line(record, self._crc)
        try:
            self._assert_unchanged()
            self._write(line)
        except OSError as error:
            raise _write_error(self._path, error, self._num_steps) from error
        self._crc = crc
        self._end += len(line)
        self._num_steps += isinstance(record, StepRecord)
        self._records.append(record)

    def cut(self, num_steps: int) -> None:
        """Keep the first steps, and the evaluations after at most so many; the rest goes to `<name>.damaged`.

        For steps that were found to be wrong after they were written: a resumed run does them again.

        Args:
            num_steps: how many steps to keep.

        Raises:
            JournalError: as for `append`.

        """
        wrong = next((i for i, r in enumerate(self._records) if _num_steps_after(r) > num_steps), None)
        if wrong is None:
            return
        try:
            self._assert_unchanged()
            data = self._path.read_bytes()
            end = sum(map(len, data.splitlines(keepends=True)[: 1 + wrong]))
            _save_damaged(self._path, data[end:])
            os.ftruncate(self._descriptor, end)
            os.fsync(self._descriptor)
        except OSError as error:
            raise _write_error(self._path, error, self._num_steps) from error
        content = _parse(self._path, data[:end])
        self._records, self._num_steps = content.records, content.num_steps
        self._crc, self._end = content.crc, content.end

    def close(self) -> None:
        """Close the file; the journal can still be read, not appended to."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _assert_unchanged(self) -> None:
        """Notice a second run in the same directory before it and this one mix their lines."""
        status = self._path.stat()
        if (status.st_ino, status.st_size) != (self._inode, self._end):
            raise JournalError(
                f"{self._path} was changed by another process; last good step: "
                f"{_last_step(self._num_steps)}; fix: stop the other run in this directory, then run "
                "the same command again"
            )

    def _write(self, line: bytes) -> None:
        """Write and sync a line, or leave the file as it was and raise OSError."""
        try:
            rest = line
            while rest:  # a full disk takes a part first; the next write then says why
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError:
            with suppress(OSError):  # a part that stays is dropped when the journal is next opened
                os.ftruncate(self._descriptor, self._end)
                os.fsync(self._descriptor)
            raise


def read_journal(path: Path) -> tuple[Header, list[Record]]:
    """Read a journal without changing it, also while a run appends to it.

    A last line that is not whole (being written, or torn by a crash) is left out.

    Raises:
        UserError: the file is missing, unreadable, or of another format version.
        JournalError: the file is damaged.

    """
    data = _read(path)
    content = _parse(path, data)
    if content.damage:
        raise _damage_error(path, content, data)
    return content.header, content.records


@dataclass(frozen=True)
class _Content:
    """A journal's valid prefix."""

    header: Header
    records: list[Record]
    num_steps: int
    end: int
    """Bytes in the valid prefix."""
    crc: int
    """Of its last line."""
    damage: str
    """What is wrong with the whole line after the prefix; empty if there is none, or it is only torn."""

    @property
    def num_lines(self) -> int:
        return 1 + len(self.records)


def _parse(path: Path, data: bytes) -> _Content:
    """Split a journal's bytes into a valid prefix and what is wrong after it."""
    end = data.find(b"\n") + 1
    try:
        header, crc = _decode_line(data[: end - 1], 0) if end else (None, 0)
    except ValueError as error:
        raise _header_error(path, str(error), data[:end]) from error
    if not isinstance(header, Header):
        raise _header_error(path, "it is not a whole header", data[:end])
    records: list[Record] = []
    num_steps = 0
    damage = ""
    while stop := data.find(b"\n", end) + 1:
        try:
            record, next_crc = _decode_line(data[end : stop - 1], crc)
            if isinstance(record, Header):
                raise ValueError("it is a second header")
            _check_order(record, num_steps)
        except ValueError as error:
            damage = str(error)
            break
        records.append(record)
        num_steps += isinstance(record, StepRecord)
        end, crc = stop, next_crc
    return _Content(header, records, num_steps, end, crc, damage)


def _encode_line(item: Header | Record, previous_crc: int) -> tuple[bytes, int]:
    """Return an item's line with its newline, and the line's crc."""
    body = _to_json(_fields_of(item)).encode()
    crc = zlib.crc32(body, previous_crc)
    return body[:-1] + _crc_member(crc) + b"\n", crc


def _decode_line(line: bytes, previous_crc: int) -> tuple[Header | Record, int]:
    """Return the item of a line without its newline, and the line's crc; ValueError if it is damaged."""
    body = line[: -len(_crc_member(0))] + b"}"
    crc = zlib.crc32(body, previous_crc)
    if not line.endswith(_crc_member(crc)):
        raise ValueError("its checksum does not match")
    fields = json.loads(body)
    kind = fields.pop("kind", None)
    if kind == _KINDS[Header] and fields.get("format_version") != FORMAT_VERSION:
        raise UserError(
            "the journal has another format version",
            got=repr(fields.get("format_version")),
            expected=repr(FORMAT_VERSION),
            fix="use the version of this package that wrote it",
        )
    if kind not in _KINDS.values():
        raise ValueError(f"its kind is {kind!r}")
    try:
        item = _item_of(kind, fields)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return item, crc


_KINDS: dict[type, str] = {Header: "header", StepRecord: "step", EvaluationRecord: "evaluation"}

_STORED_NAMES = {"key": "seed"}
"""Fields of a step whose name in the file is the one that version 0.1.0 gave them."""


def _fields_of(item: Header | Record) -> dict[str, Any]:
    """Return what a line holds of an item. Older readers know nothing of layer weights, so empty ones go."""
    fields = {"kind": _KINDS[type(item)], **vars(item)}
    if isinstance(item, StepRecord):
        fields = {_STORED_NAMES.get(name, name): value for name, value in fields.items()}
        if not item.layer_weights:
            del fields["layer_weights"]
    return fields


def _item_of(kind: str, fields: Mapping[str, Any]) -> Header | Record:
    # The only lists in an item's own fields are those that were written from tuples.
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if kind == _KINDS[StepRecord]:
        for name, stored in _STORED_NAMES.items():
            values[name] = values.pop(stored, None)
    (type_of_item,) = (item for item, its_kind in _KINDS.items() if its_kind == kind)
    return type_of_item(**values)  # type: ignore[no-any-return]


def _crc_member(crc: int) -> bytes:
    return b',"crc":"%08x"}' % crc


def _to_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _num_steps_after(record: Record) -> int:
    """Return how many steps had been taken when a record was made, its own included."""
    return record.step + isinstance(record, StepRecord)


def _check_order(record: Record, num_steps: int) -> None:
    """Assert that a record can follow num_steps steps."""
    if isinstance(record, StepRecord) and record.step != num_steps:
        raise ValueError(f"its step is {record.step}, the next one is {num_steps}")
    if isinstance(record, EvaluationRecord) and not 0 <= record.step <= num_steps:
        raise ValueError(f"it evaluates after {record.step} steps, {num_steps} are recorded")


def _differences(
    left: dict[str, Any], right: dict[str, Any], may_differ: Collection[str], section: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield the dotted key and both values of every item that differs between two nested dicts."""
    for key in sorted(left.keys() | right.keys()):
        dotted = section + key
        values = left.get(key, _ABSENT), right.get(key, _ABSENT)
        if dotted in may_differ or values[0] == values[1]:
            continue
        if isinstance(values[0], dict) and isinstance(values[1], dict):
            yield from _differences(*values, may_differ, f"{dotted}.")
        else:
            yield dotted, *values


def _versions(journals: str | None, ours: str | None) -> str:
    return "" if journals == ours else f" (written by lezo_ds {journals}, this is {ours})"


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"the journal cannot be read: {error.strerror}",
            got=str(path),
            fix="give a run directory that has one",
        ) from error


def _save_damaged(path: Path, rest: bytes) -> None:
    """Keep the damaged part, after what an earlier cut kept."""
    damaged = path.with_name(f"{path.name}.damaged")
    write_atomically(damaged, (damaged.read_bytes() if damaged.exists() else b"") + rest)


def _last_step(num_steps: int) -> str:
    return str(num_steps - 1) if num_steps else "none"


def _mismatch(name: str, ours: object, journals: object, versions: str) -> UserError:
    return UserError(
        f"{name} differs from the journal's{versions}",
        got=repr(ours),
        expected=repr(journals),
        fix="run with what the journal was begun with, or use another run directory",
    )


def _header_error(path: Path, problem: str, line: bytes) -> JournalError:
    if line.endswith(b"\r\n"):
        return _line_ends_error(path)
    return JournalError(
        f"{path} line 1 is damaged: {problem}; last valid step: none; "
        "fix: restore the file from a copy, or move it away and start the run again"
    )


def _damage_error(path: Path, content: _Content, data: bytes) -> JournalError:
    if data[content.end :].partition(b"\n")[0].endswith(b"\r"):
        return _line_ends_error(path)
    return JournalError(
        f"{path} line {content.num_lines + 1} is damaged: {content.damage}; "
        f"last valid step: {_last_step(content.num_steps)}; fix: restore the file from a copy, or keep its "
        f"first {content.end} bytes: {_replacing_command(path, f'head -c {content.end}')}"
    )


def _line_ends_error(path: Path) -> JournalError:
    command = _replacing_command(path, r"tr -d '\r'")
    return JournalError(
        f"{path} was converted to CRLF line ends, as a transfer in text mode does; "
        f"fix: copy it again in binary mode, or convert it back: {command}"
    )


def _replacing_command(path: Path, program: str) -> str:
    """Return a shell command that replaces the journal by a program's output, and keeps it as `.original`."""
    journal, original = shlex.quote(str(path)), shlex.quote(f"{path}.original")
    return f"mv {journal} {original} && {program} < {original} > {journal}"


def _write_error(path: Path, error: OSError, num_steps: int) -> JournalError:
    return JournalError(
        f"{path} cannot be written: {error.strerror}; last good step: {_last_step(num_steps)}; "
        "fix: free space on its disk and check that it is writable, then run the same command again"
    )
