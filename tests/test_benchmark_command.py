from __future__ import annotations

import argparse
import sys

import pytest
from assets import REPOSITORY
from commands import free_port, run, run_well

from lezo_ds.tools.benchmark.arguments import add_settings, read_settings
from lezo_ds.tools.benchmark.results import read_results

BENCHMARK = str(REPOSITORY / "launch" / "benchmark.py")
REPORT = str(REPOSITORY / "launch" / "benchmark_report.py")
TINY = ("--shape", "opt-tiny", "--layers", "2", "--batch", "4", "--rounds", "1")


def read(*arguments):
    parser = argparse.ArgumentParser()
    add_settings(parser)
    return read_settings(parser.parse_args(arguments))


def test_lists_are_combined_and_the_settings_of_a_model_stay_together():
    found = read("--shape", "opt-125m,opt-1.3b", "--task", "sst2,squad", "--micro-batches", "1,2")
    assert len(found) == 8
    assert [entry.model.shape for entry in found] == ["opt-125m"] * 4 + ["opt-1.3b"] * 4
    assert [entry.num_micro_batches for entry in found[:4]] == [1, 2, 1, 2]
    assert [entry.workload.num_candidates for entry in found[:4]] == [2, 2, 1, 1]


def test_one_list_at_a_time_can_be_varied():
    found = read("--layers", "4,2", "--length", "32,64,128", "--micro-batches", "1,2", "--one-at-a-time")
    varied = [(entry.model.num_blocks, entry.workload.length, entry.num_micro_batches) for entry in found]
    assert varied == [(4, 32, 1), (4, 32, 2), (4, 64, 1), (4, 128, 1), (2, 32, 1)]


@pytest.mark.parametrize("arguments", [("--shape", "opt-2b"), ("--rounds", "0"), ("--length", "8,x")])
def test_what_does_not_exist_is_refused(arguments):
    with pytest.raises(SystemExit):
        read(*arguments)


@pytest.mark.distributed
def test_results_of_two_commands_are_put_together(tmp_path):
    first = [sys.executable, BENCHMARK, *TINY, "--length", "8,16", "mezo_reference", "ours:0.5"]
    run_well([*first, "--noise", "1000", "--replay", "2", "--out", str(tmp_path / "one")])
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    second = [
        BENCHMARK,
        *TINY,
        "--length",
        "24",
        "mezo_reference",
        "ours:0.5",
        "--out",
        str(tmp_path / "two"),
    ]
    run_well([*launcher, "--master_port", str(free_port()), *second])
    one, two = (read_results(tmp_path / f"{name}.json") for name in ("one", "two"))
    assert [cell.settings.workload.length for cell in one.cells + two.cells] == [8, 16, 24]
    assert [cell.num_ranks for cell in one.cells + two.cells] == [1, 1, 2]
    assert "perturb" in {timing.name for timing in one.kernels[0].timings}
    run_well(
        [
            sys.executable,
            REPORT,
            str(tmp_path / "one.json"),
            str(tmp_path / "two.json"),
            "--out",
            str(tmp_path / "both"),
        ]
    )
    text = (tmp_path / "both.md").read_text()
    assert (tmp_path / "one.md").read_text() in text
    assert (tmp_path / "two.md").read_text() in text


@pytest.mark.distributed
def test_a_benchmark_of_the_noise_needs_no_variant():
    finished = run_well([sys.executable, BENCHMARK, "--noise", "1000", "--dtype", "bf16", "--rounds", "1"])
    assert "| update, fp32_master |" in finished.out


@pytest.mark.distributed
def test_an_unknown_variant_is_one_line_and_exit_code_2():
    finished = run([sys.executable, BENCHMARK, *TINY, "theirs"])
    assert finished.code == 2
    assert finished.err.strip().splitlines()[-1].startswith("error: no such variant; got: theirs")
