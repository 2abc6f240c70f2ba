"""`lezo-ds gpu` on a CPU: it starts, all parts run, and what is wrong is found."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest
import torch
from assets import REPOSITORY
from commands import run_well
from ranks import run_ranks

from lezo_ds import distributed
from lezo_ds.errors import LezoError
from lezo_ds.noise.eager import EagerNoise
from lezo_ds.tools.benchmark.random_inputs import RandomInputs
from lezo_ds.tools.gpu_check import bits, check
from lezo_ds.tools.gpu_check.rows import Row


class NoiseWithAFault(EagerNoise):
    def _draw(self, *arguments):
        found = super()._draw(*arguments)
        found[-1] += 2.0**-20
        return found


def test_all_parts_run_and_are_as_they_must_be(tmp_path):
    gpu = [sys.executable, str(REPOSITORY / "launch" / "gpu.py")]
    text = run_well([*gpu, "--out", tmp_path / "gpu", "--rounds", "1"]).out
    found = json.loads((tmp_path / "gpu" / "gpu.json").read_text())
    assert found["device"] == "cpu"
    assert {"machine", "torch", "deepspeed", "lezo_ds", "date", "command"} <= found.keys()
    sections = [row["section"] for row in found["rows"]]
    assert list(dict.fromkeys(sections)) == [
        "noise",
        "engine",
        "noise speed",
        "host",
        "steps",
        "memory",
        "launches",
    ]
    passed = {row["passed"] for row in found["rows"] if row["section"] in ("noise", "engine")}
    assert passed == {True}
    assert {row["variant"] for row in found["benchmark"] if row["measured"] == "step"} == set(
        check.speed.VARIANTS
    )
    assert "WRONG" not in text
    assert all(row["what"] in text for row in found["rows"])


def test_a_wrong_bit_of_the_noise_is_found(monkeypatch):
    monkeypatch.setattr(bits, "noise_backend", lambda _: NoiseWithAFault())
    wrong = [row for row in bits.noise_rows(torch.device("cpu")) if not row.passed]
    assert [row.what for row in wrong] == ["draw, normal", "draw, rademacher"]
    assert wrong[0].found == "0 of 12 results equal"


def rows_of_an_engine_that_sees_another_batch():
    """Return what is found if the second step of the second run gets another token."""
    real, calls = RandomInputs.batches, []

    def batches(self, step):
        calls.append(step)
        (batch,) = real(self, step)
        if len(calls) == 6:
            batch.inputs["input_ids"][0, 0] += 1
        return [batch]

    RandomInputs.batches = batches
    distributed.init_distributed()
    return bits.engine_rows(check.setting_of("opt-tiny", "fp32", "sst2"))


@pytest.mark.distributed
def test_a_run_that_is_not_repeatable_is_found():
    (rows,) = run_ranks(rows_of_an_engine_that_sees_another_batch, 1)
    assert rows[0].passed is False
    assert rows[0].found == "losses NOT EQUAL, weights NOT EQUAL"


def fails():
    raise RuntimeError("no such\nkernel")


def crashes():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    time.sleep(60)


def finds():
    return [Row("noise", "draw", "12 of 12 results equal", passed=True)], []


def test_a_part_that_fails_or_crashes_does_not_end_the_others(monkeypatch, tmp_path, capsys):
    parts = {"first": fails, "second": finds, "third": crashes}
    monkeypatch.setattr(check, "sections", lambda *_: parts.items())
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)  # of a group that another test has made in this process
    expected = "2 of 3 findings are not as they must be; the first is first: failed"
    with pytest.raises(LezoError, match=expected):
        check.run_check([], tmp_path, minutes=10, rounds=1)
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [(row["section"], row["passed"]) for row in rows] == [
        ("first", False),
        ("noise", True),
        ("third", False),
    ]
    assert rows[0]["found"] == "failed: RuntimeError: no such kernel"
    assert rows[2]["found"] == "failed: the process ended with exit code -9"
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.1, "not finished when the time was over"), (-1, "not run, because the time is over")],
)
def test_no_part_takes_more_than_the_time_that_is_left(seconds, expected):
    (row,), _ = check._run_section("part", hangs, time.monotonic() + seconds)
    assert (row.found, row.passed) == (expected, False)
