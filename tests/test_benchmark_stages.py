from __future__ import annotations

import time

import pytest
import torch

from lezo_ds.tools.benchmark.memory import peak_memory
from lezo_ds.tools.benchmark.stages import STAGES, StageClock

CPU = torch.device("cpu")


def running_clock():
    clock = StageClock(CPU)
    clock.running = True
    return clock


def test_time_of_an_inner_stage_is_not_counted_in_the_outer_one():
    clock = running_clock()
    start = time.perf_counter()
    with clock.stage("forward"):
        with clock.stage("gather"):
            time.sleep(0.02)
        time.sleep(0.005)
    total = time.perf_counter() - start
    seconds, host = clock.take()
    assert seconds == host
    assert seconds["gather"] >= 0.02
    assert 0.005 <= seconds["forward"] <= total - 0.02
    assert sum(seconds.values()) <= total


def test_taking_the_times_starts_anew():
    clock = running_clock()
    with clock.stage("update"):
        pass
    assert clock.take()[0]["update"] > 0
    assert clock.take() == (dict.fromkeys(STAGES, 0.0), dict.fromkeys(STAGES, 0.0))


def test_a_clock_that_does_not_run_counts_nothing():
    clock = StageClock(CPU)
    with clock.stage("update"):
        pass
    assert not any(clock.take()[0].values())


class Worker:
    def work(self, amount):
        return amount + 1

    def fail(self):
        raise ValueError


@pytest.mark.parametrize("of_class", [False, True])
def test_methods_of_an_object_or_a_class_are_timed_meanwhile(of_class):
    clock, worker, original = running_clock(), Worker(), Worker.work
    with clock.methods(Worker if of_class else worker, ["work", "fail"], "perturb"):
        assert worker.work(1) == 2
        with pytest.raises(ValueError):
            worker.fail()
    assert clock.take()[0]["perturb"] > 0
    assert Worker.work is original and "work" not in vars(worker)
    worker.work(1)
    assert not any(clock.take()[0].values())


def test_peak_memory_sees_what_is_gone_at_the_end():
    with peak_memory(CPU) as peak:
        torch.ones(64 * 2**20, dtype=torch.uint8).sum()
    if peak.num_bytes is None:
        pytest.skip("this system does not tell")
    assert peak.num_bytes > 32 * 2**20
