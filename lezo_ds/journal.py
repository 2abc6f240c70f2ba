r"""The journal: a write-ahead log from which the weights after every step can be rebuilt.

Rank 0 writes the record of a step before any rank applies the step, so weights never have a step
that the journal lacks. The file has one JSON object per line: a header with the inputs of the run,
then steps, numbered from 0 without gaps, and evaluations. docs/file-formats.md describes their
members.

    {"kind":"header","format":1,"noise_version":1, ... ,"crc":"467a5941"}
    {"kind":"evaluation","step":0,"split":"dev", ... ,"crc":"ff08d74f"}
    {"kind":"step","step":0,"key":1844674407370, ... ,"crc":"e3085ceb"}
    {"kind":"step","step":1,"key":7, ... ,"crc":"d8847867"}

**Header.** Its line has `kind` and `format`, then the attributes of `Header` in their order:

    {"kind":"header","format":1,"noise_version":1,
     "model_fingerprint":"a1b2...","parameter_table_hash":"c3d4...",     of the base model
     "config":{"data":{...},"data_fingerprints":{"dev":"...", ...}, ... ,
               "model_config":{...}, ... ,"tokenizer":"...", ... ,"zo":{...}},
     "libraries":{"torch":"2.13.0", ...},"arithmetic":{"processor":"...", ...},
     "crc":"467a5941"}                                                   on one line in the file

**Checksum.** The body of a line is its JSON object without the last member, `crc`:

    {"kind":"step","step":1, ... ,"scale":0.001,"crc":"d8847867"}\n      the line
    {"kind":"step","step":1, ... ,"scale":0.001}                        its body

    crc of a line = crc32(body, crc of the line before)                 0 before the header

Each checksum therefore covers all lines up to its own. A line that is changed, missing, doubled or
moved, or that comes from another run, does not match.

**Durability.** What is on the disk, and when:

    create    The header is written to another file, which is synced and then renamed.
    append    The line is written at once. A thread syncs it. The next `append`, `sync`, `cut` or
              `close` waits for that thread, so a power cut loses the last record at most.
    cut       The lines to remove are copied to NAME.damaged, and the copy is synced, before the
              file gets shorter.

A last line without newline was cut short by a crash. It is dropped, as nothing on the disk depends
on its step: snapshots are written only after `sync`. Any other damage is an error.
"""

from __future__ import annotations

import io
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import pydantic

from lezo_ds.errors import JournalError, UserError, last_step, one_line
from lezo_ds.files import assert_regular, failures_named, write_atomically
from lezo_ds.zo.records import StepRecord

FORMAT = 1
_STRICT = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
logger = logging.getLogger(__name__)


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class EvaluationRecord:
    """An evaluation of the weights after `step` steps.

    Attributes:
        step: number of steps that the weights have seen, 0 for the base model.
        split: "dev" or "test".
        loss: mean loss; None if it was not finite or not measured.
        metrics: scores by name, such as the task's metric and "majority_class".
    """

    step: int
    split: str
    loss: float | None
    metrics: dict[str, float]


JournalRecord = StepRecord | EvaluationRecord


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_STRICT)
class Header:
    """The inputs of a run, without which its steps mean nothing.

    Attributes:
        noise_version: version of the rules by which noise and updates are computed.
        model_fingerprint: digest of the base weights, in hexadecimal digits.
        parameter_table_hash: hash of the parameters' names and shapes, in hexadecimal digits.
        config: the configuration without `run_dir`, and hashes of the tokenizer, the model's
            config.json and the data.
        libraries: versions of libraries by name. A run that resumes warns of others.
        arithmetic: processor and settings that can change last bits. A run that resumes warns of
            others.
    """

    noise_version: int
    model_fingerprint: str
    parameter_table_hash: str
    config: dict[str, Any]
    libraries: dict[str, str]
    arithmetic: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The round trip makes a new header equal to the same header read from a file.
        object.__setattr__(self, "config", json.loads(_to_json(self.config, sort_keys=True)))


class JournalContents(NamedTuple):
    """What a journal says.

    Attributes:
        header: the inputs of the run.
        records: all records, oldest first.
        step_checksums: the checksum of the line after which the journal has 0, 1, 2, ... steps:
            that of the header, of step 0, of step 1 and so on. A snapshot carries the checksum of
            its step.
    """

    header: Header
    records: list[JournalRecord]
    step_checksums: tuple[str, ...]


class Journal(AbstractContextManager["Journal"]):
    """A journal that is open for appending. Only one process at a time may have it open.

    `create` or `open` make it, and `close` or a `with` statement closes it. If the disk fails, the
    file ends with the last record that was synced, and the record that failed can be appended
    again.
    """

    def __init__(self, path: Path, lines: list[Line]) -> None:
        self.header: Header = lines[0].item
        self._path = path
        self._lines = lines  # the header, and then the records
        self._num_synced = len(lines)
        self._sync_thread = ThreadPoolExecutor(1, "journal-sync")
        self._syncing: Future[None] | None = None  # the sync of the last write
        self._file = -1  # a descriptor; -1 is closed
        with self._failures():
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
            # An intact file is synced, too: a writer may have died between a write and its sync.
            self._shorten()
            self._inode = os.fstat(self._file).st_ino

    @classmethod
    def create(cls, path: Path, header: Header) -> Self:
        """Start a journal. The file appears with a complete, synced header, or not at all.

        Raises:
            UserError: the file exists.
            JournalError: it cannot be written.
        """
        if path.exists():
            raise UserError(
                f"the journal {path} already exists", fix="resume that run, or set run_dir"
            )
        header_line, _ = _encode(header, previous_crc=0)
        with failures_named(path, JournalError):
            write_atomically(path, header_line)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a journal for appending. A torn last line is dropped with a warning.

        Raises:
            UserError: the file cannot be read, or a newer version of lezo_ds wrote it.
            JournalError: it is damaged, or cannot be written.
        """
        path = path.absolute()  # the working directory may change
        lines = list(scan_journal(path))
        if path.stat().st_size > lines[-1].end:
            logger.warning(
                "%s line %d: the last write was cut short; last good step: %s",
                path,
                len(lines) + 1,
                lines[-1].last_step,
            )
        return cls(path, lines)

    @property
    def records(self) -> tuple[JournalRecord, ...]:
        """All records, oldest first."""
        return tuple(line.item for line in self._lines[1:])

    @property
    def last_checksum(self) -> str:
        """The checksum of the last line, which depends on all lines."""
        return self._lines[-1].checksum

    @property
    def step_checksums(self) -> tuple[str, ...]:
        """See `JournalContents.step_checksums`."""
        return _step_checksums(self._lines)

    def append(self, record: JournalRecord, *, wait: bool = True) -> None:
        """Write the next record, and wait until it is synced, or return before.

        Without `wait`, a power cut can lose this record, and no earlier one. The updated weights
        are lost with it, because a run that starts again loads its weights anew.

        Raises:
            ValueError: the record is out of order.
            JournalError: this record or the last one cannot be written, or another process changed
                the file.
        """
        self.sync()
        content, crc = _encode(record, self._lines[-1].crc)
        line = self._lines[-1].followed_by(record, len(content), crc)
        self._write(content, [line])
        if wait:
            self.sync()

    def extend(self, content: bytes) -> list[JournalRecord]:
        """Append and sync the next lines of another copy of this journal, and return their records.

        An incomplete last line is left out.

        Raises:
            JournalError: the lines are damaged or do not continue this journal. Nothing is written
                then. Or they cannot be written.
        """
        self.sync()
        try:
            lines = list(_read_lines(io.BytesIO(content), self._lines[-1]))
        except (ValueError, RecursionError) as error:
            raise JournalError(
                f"a replica sends damaged lines: {error}; fix: restart it"
            ) from error
        self._write(content[: content.rfind(b"\n") + 1], lines)
        self.sync()
        return [line.item for line in lines]

    def _write(self, content: bytes, lines: list[Line]) -> None:
        """Write lines, and let the thread sync them."""
        with self._failures():
            self._assert_unchanged()
            unwritten = content
            while unwritten:
                # On a full disk, the first write may be partial. The next one raises the error.
                num_written = os.write(self._file, unwritten)
                unwritten = unwritten[num_written:]
        self._lines += lines
        self._syncing = self._sync_thread.submit(os.fsync, self._file)

    def sync(self) -> None:
        """Wait until every record is synced.

        Raises:
            JournalError: the last record cannot be synced, and is removed.
        """
        syncing = self._syncing
        self._syncing = None  # before the result, so that a failure is raised once
        if syncing is not None:
            with self._failures():
                syncing.result()
        self._num_synced = len(self._lines)

    def cut(self, num_steps: int) -> None:
        """Keep what is about the weights after at most `num_steps` steps.

        The file ends before the first other record. All that follow it move to `<name>.damaged`,
        which collects the records of every cut.
        """
        self.sync()
        header, *others = self._lines
        kept = [header, *takewhile(lambda line: line.num_steps_seen <= num_steps, others)]
        if len(kept) == len(self._lines):
            return
        with self._failures():
            self._assert_unchanged()
            removed = self._path.read_bytes()[kept[-1].end :]
            damaged = self._path.with_name(f"{self._path.name}.damaged")
            if damaged.exists():
                removed = damaged.read_bytes() + removed
            # The copy is synced before the journal gets shorter, so a crash between the two loses
            # nothing.
            write_atomically(damaged, removed)
            self._num_synced = len(kept)
            self._shorten()

    def close(self) -> None:
        """Sync and close the file. The records stay readable, but nothing can be appended."""
        if self._file < 0:
            return
        try:
            self.sync()
        finally:
            self._sync_thread.shutdown()
            os.close(self._file)
            self._file = -1

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _assert_unchanged(self) -> None:
        """Refuse to write to a file that is not as this object left it."""
        status = self._path.stat()
        if status.st_ino != self._inode or status.st_size != self._lines[-1].end:
            raise JournalError(
                f"{self._path} was changed by another process; "
                f"last good step: {self._lines[-1].last_step}; "
                "fix: stop the other run in this directory, then run the same command again"
            )

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """After an OSError, remove what is not synced, and raise an error that names the file."""
        try:
            yield
        except OSError as error:
            with suppress(
                OSError
            ):  # if this fails, too, the next `open` drops what is left of a line
                self._shorten()
            raise JournalError(
                f"{self._path} cannot be written: {error.strerror}; "
                f"last good step: {self._lines[-1].last_step}; "
                "fix: free space on its disk and check that it is writable, "
                "then run the same command again"
            ) from error

    def _shorten(self) -> None:
        """End the file after the last record that is synced."""
        del self._lines[self._num_synced :]
        os.ftruncate(self._file, self._lines[-1].end)
        os.fsync(self._file)


def read_journal(path: Path) -> JournalContents:
    """Read a journal without changing it, even while it grows: an incomplete last line is left out.

    Raises:
        UserError: the file cannot be read, or a newer version of lezo_ds wrote it.
        JournalError: it is damaged.
    """
    lines = list(scan_journal(path))
    header, *records = (line.item for line in lines)
    return JournalContents(header, records, _step_checksums(lines))


def encode_journal(header: Header, records: Iterable[JournalRecord]) -> bytes:
    """Return the content of a journal with this header and these records."""
    lines = []
    crc = 0
    for item in (header, *records):
        line, crc = _encode(item, crc)
        lines.append(line)
    return b"".join(lines)


def header_checksum(header: Header) -> str:
    """Return the checksum of a header's line: journals with the same one are of the same run."""
    _, crc = _encode(header, previous_crc=0)
    return f"{crc:08x}"


@dataclass(frozen=True, slots=True)
class Line:
    """A line, and what is known at its end. The default is the beginning of a file.

    Attributes:
        item: the `Header` or the `JournalRecord` that the line has.
        end: offset in the file after the line's newline, in bytes.
        crc: the line's checksum, from which that of the next line continues.
        num_steps: number of steps in the journal up to this line.
    """

    item: Any = None
    end: int = 0
    crc: int = 0
    num_steps: int = 0

    @property
    def last_step(self) -> str:
        """The index of the last step, as errors name it."""
        return last_step(self.num_steps)

    @property
    def checksum(self) -> str:
        """The crc as lines have it: eight hexadecimal digits."""
        return f"{self.crc:08x}"

    @property
    def num_steps_seen(self) -> int:
        """Number of steps of the weights that the line is about."""
        if isinstance(self.item, EvaluationRecord):
            return self.item.step
        return self.num_steps

    def followed_by(self, item: Header | JournalRecord, num_bytes: int, crc: int) -> Line:
        """Return the next line, which has an item in `num_bytes` bytes.

        Raises:
            ValueError: the item cannot follow here.
        """
        is_first = self.end == 0
        if is_first and not isinstance(item, Header):
            raise ValueError("it is not a complete header")
        if not is_first and isinstance(item, Header):
            raise ValueError("it is a second header")
        num_steps = self.num_steps
        if isinstance(item, StepRecord):
            if item.step != num_steps:
                raise ValueError(f"its step is {item.step}, the next one is {num_steps}")
            num_steps += 1
        if isinstance(item, EvaluationRecord) and not 0 <= item.step <= num_steps:
            raise ValueError(f"it evaluates after {item.step} steps, {num_steps} are recorded")
        return Line(item, self.end + num_bytes, crc, num_steps)


def _step_checksums(lines: Iterable[Line]) -> tuple[str, ...]:
    checksums: dict[int, str] = {}
    for line in lines:
        # The lines of evaluations follow that of the step with the same number of steps. They do
        # not count.
        checksums.setdefault(line.num_steps, line.checksum)
    return tuple(checksums.values())


def scan_journal(path: Path, max_line: int = -1) -> Iterator[Line]:
    """Yield the header's line, then that of each record. One line at a time is in memory.

    A line that ends without newline is left out, but the header must be complete.

    Args:
        path: the journal.
        max_line: a line of this number of bytes is refused; -1 permits any.

    Raises:
        UserError: the file cannot be read, or a newer version of lezo_ds wrote it.
        JournalError: a line is damaged.
    """
    line = Line()
    number = 1  # of the next line
    try:
        assert_regular(path)
        with path.open("rb") as file:
            for line in _read_lines(file, Line(), max_line):
                number += 1
                yield line
        if number == 1:
            raise ValueError("it is not a complete header")
    except OSError as error:
        fix = "use the directory of a run that has a journal"
        raise UserError(f"the journal {path} cannot be read: {error.strerror}", fix=fix) from error
    except (ValueError, RecursionError) as error:
        fix = "restore the file from a copy (in binary mode)"
        if line.end > 0:
            fix += f", or keep its first {line.end} bytes (head -c)"
        raise JournalError(
            f"{path} line {number} is damaged: {error}; "
            f"last valid step: {line.last_step}; fix: {fix}"
        ) from error


def _read_lines(file: BinaryIO, last: Line, max_line: int = -1) -> Iterator[Line]:
    """Yield the complete lines of a file after the `last` one. ValueError: one is damaged."""
    while True:
        content = file.readline(max_line)
        if len(content) == max_line:
            raise ValueError(f"it has {max_line} bytes or more")
        if not content.endswith(b"\n"):
            return
        item, crc = _decode(content[:-1], last.crc)
        last = last.followed_by(item, len(content), crc)
        yield last


def _encode(item: Header | JournalRecord, previous_crc: int) -> tuple[bytes, int]:
    """Return the line of an item, with its newline, and the line's crc."""
    if isinstance(item, StepRecord):
        # A member that has the default of StepRecord is left out.
        members: dict[str, Any] = {"kind": "step"}
        for attribute, member in _MEMBERS.items():
            value = getattr(item, attribute)
            if value != getattr(StepRecord, attribute, None):
                members[member] = value
    elif isinstance(item, EvaluationRecord):
        members = {"kind": "evaluation", **vars(item)}
    else:
        members = {"kind": "header", "format": FORMAT, **vars(item)}
    body = _to_json(members).encode()
    crc = zlib.crc32(body, previous_crc)
    # The crc comes before the brace that closes the body.
    return body[:-1] + b',"crc":"%08x"}\n' % crc, crc


def _decode(line: bytes, previous_crc: int) -> tuple[Any, int]:
    """Return the item of a line without its newline, and the crc. ValueError: it is damaged."""
    unclosed_body, _, stored = line.rpartition(b',"crc":')
    body = unclosed_body + b"}"
    crc = zlib.crc32(body, previous_crc)
    if stored != b'"%08x"}' % crc:
        raise ValueError("its checksum does not match")
    members = json.loads(body.decode())
    kind = members.pop("kind", None)
    try:
        if kind == "step":
            return _read_step(members), crc
        if kind == "evaluation":
            return EvaluationRecord(**members), crc
        if kind == "header":
            return _read_header(members), crc
    except (TypeError, AttributeError, OverflowError, pydantic.ValidationError) as error:
        problem = one_line(error)  # pydantic's has several lines
        raise ValueError(f"its members are not those of format {FORMAT}: {problem}") from error
    raise ValueError(f"its kind {kind!r} is not one of format {FORMAT}")


_MEMBERS = {
    "step": "step",
    "key": "key",
    "dropped_layers": "dropped",
    "projected_grads": "gradients",
    "learning_rate": "lr",
    "perturbation_scale": "scale",
    "loss": "loss",
    "applied": "applied",
    "layer_weights": "weights",
}
"""The attributes of a StepRecord in the order of a line, and their names in it."""
_ATTRIBUTES = {member: attribute for attribute, member in _MEMBERS.items()}


def _read_step(members: dict[str, Any]) -> StepRecord:
    values = {}
    for name, value in members.items():
        if isinstance(value, list):
            value = tuple(value)  # every list was a tuple
        values[_ATTRIBUTES.get(name, name)] = value
    return StepRecord(**values)


def _read_header(members: dict[str, Any]) -> Header:
    version = members.pop("format", 0)
    if version != FORMAT:
        raise UserError(
            f"the journal has format {version}, and this version of lezo_ds reads format {FORMAT}",
            fix="use the version of lezo_ds that wrote it",
        )
    return Header(**members)


def _to_json(value: object, *, sort_keys: bool = False) -> str:
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
