import json
import os
import random
import threading
import zlib
from dataclasses import replace

import pytest

from lezo_ds.errors import JournalError, UserError
from lezo_ds.journal import EvaluationRecord, Header, Journal, read_journal
from lezo_ds.zo.records import StepRecord

CONFIG = {"model": "facebook/opt-125m", "train": {"steps": 200}, "tags": ["x", None]}
IDS = {"noise_version": 1, "model_fingerprint": "a1b2", "parameter_table_hash": "c3d4"}
HEADER = Header(**IDS, config=CONFIG, libraries={"torch": "2.13.0"})


def step_record(step, **changes):
    generator = random.Random(step)
    dropped = tuple(sorted(generator.sample(range(12), 3)))
    found = {"projected_grads": (generator.gauss(0, 30),), "loss": generator.random()}
    record = StepRecord(step, generator.getrandbits(64), dropped, 1e-6, 1e-3, **found)
    return replace(record, **changes)


def some_records(num_steps):
    """Steps, one of them skipped, and an evaluation after every fourth."""
    records = []
    for step in range(num_steps):
        if step % 4 == 3:
            records.append(EvaluationRecord(step, "dev", 0.25 + step, {"accuracy": step / 7}))
        skipped = {"applied": False, "loss": None, "projected_grads": ()} if step == 2 else {}
        records.append(step_record(step, **skipped))
    return records


def write_journal(path, records, header=HEADER):
    with Journal.create(path, header) as journal:
        for record in records:
            journal.append(record)
    return path.read_bytes()


def contents(path):
    return read_journal(path)[:2]


def with_crc(members, previous=0):
    body = json.dumps(members, separators=(",", ":")).encode()
    return body[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(body, previous)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


def test_the_lines_of_format_1_never_change(path):
    step = StepRecord(0, 2**64 - 1, (0, 11), 1e-6, 1e-3, projected_grads=(-0.5, 1e-300), loss=0.1)
    skipped = replace(step, step=1, key=7, dropped_layers=(), layer_weights=(1.0, 0.5))
    skipped = replace(skipped, projected_grads=(), loss=None, applied=False)
    header = replace(HEADER, config={"b": (1, 2), "a": None}, arithmetic={"processor": "a GPU"})
    records = [step, EvaluationRecord(1, "dev", None, {"f1": 0.5}), skipped]
    data = write_journal(path, records, header)
    assert data.decode().split("\n") == [
        '{"kind":"header","format":1,"noise_version":1,"model_fingerprint":"a1b2",'
        '"parameter_table_hash":"c3d4","config":{"a":null,"b":[1,2]},"libraries":{"torch":"2.13.0"},'
        '"arithmetic":{"processor":"a GPU"},"crc":"467a5941"}',
        '{"kind":"step","step":0,"key":18446744073709551615,"dropped":[0,11],"gradients":[-0.5,1e-300],'
        '"lr":1e-06,"scale":0.001,"loss":0.1,"crc":"e3085ceb"}',
        '{"kind":"evaluation","step":1,"split":"dev","loss":null,"metrics":{"f1":0.5},"crc":"ff08d74f"}',
        '{"kind":"step","step":1,"key":7,"dropped":[],"gradients":[],"lr":1e-06,"scale":0.001,'
        '"applied":false,"weights":[1.0,0.5],"crc":"d8847867"}',
        "",
    ]


def test_a_reopened_journal_continues_as_an_uninterrupted_one(path):
    records = some_records(9)
    data = write_journal(path.with_name("undisturbed"), records)
    path.with_name(f".{path.name}.tmp").write_text('{"config":')  # of a killed process
    write_journal(path, [])
    with pytest.raises(UserError, match="already exists"):
        Journal.create(path, HEADER)
    for record in records:
        with Journal.open(path) as journal:
            journal.append(record)
    assert path.read_bytes() == data
    assert contents(path) == (HEADER, records)
    with Journal.open(path) as journal:
        assert (journal.header, journal.records) == (HEADER, tuple(records))


def test_a_journal_cut_at_every_byte_keeps_its_complete_records_and_can_be_completed(path, caplog):
    records = some_records(2)
    data = write_journal(path, records)
    header_end = data.index(b"\n") + 1
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        if cut < header_end:
            with pytest.raises(JournalError, match=r"line 1 .*not a complete header"):
                read_journal(path)
            continue
        num_complete = data.count(b"\n", header_end, cut)
        assert contents(path) == (HEADER, records[:num_complete])
        assert path.stat().st_size == cut
        caplog.clear()
        with Journal.open(path) as journal:
            is_torn = data[cut - 1 : cut] != b"\n"
            assert (f"line {num_complete + 2}: the last" in caplog.text) == is_torn
            for record in records[num_complete:]:
                journal.append(record)
        assert path.read_bytes() == data


def test_a_flipped_bit_of_any_byte_is_refused_at_its_line_or_costs_the_last_record(path):
    records = some_records(2)
    data = write_journal(path, records)
    for offset in range(len(data)):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << offset % 8
        path.write_bytes(flipped)
        if offset == len(data) - 1:  # the last newline
            assert contents(path) == (HEADER, records[:-1])
            continue
        with pytest.raises(JournalError, match=f"line {data.count(10, 0, offset) + 1} is damaged"):
            read_journal(path)


def test_a_line_that_is_missing_doubled_moved_or_of_another_run_is_noticed(path):
    lines = write_journal(path, some_records(3)).splitlines(keepends=True)
    header, first, second, third = lines
    others = [step_record(0, key=1), step_record(1)]
    other = write_journal(path.with_name("other"), others).splitlines(keepends=True)
    previous = int(header[-11:-3], 16)
    step = json.loads(first)
    too_deep = b'{"kind":' + b"[" * 9000
    crc = b',"crc":"%08x"}\n' % zlib.crc32(too_deep + b"}")
    for lines, damaged in [
        ([header, second, third], 2),
        ([header, first, first, second], 3),
        ([header, first, other[2]], 3),
        ([first, second], 1),
        ([header, first.replace(b"\n", b"\r\n")], 2),
        ([header, with_crc({"kind": "new"}, previous)], 2),
        ([header, with_crc({**step, "lr": "low"}, previous)], 2),
        ([header, with_crc({**step, "step": 0.0}, previous)], 2),
        ([too_deep + crc], 1),
    ]:
        path.write_bytes(b"".join(lines))
        with pytest.raises(JournalError, match=f"line {damaged} is damaged"):
            read_journal(path)


class SlowDisk:
    """A disk whose syncs in threads take until `go_on` is set."""

    def __init__(self, monkeypatch):
        self.go_on, self.synced = threading.Event(), []
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._slow_sync)

    def _slow_sync(self, descriptor):
        if threading.current_thread() is not threading.main_thread():
            assert self.go_on.wait(60)
        self._sync(descriptor)
        self.synced.append(os.fstat(descriptor).st_size)


@pytest.mark.parametrize(
    ("follow", "num_left"),
    [
        (lambda journal: journal.append(step_record(1), wait=False), 2),
        (lambda journal: journal.cut(0), 0),
        (Journal.sync, 1),
        (Journal.close, 1),
    ],
)
def test_a_record_is_synced_before_what_follows(path, monkeypatch, follow, num_left):
    write_journal(path, [])
    journal, disk = Journal.open(path), SlowDisk(monkeypatch)
    journal.append(step_record(0), wait=False)
    assert read_journal(path).records == [step_record(0)]
    thread = threading.Thread(target=follow, args=[journal])
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and len(read_journal(path).records) == 1 and not disk.synced
    disk.go_on.set()
    thread.join(60)
    journal.close()
    assert len(read_journal(path).records) == num_left


def test_a_file_that_another_process_changed_or_replaced_is_left_alone(path):
    data = write_journal(path, [])
    with Journal.open(path) as ours, Journal.open(path) as theirs:
        theirs.append(step_record(0))
        with pytest.raises(JournalError, match="changed by another process; last good step: none"):
            ours.append(step_record(0))
        theirs.append(step_record(1))
        assert read_journal(path).records == [step_record(0), step_record(1)]
        path.rename(path.with_name("moved"))
        with pytest.raises(JournalError, match="No such file"):
            theirs.append(step_record(2))
        path.write_bytes(data)
        with pytest.raises(JournalError, match="changed by another process"):
            theirs.cut(1)


@pytest.mark.parametrize("num_steps", [0, 1, 3, 4, 12])
def test_a_cut_keeps_the_first_steps_and_what_was_measured_after_them(path, num_steps):
    records = some_records(12)
    data = write_journal(path, records)
    kept = [r for r in records if r.step + isinstance(r, StepRecord) <= num_steps]
    with Journal.open(path) as journal:
        journal.cut(num_steps)
        assert journal.records == tuple(kept)
        start = path.read_bytes()
        for record in records[len(kept) :]:  # the steps are done again, right this time
            journal.append(record)
    assert contents(path) == (HEADER, records)
    damaged = path.with_name("journal.jsonl.damaged")
    assert start + (damaged.read_bytes() if damaged.exists() else b"") == data == path.read_bytes()
