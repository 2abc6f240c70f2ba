"""The journal: a write-ahead log from which the weights after every step can be rebuilt.

A zeroth-order update is lr * g * z, and z is a pure function of a key (MeZO, Malladi et al. 2023, section
2.1), so one short line per step is the whole training state besides the base weights. Rank 0 writes the line
of a step before it applies the update, so a killed process loses no step that it applied. A power cut loses
what is not synced, which is at most the last line (see `Journal.append`).

The file is JSON lines: ASCII, sorted keys, the header first. Each line ends with the member "crc": eight
hexadecimal digits of the CRC-32 of the line without that member, started from the crc of the previous line (0
for the header). The checksums form a chain, so a changed, missing, repeated or moved line is noticed.

A write that a crash cut short leaves a last line without its newline (or NUL bytes after a power cut). Such a
line is dropped, because nothing on the disk depends on its step. Any other damage is an error. It is never
repaired by a guess.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from lezo_ds.errors import JournalError, UserError
from lezo_ds.files import write_atomically
from lezo_ds.journal.background_sync import BackgroundSync
from lezo_ds.zo.records import StepRecord, check_finite

FORMAT_VERSION = 1
"""Version of the file format. It is raised when a reader of the old format would misread the new one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation.

    Args:
        step: number of steps before the evaluation; 0 is the base model.
        split: name of the split, such as "dev" or "test".
        loss: mean loss; None if it is not finite or was not measured.
        metrics: finite scores by name, such as {"accuracy": 0.93}.

    Raises:
        ValueError: a number is not finite.
    """

    step: int
    split: str
    loss: float | None
    metrics: dict[str, float]

    def __post_init__(self) -> None:
        check_finite(self.loss, *self.metrics.values())


JournalRecord = StepRecord | EvaluationRecord


@dataclass(frozen=True, kw_only=True)
class Header:
    """The inputs of the run. The steps of a journal are only valid with the same inputs.

    Args:
        noise_version: version of the noise function z(key, parameter, element). It is a text if version 0.1.0
            wrote the journal with fast noise, which is no longer supported.
        model_fingerprint: hash of the base model.
        parameter_table_hash: hash of the parameters' names, ids and shapes.
        config: the whole config of the run, with JSON's types (tuples become lists).
        libraries: library versions by name.
        arithmetic: what else decides the last bits of the numbers, by name, such as the model of the GPU. It
            is empty in journals of earlier versions. Another machine may resume, so it only serves warnings.
        format_version: version of the file format.

    Raises:
        TypeError, ValueError: the config is not plain JSON, or has a number that is not finite.
    """

    noise_version: int | str
    model_fingerprint: str
    parameter_table_hash: str
    config: dict[str, Any]
    libraries: dict[str, str]
    arithmetic: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        # The round trip makes a new header equal to the same header read from a file.
        object.__setattr__(self, "config", json.loads(_to_json(self.config)))


class Journal:
    """A journal that is open for appending: made by `create` or `open`, closed by `close` or a `with`."""

    def __init__(self, path: Path, descriptor: int, content: _Content) -> None:
        self._path = path
        self._descriptor = descriptor
        self._inode = os.fstat(descriptor).st_ino
        self._content = content
        self._syncing = BackgroundSync(descriptor)
        self._synced = content.end, content.crc

    @classmethod
    def create(cls, path: Path, header: Header) -> Self:
        """Start a journal. The file appears with a complete, synced header, or not at all.

        Raises:
            UserError: the file exists.
            JournalError: it cannot be written.
        """
        if path.exists():
            raise UserError(
                "the journal already exists",
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
        """Open a journal for appending. A torn last line is dropped with a warning.

        Raises:
            UserError: the file is missing, unreadable, or of another format version.
            JournalError: the file is damaged or cannot be written.
        """
        path = path.absolute()  # append uses it again, and the working directory may have changed
        content, num_torn = _load(path)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            if num_torn:
                os.ftruncate(descriptor, content.end)
            # Sync even an intact file: a writer may have been killed between a write and its fsync.
            os.fsync(descriptor)
        except OSError as error:
            raise _write_error(path, error, content.num_steps) from error
        if num_torn:
            place = f"{path} line {content.num_lines + 1}: dropped {num_torn} bytes"
            last = _last_step(content.num_steps)
            logger.warning("%s: the last write was cut short; last good step: %s", place, last)
        return cls(path, descriptor, content)

    @property
    def header(self) -> Header:
        """The first line."""
        return self._content.header

    @property
    def records(self) -> tuple[JournalRecord, ...]:
        """All records, oldest first."""
        return tuple(self._content.records)

    def append(self, record: JournalRecord, *, wait: bool = True) -> None:
        """Write one record. At most one record, the last one, is ever written and not yet synced.

        Args:
            record: the next step, or an evaluation.
            wait: whether to wait until the record is synced, so that no crash loses it. Otherwise a thread
                syncs it while the caller goes on. A power cut may then lose it, but not one before it.

        Raises:
            ValueError: a step that is not the next one, or an evaluation of a step not yet taken.
            JournalError: the record, or the one before it, cannot be written or synced, for example because
                the disk is full or another process changed the file. The file ends with the last record that
                was synced.
        """
        self.sync()
        content = self._content
        _check_order(record, content.num_steps)
        line, crc = _encode_line(record, content.crc)
        try:
            self._assert_unchanged()
            self._write(line)
        except OSError as error:
            raise _write_error(self._path, error, content.num_steps) from error
        content.add(record, content.end + len(line), crc)
        self._syncing.start()
        if wait:
            self.sync()

    def sync(self) -> None:
        """Wait until every record is synced. After this returns, no crash loses any of them.

        Raises:
            JournalError: the last record cannot be synced. It is taken back.
        """
        content = self._content
        try:
            self._syncing.wait()
        except OSError as error:
            content.remove_last(*self._synced)
            self._take_back()
            raise _write_error(self._path, error, content.num_steps) from error
        self._synced = content.end, content.crc

    def cut(self, num_steps: int) -> None:
        """Keep the first steps and the evaluations up to them. Move the rest to `<name>.damaged`.

        This removes steps that turned out to be wrong after they were written. A resumed run repeats them.

        Args:
            num_steps: number of steps to keep.

        Raises:
            JournalError: as for `append`.
        """
        self.sync()
        num_kept = 0
        for record in self._content.records:
            if record.step + isinstance(record, StepRecord) > num_steps:
                break
            num_kept += 1
        else:
            return
        try:
            self._assert_unchanged()
            data = self._path.read_bytes()
            end = sum(map(len, data.splitlines(keepends=True)[: 1 + num_kept]))
            damaged = self._path.with_name(f"{self._path.name}.damaged")
            earlier = damaged.read_bytes() if damaged.exists() else b""
            # The copy is synced before the journal gets shorter, so a crash between the two loses nothing.
            write_atomically(damaged, earlier + data[end:])
            os.ftruncate(self._descriptor, end)
            os.fsync(self._descriptor)
        except OSError as error:
            raise _write_error(self._path, error, self._content.num_steps) from error
        self._content = _parse(self._path, data[:end])
        self._synced = self._content.end, self._content.crc

    def close(self) -> None:
        """Sync and close the file. The records stay readable, but nothing can be appended.

        Raises:
            JournalError: as for `sync`. The file is closed.
        """
        if self._descriptor < 0:
            return
        try:
            self.sync()
        finally:
            self._syncing.close()
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _assert_unchanged(self) -> None:
        """Raise JournalError if a second run in the same directory has written to the file."""
        status = self._path.stat()
        if (status.st_ino, status.st_size) != (self._inode, self._content.end):
            raise JournalError(
                f"{self._path} was changed by another process; last good step: "
                f"{_last_step(self._content.num_steps)}; fix: stop the other run in this directory, then run "
                "the same command again"
            )

    def _write(self, line: bytes) -> None:
        """Write a line. On an OSError, leave the file as it was."""
        try:
            rest = line
            while rest:  # on a full disk, the first write may be partial; the next one raises the error
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self._take_back()
            raise

    def _take_back(self) -> None:
        """Remove what was written after the valid records."""
        with suppress(OSError):  # if this fails too, the next `open` drops a torn line
            os.ftruncate(self._descriptor, self._content.end)
            os.fsync(self._descriptor)


def read_journal(path: Path) -> tuple[Header, list[JournalRecord]]:
    """Read a journal without changing it, even while a run appends to it.

    An incomplete last line (being written, or torn by a crash) is left out.

    Raises:
        UserError: the file is missing, unreadable, or of another format version.
        JournalError: the file is damaged.
    """
    content, _ = _load(path)
    return content.header, content.records


def step_checksums(header: Header, records: Iterable[JournalRecord]) -> tuple[str, ...]:
    """Return the chained checksums after 0, 1, ... steps: those of the header's and each step's line.

    The checksum after n steps identifies everything that the weights after n steps depend on.

    Args:
        header: the header.
        records: all records, oldest first.

    Returns:
        For each number of steps, the eight hexadecimal digits in the member "crc" of the line.
    """
    crc = _encode_line(header, 0)[1]
    found = [crc]
    for record in records:
        crc = _encode_line(record, crc)[1]
        if isinstance(record, StepRecord):
            found.append(crc)
    return tuple(f"{crc:08x}" for crc in found)


@dataclass
class _Content:
    """The valid part of a journal: its items, its number of bytes `end`, and the crc of its last line."""

    header: Header
    records: list[JournalRecord]
    num_steps: int
    end: int
    crc: int
    damage: str = ""
    """Description of the first invalid line; empty if there is none, or if the file only has a torn end."""

    @property
    def num_lines(self) -> int:
        return 1 + len(self.records)

    def add(self, record: JournalRecord, end: int, crc: int) -> None:
        self.records.append(record)
        self.num_steps += isinstance(record, StepRecord)
        self.end, self.crc = end, crc

    def remove_last(self, end: int, crc: int) -> None:
        self.num_steps -= isinstance(self.records.pop(), StepRecord)
        self.end, self.crc = end, crc


def _load(path: Path) -> tuple[_Content, int]:
    """Return the valid part of a journal, and the number of bytes in a torn line after it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"the journal cannot be read: {error.strerror}",
            got=str(path),
            fix="use the directory of a run that has a journal",
        ) from error
    content = _parse(path, data)
    if content.damage:
        raise _damage_error(path, content, data)
    return content, len(data) - content.end


def _parse(path: Path, data: bytes) -> _Content:
    """Parse the lines of a journal up to the first one that is invalid."""
    end = data.find(b"\n") + 1
    try:
        header, crc = _decode_line(data[: end - 1], 0) if end else (None, 0)
    except ValueError as error:
        raise _header_error(path, str(error), data[:end]) from error
    if not isinstance(header, Header):
        raise _header_error(path, "it is not a whole header", data[:end])
    content = _Content(header, records=[], num_steps=0, end=end, crc=crc)
    while stop := data.find(b"\n", content.end) + 1:
        try:
            record, crc = _decode_line(data[content.end : stop - 1], content.crc)
            if isinstance(record, Header):
                raise ValueError("it is a second header")
            _check_order(record, content.num_steps)
        except ValueError as error:
            content.damage = str(error)
            break
        content.add(record, stop, crc)
    return content


def _encode_line(item: Header | JournalRecord, previous_crc: int) -> tuple[bytes, int]:
    """Return the line of an item, with its newline, and the line's crc."""
    body = _to_json(_fields_of(item)).encode()
    crc = zlib.crc32(body, previous_crc)
    return body[:-1] + _crc_member(crc) + b"\n", crc


def _decode_line(line: bytes, previous_crc: int) -> tuple[Header | JournalRecord, int]:
    """Return the item of a line without its newline, and the line's crc. ValueError if it is damaged."""
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
            fix="use the version of lezo_ds that wrote it",
        )
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ValueError(f"its kind is {kind!r}")
    try:
        item = _item_of(kind, fields)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return item, crc


_TYPES: dict[str, type] = {"header": Header, "step": StepRecord, "evaluation": EvaluationRecord}
_KINDS = {type_of_item: kind for kind, type_of_item in _TYPES.items()}
_FIELD_TYPES = {kind: get_type_hints(type_of_item) for kind, type_of_item in _TYPES.items()}

_STORED_NAMES = {"key": "seed"}
"""Fields of a step whose name in the file is still that of version 0.1.0."""


def _fields_of(item: Header | JournalRecord) -> dict[str, Any]:
    """Return the members of an item's line, without the crc."""
    fields = {"kind": _KINDS[type(item)], **vars(item)}
    if isinstance(item, StepRecord):
        fields = {_STORED_NAMES.get(name, name): value for name, value in fields.items()}
        if not item.layer_weights:  # older versions do not know this field
            del fields["layer_weights"]
    if isinstance(item, Header) and not item.arithmetic:  # likewise; the checksum of their headers stays
        del fields["arithmetic"]
    return fields


def _item_of(kind: str, fields: Mapping[str, Any]) -> Header | JournalRecord:
    # Every list directly in a field was a tuple. Lists inside a header's config stay lists.
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if kind == _KINDS[StepRecord]:
        names = {stored: name for name, stored in _STORED_NAMES.items()}
        values = {names.get(name, name): value for name, value in values.items()}
    for name, expected in _FIELD_TYPES[kind].items():
        if name in values and not _has_type(values[name], expected):
            raise ValueError(f"its {name} is {values[name]!r:.40}")
    return _TYPES[kind](**values)  # type: ignore[no-any-return]


def _has_type(value: object, expected: Any) -> bool:  # noqa: ANN401
    """Return whether a value that was read has the type of a field. A whole number may stand for a float."""
    arguments = get_args(expected)
    if isinstance(expected, UnionType):
        return any(_has_type(value, argument) for argument in arguments)
    if get_origin(expected) is tuple:
        return isinstance(value, tuple) and all(_has_type(entry, arguments[0]) for entry in value)
    if get_origin(expected) is dict:
        return isinstance(value, dict) and all(_has_type(entry, arguments[1]) for entry in value.values())
    if expected is Any:
        return True
    return type(value) in ((int, float) if expected is float else (expected,))


def _crc_member(crc: int) -> bytes:
    return b',"crc":"%08x"}' % crc


def _to_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _check_order(record: JournalRecord, num_steps: int) -> None:
    """Raise ValueError if a record cannot follow num_steps steps."""
    if isinstance(record, StepRecord) and record.step != num_steps:
        raise ValueError(f"its step is {record.step}, the next one is {num_steps}")
    if isinstance(record, EvaluationRecord) and not 0 <= record.step <= num_steps:
        raise ValueError(f"it evaluates after {record.step} steps, {num_steps} are recorded")


def _last_step(num_steps: int) -> str:
    return str(num_steps - 1) if num_steps else "none"


def _header_error(path: Path, problem: str, line: bytes) -> JournalError:
    if line.endswith(b"\r\n"):
        return _line_ends_error(path)
    return JournalError(
        f"{path} line 1 is damaged: {problem}; last valid step: none; "
        "fix: restore the file from a copy, or move it elsewhere and start the run again"
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
        f"{path} was converted to CRLF line ends, probably by a transfer in text mode; "
        f"fix: copy it again in binary mode, or convert it back: {command}"
    )


def _replacing_command(path: Path, program: str) -> str:
    """Return a shell command that replaces the journal with a program's output and keeps a `.original`."""
    journal, original = shlex.quote(str(path)), shlex.quote(f"{path}.original")
    return f"mv {journal} {original} && {program} < {original} > {journal}"


def _write_error(path: Path, error: OSError, num_steps: int) -> JournalError:
    return JournalError(
        f"{path} cannot be written: {error.strerror}; last good step: {_last_step(num_steps)}; "
        "fix: free space on its disk and check that it is writable, then run the same command again"
    )
