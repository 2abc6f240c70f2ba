from __future__ import annotations

from dataclasses import replace

import pytest

from lezo_ds.errors import UserError
from lezo_ds.tools.benchmark.growth import find_series
from lezo_ds.tools.benchmark.report import machine_facts, to_markdown
from lezo_ds.tools.benchmark.results import (
    Cell,
    Elapsed,
    Kernels,
    KernelTiming,
    ModelSettings,
    Replay,
    Results,
    Settings,
    Timing,
    read_results,
    write_results,
)
from lezo_ds.tools.benchmark.shapes import Workload
from lezo_ds.tools.benchmark.stages import STAGES

FACTS = {
    "hardware": {"device": "cpu", "gpu": None, "cpu": "", "cores": 2},
    "processor": "an abacus",
    "versions": {"python": "3.11"},
    "world_size": 1,
    "date": "2024-10-13T00:00+00:00",
    "command": ["python", "launch/benchmark.py", "ours:0"],
}


def timing(name, *seconds):
    stages = dict.fromkeys(STAGES, 1 / len(STAGES))
    elapsed = tuple(Elapsed(entry, entry / 2) for entry in seconds)
    return Timing(name, elapsed, stages, stages, 400, None, 800, 24)


def cell(timings, length=32, num_ranks=1, micro_batches=None, parameters=100, blocks=None):
    settings = Settings(ModelSettings("opt-tiny", blocks), Workload(16, length), micro_batches)
    return Cell(
        settings,
        num_ranks,
        parameters,
        0.5,
        tuple(timings),
        {"ours:0": Replay(2, Elapsed(8, 4), Elapsed(1, 1))},
    )


@pytest.fixture
def results():
    kernels = tuple(KernelTiming(name, (Elapsed(0.5, 0.5),), 100) for name in ("copy", "torch", "perturb"))
    found = Results(FACTS).with_kernels(Kernels("bf16", 1000, 1, kernels))
    return found.with_cell(cell([timing("mezo_reference", 6.0, 4.0, 5.0), timing("ours:0", 1.0)]))


def test_results_come_back_from_their_file(results, tmp_path):
    write_results(results, tmp_path / "new" / "results.json")
    assert read_results(tmp_path / "new" / "results.json") == results


@pytest.mark.parametrize("text", ["", "{}", '{"facts": {}, "cells": [{}], "kernels": []}'])
def test_a_file_without_results_is_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError, match="holds no results of a benchmark"):
        read_results(tmp_path / "r.json")


def test_medians_and_spread_are_those_of_the_steps():
    found = timing("ours", 1.0, 2.0, 3.0, 4.0, 10.0)
    assert (found.seconds, found.cpu_seconds) == (3.0, 1.5)
    assert found.spread == pytest.approx((4.0 - 2.0) / 2 / 3.0)
    assert timing("ours", 1.0).spread == 0.0


def test_the_report_has_the_command_ratios_to_the_first_variant_and_the_replay(results):
    text = to_markdown([results])
    assert "python launch/benchmark.py ours:0" in text
    row = next(line for line in text.splitlines() if line.startswith("| ours:0"))
    assert row.split(" | ")[1:4] == ["1", "0%", "5.00"]
    assert "2 steps of ours:0: trained in 8 s, replayed in 1 s, 8.0 times as fast" in text
    assert "| 2.00 | 24 |" in row  # 800 bytes gathered of 100 fp32 weights


def test_facts_name_machine_versions_and_command():
    assert {"hardware", "processor", "versions", "command", "date"} <= machine_facts().keys()


def line(x, intercept=1.0, slope=0.5):
    return intercept + slope * x


def test_a_line_is_found_along_each_axis():
    cells = [cell([timing("ours:0", line(16 * length))], length=length) for length in (8, 16, 32)]
    cells += [cell([timing("ours:0", line(p))], parameters=p, blocks=p, length=40) for p in (1, 2, 3)]
    cells += [cell([timing("ours:0", line(n))], num_ranks=n, micro_batches=4, length=48) for n in (1, 2, 4)]
    cells += [cell([timing("ours:0", line(n))], micro_batches=n, length=56) for n in (1, 2, 8)]
    cells += [cell([timing(f"ours:{s}", line(s)) for s in (0, 0.5, 1)], length=64)]
    found = find_series(cells)
    assert {series.axis for series in found} == {"parameters", "tokens", "sparsity", "ranks", "micro-batches"}
    for series in found:
        if len(series.points) == 3:
            assert (series.intercept, series.slope) == (pytest.approx(1), pytest.approx(0.5))
            assert series.bend == pytest.approx(0, abs=1e-12)


def test_two_points_make_no_series_and_other_settings_do_not_mix():
    cells = [cell([timing("ours:0", 1.0)], length=length) for length in (8, 16)]
    other = cell([timing("ours:0", 1.0)], length=32)
    assert find_series(cells) == []
    assert find_series([*cells, replace(other, num_ranks=2)]) == []
    assert find_series([*cells, cell([timing("ours:0.5", 1.0)], length=32)]) == []
    (series,) = find_series([*cells, other])
    assert series.points == ((128, 1.0), (256, 1.0), (512, 1.0))


def test_a_bend_is_the_farthest_point_and_the_clock_can_be_the_processors():
    cells = [
        cell([timing("ours:0", seconds)], length=length)
        for length, seconds in ((8, 2.0), (16, 8.0), (24, 2.0))
    ]
    (series,) = find_series(cells)
    assert (series.intercept, series.slope, series.bend) == (
        pytest.approx(4),
        pytest.approx(0),
        pytest.approx(1),
    )
    (series,) = find_series(cells, processor=True)
    assert [seconds for _, seconds in series.points] == [1.0, 4.0, 1.0]


def test_pictures_are_drawn_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    from lezo_ds.tools.benchmark.pictures import draw

    pair = [timing("mezo_reference", 4.0), timing("ours:0", 1.0)]
    assert [path.name for path in draw([cell(pair)], tmp_path / "one")] == ["one-stages.png"]
    cells = [cell(pair, length=length) for length in (8, 16, 24)]
    found = draw(cells, tmp_path / "all")
    assert [path.name for path in found] == ["all-stages.png", "all-speedup.png", "all-growth.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)
