import errno
import json
import logging
import math
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import zlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from assets import REPOSITORY
from faults import small_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from lezo_ds.errors import JournalError, UserError
from lezo_ds.journal import (
    EvaluationRecord,
    Header,
    Journal,
    StepRecord,
    read_journal,
    step_checksums,
)

HEADER = Header(
    noise_version=1,
    model_fingerprint="a1b2",
    parameter_table_hash="c3d4",
    config={"model": "facebook/opt-125m", "train": {"steps": 200, "batch": 16}, "tags": ["x", None]},
    libraries={"torch": "2.13.0"},
)


def step_record(step, **changes):
    generator = random.Random(step)
    record = StepRecord(
        step=step,
        key=generator.getrandbits(64),
        dropped_layers=tuple(sorted(generator.sample(range(12), 3))),
        projected_grads=(generator.gauss(0, 30),),
        learning_rate=1e-6,
        perturbation_scale=1e-3,
        loss=generator.random(),
        applied=True,
    )
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


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


# The file


def test_what_is_appended_is_read_back_equal(path):
    records = some_records(20)
    write_journal(path, records)
    assert read_journal(path) == (HEADER, records)
    with Journal.open(path) as journal:
        assert journal.header == HEADER
        assert journal.records == tuple(records)


def test_each_line_is_compact_sorted_json_with_the_chained_checksum_last(path):
    data = write_journal(path, some_records(5))
    assert data.endswith(b"\n") and data.isascii()
    crc = 0
    for line in data[:-1].split(b"\n"):
        members = json.loads(line)
        assert list(members)[-1] == "crc"
        stored = members.pop("crc")
        assert list(members) == sorted(members)
        body = json.dumps(members, sort_keys=True, separators=(",", ":")).encode()
        crc = zlib.crc32(body, crc)
        assert stored == f"{crc:08x}"
        assert line == body[:-1] + b',"crc":"' + stored.encode() + b'"}'


def test_the_lines_of_format_1_never_change(path):
    step = StepRecord(0, 2**64 - 1, (0, 11), (-0.5, 1e-300), 1e-6, 1e-3, 0.1, True)
    skipped = StepRecord(1, 7, (), (), 1e-6, 1e-3, None, False)
    data = write_journal(path, [step, EvaluationRecord(1, "dev", None, {"f1": 0.5}), skipped])
    assert data.decode().split("\n")[1:] == [
        '{"applied":true,"dropped_layers":[0,11],"kind":"step","learning_rate":1e-06,"loss":0.1,'
        '"perturbation_scale":0.001,"projected_grads":[-0.5,1e-300],"seed":18446744073709551615,"step":0,'
        '"crc":"9bbebda8"}',
        '{"kind":"evaluation","loss":null,"metrics":{"f1":0.5},"split":"dev","step":1,"crc":"8ff4bddf"}',
        '{"applied":false,"dropped_layers":[],"kind":"step","learning_rate":1e-06,"loss":null,'
        '"perturbation_scale":0.001,"projected_grads":[],"seed":7,"step":1,"crc":"f6c39db3"}',
        "",
    ]


def test_a_header_has_the_arithmetic_if_it_is_known(path):
    known = replace(HEADER, arithmetic={"processor": "a GPU"})
    assert b'{"arithmetic":{"processor":"a GPU"},' in write_journal(path, [], known)
    assert read_journal(path)[0] == known


def test_a_reopened_journal_continues_the_chain_of_an_uninterrupted_one(tmp_path):
    records = some_records(9)
    whole = write_journal(tmp_path / "whole", records)
    write_journal(tmp_path / "parts", [])
    for record in records:
        with Journal.open(tmp_path / "parts") as journal:
            journal.append(record)
    assert (tmp_path / "parts").read_bytes() == whole


def test_an_existing_journal_is_not_created_again(path):
    data = write_journal(path, some_records(2))
    with pytest.raises(UserError, match="already exists"):
        Journal.create(path, HEADER)
    assert path.read_bytes() == data


def test_a_journal_appears_whole_beside_what_a_killed_creation_left(path):
    path.with_name(f".{path.name}.tmp").write_text('{"config":')
    assert write_journal(path, []).count(b"\n") == 1
    assert list(path.parent.iterdir()) == [path]


def test_a_missing_journal_is_a_users_error(path):
    for reader in (read_journal, Journal.open):
        with pytest.raises(UserError, match=r"cannot be read.*journal\.jsonl"):
            reader(path)


def test_a_directory_that_cannot_take_the_journal_is_a_journal_error(path):
    with pytest.raises(JournalError, match=r"missing/journal\.jsonl cannot be written"):
        Journal.create(path.parent / "missing" / path.name, HEADER)


# Values


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=4, max_size=30))
def test_floats_survive_bit_for_bit(floats):
    learning_rate, scale, loss, *grads = floats
    record = step_record(
        0, learning_rate=learning_rate, perturbation_scale=scale, loss=loss, projected_grads=tuple(grads)
    )
    with tempfile.TemporaryDirectory() as directory:
        write_journal(Path(directory) / "journal", [record])
        _, [got] = read_journal(Path(directory) / "journal")
    values = [got.learning_rate, got.perturbation_scale, got.loss, *got.projected_grads]
    assert struct.pack(f"{len(values)}d", *values) == struct.pack(f"{len(floats)}d", *floats)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.none()))
def test_any_text_in_the_config_survives(config):
    header = replace(HEADER, config={"nested": config})
    with tempfile.TemporaryDirectory() as directory:
        write_journal(Path(directory) / "journal", some_records(2), header)
        assert read_journal(Path(directory) / "journal") == (header, some_records(2))


def test_the_config_is_kept_as_json_keeps_it_and_apart_from_the_callers(path):
    config = {"layers": (1, 2), "deep": {"list": [1]}}
    header = replace(HEADER, config=config)
    config["deep"]["list"].append(2)
    assert header.config == {"layers": [1, 2], "deep": {"list": [1]}}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(bad):
    for name in ("learning_rate", "perturbation_scale", "loss"):
        with pytest.raises(ValueError, match="not finite"):
            step_record(0, **{name: bad})
    with pytest.raises(ValueError, match="not finite"):
        step_record(0, projected_grads=(1.0, bad))
    with pytest.raises(ValueError, match="not finite"):
        EvaluationRecord(0, "dev", 1.0, {"accuracy": bad})
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(HEADER, config={"train": {"learning_rate": bad}})


def test_an_applied_step_needs_a_loss_and_a_gradient():
    with pytest.raises(ValueError, match="applied step"):
        step_record(0, loss=None)
    with pytest.raises(ValueError, match="applied step"):
        step_record(0, projected_grads=())
    assert not step_record(0, loss=None, projected_grads=(), applied=False).applied


@pytest.mark.parametrize("key", [-1, 2**64, 1.5])
def test_a_key_is_an_unsigned_64_bit_number(key):
    with pytest.raises(ValueError, match="64-bit"):
        step_record(0, key=key)


# Order


@pytest.mark.parametrize("step", [-1, 0, 2, 4])
def test_a_step_that_is_not_the_next_one_is_refused_and_leaves_no_trace(path, step):
    data = write_journal(path, [step_record(0), step_record(1), step_record(2)])
    with Journal.open(path) as journal:
        with pytest.raises(ValueError, match=f"its step is {step}, the next one is 3"):
            journal.append(step_record(step))
        assert path.read_bytes() == data
        journal.append(step_record(3))
    assert len(read_journal(path)[1]) == 4


def test_evaluations_may_look_back_but_not_ahead(path):
    with Journal.create(path, HEADER) as journal:
        journal.append(EvaluationRecord(0, "dev", 1.0, {}))
        journal.append(step_record(0))
        journal.append(EvaluationRecord(1, "dev", 0.5, {}))
        journal.append(EvaluationRecord(0, "test", 0.5, {}))
        with pytest.raises(ValueError, match="evaluates after 2 steps, 1 are recorded"):
            journal.append(EvaluationRecord(2, "dev", 0.5, {}))


# Torn writes


def test_a_journal_cut_at_every_byte_gives_its_whole_records_and_can_be_completed(path):
    records = some_records(6)
    data = write_journal(path, records)
    header_end = data.index(b"\n") + 1
    for cut in range(header_end, len(data) + 1):
        path.write_bytes(data[:cut])
        num_whole = data.count(b"\n", header_end, cut)
        assert read_journal(path) == (HEADER, records[:num_whole])
        assert path.stat().st_size == cut
        with Journal.open(path) as journal:
            assert journal.records == tuple(records[:num_whole])
            for record in records[num_whole:]:
                journal.append(record)
        assert path.read_bytes() == data


def test_a_header_cut_at_any_byte_is_no_journal(path):
    data = write_journal(path, [])
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        for reader in (read_journal, Journal.open):
            with pytest.raises(JournalError, match=r"line 1 .*not a whole header.*last valid step: none"):
                reader(path)


def test_a_torn_last_line_is_dropped_with_a_warning_that_says_where(path, caplog):
    data = write_journal(path, [step_record(0), step_record(1)])
    path.write_bytes(data[:-5])
    with caplog.at_level(logging.WARNING):
        read_journal(path)
        assert not caplog.records
        Journal.open(path).close()
    [warning] = caplog.messages
    assert "line 3" in warning and "cut short" in warning and "last good step: 0" in warning
    assert path.read_bytes() == data[: data.index(b"\n", data.index(b"\n") + 1) + 1]


@pytest.mark.parametrize("num_kept", [0, 40])
def test_nuls_after_the_last_newline_count_as_torn(path, num_kept):
    data = write_journal(path, [step_record(0), step_record(1)])
    torn = data + b'{"applied":true,"dropped_layers":[0,1,2],"kind":'[:num_kept] + bytes(4096)
    path.write_bytes(torn)
    assert read_journal(path)[1] == [step_record(0), step_record(1)]
    with Journal.open(path) as journal:
        journal.append(step_record(2))
    assert read_journal(path)[1] == [step_record(step) for step in range(3)]


def test_nuls_before_a_whole_line_are_damage(path):
    data = write_journal(path, [step_record(0), step_record(1)])
    lines = data.splitlines(keepends=True)
    path.write_bytes(lines[0] + bytes(len(lines[1])) + lines[2])
    with pytest.raises(JournalError, match="line 2 is damaged"):
        read_journal(path)


# Damage


def test_every_flipped_bit_is_refused_at_its_line_or_costs_the_last_record(path):
    records = some_records(4)
    data = write_journal(path, records)
    for bit in range(8 * len(data)):
        offset = bit // 8
        flipped = bytearray(data)
        flipped[offset] ^= 1 << bit % 8
        path.write_bytes(flipped)
        if offset == len(data) - 1:  # the last newline
            assert read_journal(path) == (HEADER, records[:-1])
            continue
        with pytest.raises(JournalError) as caught:
            read_journal(path)
        assert f"line {data.count(10, 0, offset) + 1} is damaged" in str(caught.value)


def test_a_line_that_is_missing_doubled_moved_or_from_another_run_is_noticed(path, tmp_path):
    header, first, second, third = write_journal(path, some_records(3)).splitlines(keepends=True)
    other = write_journal(tmp_path / "other", [step_record(0, key=1), step_record(1)]).splitlines(True)
    for lines, damaged in [
        ([header, second, third], 2),
        ([header, first, third], 3),
        ([header, first, first, second], 3),
        ([header, second, first], 2),
        ([header, header, first], 2),
        ([header, first, other[2]], 3),
        ([first, second], 1),
        ([header, b"\n", first], 2),
        ([header, first, b"not json\n"], 3),
    ]:
        path.write_bytes(b"".join(lines))
        for reader in (read_journal, Journal.open):
            with pytest.raises(JournalError, match=f"line {damaged} is damaged"):
                reader(path)


EVALUATION = {"kind": "evaluation", "step": 0, "split": "dev", "loss": 0, "metrics": {}}
STEP = {"kind": "step", "step": 0, "seed": 1, "dropped_layers": [0], "projected_grads": [0.5]} | {
    "learning_rate": 0.1,
    "perturbation_scale": 0.1,
    "loss": 0.5,
    "applied": True,
}


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"kind": "step"}, "missing"),
        ({"kind": "evaluation", "step": 0, "split": "dev", "loss": 0, "metrics": {}, "more": 1}, "more"),
        ({"kind": "evaluation", "step": 3, "split": "dev", "loss": 0, "metrics": {}}, "after 3 steps"),
        ({"kind": "new"}, "its kind is 'new'"),
        ({"kind": ["step"]}, "its kind is "),
        ({}, "its kind is None"),
        (EVALUATION | {"step": "0"}, "its step is '0'"),
        (EVALUATION | {"step": True}, "its step is True"),
        (EVALUATION | {"loss": 10**400}, "too large"),
        (EVALUATION | {"metrics": ["accuracy"]}, "its metrics is "),
        (EVALUATION | {"metrics": {"accuracy": "high"}}, "its metrics is "),
        (STEP | {"learning_rate": None}, "its learning_rate is None"),
        (STEP | {"seed": 1.5}, "its key is 1.5"),
        (STEP | {"dropped_layers": [0.5]}, "its dropped_layers is "),
        (STEP | {"applied": 1}, "its applied is 1"),
    ],
)
def test_a_line_with_a_right_checksum_and_wrong_members_is_damage(path, members, problem):
    header = write_journal(path, [])
    body = json.dumps(members).encode()
    crc = zlib.crc32(body, int(header[-11:-3], 16))
    path.write_bytes(header + body[:-1] + b',"crc":"%08x"}\n' % crc)
    with pytest.raises(JournalError, match=f"line 2 is damaged: .*{problem}"):
        read_journal(path)


def pasted(error):
    """Run the command at the end of an error line, as a user would paste it."""
    _, mv, rest = str(error.value).rpartition("mv ")
    subprocess.run(["bash", "-c", mv + rest], check=True)


def test_the_damage_error_says_where_and_its_command_keeps_the_valid_prefix(tmp_path):
    path = tmp_path / "it's a run" / "journal.jsonl"
    path.parent.mkdir()
    whole = write_journal(path, [step_record(step) for step in range(5)])
    lines = whole.splitlines(keepends=True)
    damaged = whole.replace(lines[4], lines[4].replace(b"true", b"tRue"))
    path.write_bytes(damaged)
    with pytest.raises(JournalError) as caught:
        Journal.open(path)
    assert f"{path} line 5 is damaged: its checksum does not match; last valid step: 2; " in str(caught.value)
    assert f"its first {sum(map(len, lines[:4]))} bytes" in str(caught.value)
    assert (caught.value.exit_code, path.read_bytes()) == (3, damaged)
    pasted(caught)
    with Journal.open(path) as journal:
        assert [record.step for record in journal.records] == [0, 1, 2]
        for step in (3, 4):
            journal.append(step_record(step))
    assert path.read_bytes() == whole
    assert path.with_name("journal.jsonl.original").read_bytes() == damaged


@pytest.mark.parametrize("first_line", [0, 2])
def test_crlf_line_ends_are_named_and_the_command_converts_them_back(first_line, path):
    whole = write_journal(path, [step_record(step) for step in range(5)])
    lines = whole.splitlines(keepends=True)
    converted = [line.replace(b"\n", b"\r\n") for line in lines[first_line:]]
    path.write_bytes(b"".join(lines[:first_line] + converted))
    with pytest.raises(JournalError, match="was converted to CRLF line ends") as caught:
        read_journal(path)
    pasted(caught)
    assert path.read_bytes() == whole
    assert len(read_journal(path)[1]) == 5


def test_a_damaged_header_cannot_be_repaired(path):
    path.write_bytes(write_journal(path, [step_record(0)]).replace(b"opt-125m", b"opt-126m"))
    with pytest.raises(JournalError, match=r"line 1 is damaged: its checksum.*restore the file"):
        Journal.open(path)


# Failed writes and other processes


def test_a_full_disk_leaves_a_valid_journal_or_none(tmp_path):
    with small_disk(tmp_path, "64k"):
        with pytest.raises(JournalError, match="No space left on device; last good step: none"):
            Journal.create(tmp_path / "journal", replace(HEADER, config={"text": "x" * 100_000}))
        assert list(tmp_path.iterdir()) == []
        path = tmp_path / "journal.jsonl"
        (tmp_path / "filler").write_bytes(bytes(16384))
        with Journal.create(path, HEADER) as journal:
            step = append_until_it_fails(journal, path, "No space left on device")
            (tmp_path / "filler").unlink()
            journal.append(step_record(step))
        assert read_journal(path)[1] == [step_record(earlier) for earlier in range(step + 1)]


def append_until_it_fails(journal, path, reason):
    """Return the step that failed, twice, without harm to those before it."""
    with pytest.raises(JournalError) as caught:
        for step in range(10_000):
            journal.append(step_record(step))
    assert 20 < step < 9_999
    assert caught.value.exit_code == 3
    for part in (f"{path} cannot be written: {reason}", f"last good step: {step - 1}", "fix: free space"):
        assert part in str(caught.value)
    for _ in range(2):
        data = path.read_bytes()
        assert data.count(b"\n") == step + 1 and data.endswith(b"\n")
        assert read_journal(path)[1] == [step_record(earlier) for earlier in range(step)]
        with pytest.raises(JournalError, match=reason):
            journal.append(step_record(step))
    return step


def test_a_write_cut_short_by_the_kernel_is_taken_back(path):
    """A file size limit cuts the write that crosses it: some of its bytes reach the file."""
    child = f"""
        import resource, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_journal import HEADER, Journal, append_until_it_fails, step_record
        path = Path({str(path)!r})
        with Journal.create(path, HEADER) as journal:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_001, hard))
            step = append_until_it_fails(journal, path, "File too large")
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            journal.append(step_record(step))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(child)], check=True, timeout=60)
    _, records = read_journal(path)
    assert records == [step_record(step) for step in range(len(records))]
    assert path.stat().st_size > 20_001


class SlowDisk:
    """A disk whose syncs take until `go_on` is set, and then fail if `fails` is."""

    def __init__(self, monkeypatch):
        self.go_on, self.fails, self.num_started = threading.Event(), False, 0
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._slow_sync)

    def _slow_sync(self, descriptor):
        self.num_started += 1
        if threading.current_thread() is not threading.main_thread():
            assert self.go_on.wait(60)
            if self.fails:
                raise OSError(errno.EIO, "Input/output error")
        self._sync(descriptor)


@pytest.mark.parametrize("following", ["append", "sync", "cut", "close"])
def test_a_record_that_is_not_waited_for_is_written_at_once_and_synced_before_what_follows(
    path, monkeypatch, following
):
    write_journal(path, [])
    journal, disk = Journal.open(path), SlowDisk(monkeypatch)
    journal.append(step_record(0), wait=False)
    assert read_journal(path)[1] == [step_record(0)]
    ended = threading.Event()

    def follow():
        actions = {
            "append": lambda: journal.append(step_record(1), wait=False),
            "sync": journal.sync,
            "cut": lambda: journal.cut(0),
            "close": journal.close,
        }
        actions[following]()
        ended.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert not ended.wait(0.3)
    assert len(read_journal(path)[1]) == 1 and disk.num_started == 1
    disk.go_on.set()
    assert ended.wait(60)
    thread.join()
    journal.close()
    assert len(read_journal(path)[1]) == {"append": 2, "cut": 0}.get(following, 1)


@pytest.mark.parametrize("following", ["append", "sync", "close"])
def test_a_record_that_cannot_be_synced_is_taken_back_and_can_be_appended_again(path, monkeypatch, following):
    write_journal(path, [step_record(0)])
    whole = path.read_bytes()
    journal, disk = Journal.open(path), SlowDisk(monkeypatch)
    disk.fails = True
    disk.go_on.set()
    journal.append(step_record(1), wait=False)
    error = f"{path} cannot be written: Input/output error; last good step: 0; fix: free space"
    with pytest.raises(JournalError, match=re.escape(error)):
        {"append": lambda: journal.append(step_record(2)), "sync": journal.sync, "close": journal.close}[
            following
        ]()
    assert path.read_bytes() == whole
    assert journal.records == (step_record(0),)
    if following == "close":
        return
    disk.fails = False
    journal.append(step_record(1), wait=False)
    journal.append(step_record(2), wait=False)
    journal.close()
    assert read_journal(path)[1] == [step_record(step) for step in range(3)]


APPEND_FOREVER = """
    import sys, time
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from test_journal import Journal, step_record
    with Journal.open(Path({path!r})) as journal:
        for step in range(len(journal.records), 100_000):
            journal.append(step_record(step))
            print(step, flush=True)
            time.sleep({pause})
"""


@contextmanager
def running_writer(path, pause=0):
    values = {"tests": str(Path(__file__).parent), "path": str(path), "pause": pause}
    script = textwrap.dedent(APPEND_FOREVER.format(**values))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as writer:
        try:
            yield writer
        finally:
            writer.kill()


def test_a_writer_killed_at_random_moments_loses_no_step_it_reported(path):
    write_journal(path, [])
    generator = random.Random(0)
    for _ in range(6):
        with running_writer(path) as writer:
            reported = [writer.stdout.readline() for _ in range(generator.randrange(1, 300))]
            writer.kill()
            reported += writer.stdout.readlines()
        last_reported = int([line for line in reported if line.endswith("\n")][-1])
        _, records = read_journal(path)
        assert records == [step_record(step) for step in range(len(records))]
        assert len(records) in (last_reported + 1, last_reported + 2)


def test_a_reader_beside_a_running_writer_sees_only_whole_records(path):
    write_journal(path, [])
    sizes = [0]
    with running_writer(path, pause=0.005):  # or each reading would take longer than the one before
        while len(sizes) < 50:
            _, records = read_journal(path)
            assert records == [step_record(step) for step in range(len(records))]
            assert len(records) >= sizes[-1]
            if len(records) > sizes[-1]:
                sizes.append(len(records))


def test_a_second_writer_is_noticed_before_the_lines_mix(path):
    write_journal(path, [])
    with Journal.open(path) as ours, Journal.open(path) as theirs:
        theirs.append(step_record(0))
        with pytest.raises(JournalError, match="changed by another process; last good step: none"):
            ours.append(step_record(0))
        theirs.append(step_record(1))
    assert read_journal(path)[1] == [step_record(0), step_record(1)]


def test_a_replaced_or_removed_file_is_noticed(path):
    data = write_journal(path, [])
    with Journal.open(path) as journal:
        path.rename(path.with_name("moved"))
        with pytest.raises(JournalError, match="No such file"):
            journal.append(step_record(0))
        path.write_bytes(data)
        with pytest.raises(JournalError, match="changed by another process"):
            journal.append(step_record(0))


def test_a_closed_journal_takes_no_more_records(path):
    write_journal(path, [step_record(0)])
    journal = Journal.open(path)
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="last good step: 0"):
        journal.append(step_record(1))
    assert journal.records == (step_record(0),)


def test_a_journal_opened_by_a_relative_path_survives_a_change_of_directory(path, monkeypatch):
    write_journal(path, [])
    monkeypatch.chdir(path.parent)
    with Journal.open(Path(path.name)) as journal:
        monkeypatch.chdir("/")
        journal.append(step_record(0))
    assert read_journal(path)[1] == [step_record(0)]


# Checksums


def test_a_checksum_for_each_number_of_steps_is_that_of_the_line(path):
    data = write_journal(path, some_records(9))
    lines = [json.loads(line) for line in data.splitlines()]
    expected = [line["crc"] for line in lines if line["kind"] != "evaluation"]
    assert step_checksums(*read_journal(path)) == tuple(expected)
    old = REPOSITORY / "tests" / "fixtures" / "run-0.1.0" / "run" / "journal.jsonl"
    lines = [json.loads(line) for line in old.read_text().splitlines()]
    expected = [line["crc"] for line in lines if line["kind"] != "evaluation"]
    assert step_checksums(*read_journal(old)) == tuple(expected)


# Other versions


def test_a_journal_of_another_format_version_is_refused_with_both_versions(path):
    write_journal(path, [])
    body = json.dumps({"format_version": 2, "kind": "header"}).encode()
    path.write_bytes(body[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(body))
    with pytest.raises(UserError, match="another format version; got: 2; expected: 1"):
        read_journal(path)


# Steps found wrong after they were written


@pytest.mark.parametrize("num_steps", [0, 1, 3, 4, 11, 12])
def test_a_cut_keeps_the_first_steps_and_what_was_measured_after_them(path, num_steps):
    records = some_records(12)
    whole = write_journal(path, records)
    kept = [r for r in records if r.step + isinstance(r, StepRecord) <= num_steps]
    with Journal.open(path) as journal:
        journal.cut(num_steps)
        assert journal.records == tuple(kept)
        left = path.read_bytes()
        rest = [r for r in records if r not in kept]
        for record in rest:  # the steps are done again, right this time
            journal.append(record)
    assert read_journal(path) == (HEADER, records)
    damaged = path.with_name("journal.jsonl.damaged")
    if rest:
        assert left + damaged.read_bytes() == whole == path.read_bytes()
    else:
        assert left == whole
        assert not damaged.exists()


def test_a_cut_of_a_journal_that_another_process_has_changed_is_refused(path):
    write_journal(path, some_records(6))
    with Journal.open(path) as journal:
        with path.open("ab") as file:
            file.write(b"x")
        with pytest.raises(JournalError, match="was changed by another process"):
            journal.cut(2)
