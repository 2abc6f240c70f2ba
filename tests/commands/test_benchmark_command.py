from __future__ import annotations

import argparse
import json
import sys

import pytest
from assets import REPOSITORY
from commands import assert_refused, free_port, run_well

from lezo_ds.errors import UserError
from lezo_ds.tools.benchmark import table
from lezo_ds.tools.benchmark.settings import Variant, add_arguments, read_job
from lezo_ds.tools.workloads import WORKLOADS, Workload

BENCHMARK = [sys.executable, str(REPOSITORY / "launch" / "benchmark.py")]
# The numbers of calls and messages do not depend on the machine. The bounds leave some headroom.
MOST = {
    "Python calls, 1 rank, s=.75": 23_000,
    "Python calls, 1 rank, dense": 58_000,
    "Python calls, 2 ranks sharded, s=.75": 30_000,
    "all-gathers, 2 ranks sharded, s=.75": 43,  # 40 blocks, both embeddings, the last norm; the head is tied
    "torch launches, bf16, s=.75": 659,
    "Triton launches, bf16, s=.75": 47,
    "torch launches, bf16, dense": 959,
    "Triton launches, bf16, dense": 167,
}
TINY = ("--shape", "opt-tiny", "--layers", "2", "--batch", "4", "--rounds", "2")


def read_whole(*arguments, **others):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.set_defaults(**{"until_loss": None, "replay": False, "noise": None, "host": False} | others)
    return read_job(parser.parse_intermixed_args(arguments))


def read(*arguments):
    return read_whole(*arguments, "ours").inputs


def test_a_setting_and_its_defaults_fill_columns_of_the_table():
    found = read("--layers", "3", "--length", "40", "--batch", "8", "--dtype", "bf16")
    assert vars(found).keys() <= table.COLUMNS.keys()
    assert (found.layers, found.dtype) == (3, "bf16")
    assert found.workload == Workload(40, batch_size=8)
    typical = read("--task", "SQuAD", "--shape", "opt-1.3b")
    assert (typical.task, typical.layers, typical.workload) == ("squad", 24, WORKLOADS["squad"])


def test_a_variant_has_sparsity_probes_per_pass_and_directions():
    assert Variant.parse("ours:0.5:1:3") == Variant("ours:0.5:1:3", "ours", 0.5, 1, 3)
    assert Variant.parse("mezo_reference@3e-5") == Variant(
        "mezo_reference@3e-5", "mezo_reference", learning_rate=3e-5
    )
    recipe = Variant.parse("recipe")
    assert (recipe.kind, recipe.learning_rate, recipe.sparsity == recipe.sparsity) == ("recipe", None, False)
    assert Variant.parse("naive_zero3") == Variant("naive_zero3", "naive_zero3", 0.0, 2, 1)


UNKNOWN = (
    *("", "mine", "ours:1.5", "ours:nan", "ours:x", "ours:0:2:0", "ours:0:0", "naive_zero3:0:2"),
    *("recipe:0", "ours@0", "ours@x", "ours@inf", "ours@"),
)


@pytest.mark.parametrize("text", UNKNOWN)
def test_an_unknown_variant_is_refused(text):
    with pytest.raises(UserError, match="unknown variant"):
        Variant.parse(text)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--task", "sst3", "unknown task"),
        ("--length", "1", "--length does not fit"),
        ("--length", "2049", "--length does not fit"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused(option, value, message):
    with pytest.raises(UserError, match=message):
        read(option, value)


@pytest.mark.distributed
def test_results_of_two_commands_are_in_one_table(tmp_path):
    out = ("--out", str(tmp_path / "new" / "results.csv"))
    more = ("--noise", "1000", "--replay", "--dtype", "bf16")
    first = run_well([*BENCHMARK, *TINY, "--length", "8", *more, "mezo_reference", "ours:0.5", *out])
    shown = ("update, fp32_master", "mezo_reference", "replay", "peak_bytes")
    assert all(name in first.out for name in shown) and "<NA>" not in first.out
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    second = [*BENCHMARK[1:], *TINY, "--length", "24", "mezo_reference", "ours:0.5"]
    run_well([*launcher, "--master_port", str(free_port()), *second, *out])

    found = table.read(tmp_path / "new" / "results.csv")
    steps = found[found.measured == "step"]
    assert list(steps.variant) == ["mezo_reference", "ours:0.5"] * 2
    assert list(steps.length) == [8, 8, 24, 24]
    assert list(steps.ranks) == [1, 1, 2, 2]
    assert list(found[found.measured == "replay"].variant) == ["ours:0.5"]
    assert {"copy", "perturb"} <= set(found[found.measured == "noise"].variant)
    assert list(found.command.str.split().str[0].unique()) == ["python", "deepspeed"]
    assert not found.command.str.contains("local_rank").any()


def test_the_host_is_measured_alone():
    with pytest.raises(UserError, match=r"got: dtype: bf16; expected: --host with no other options"):
        read_whole("--dtype", "bf16", host=True)


@pytest.mark.distributed
@pytest.mark.long
def test_what_a_step_costs_the_host_is_written_with_the_name_of_the_machine(tmp_path):
    out = tmp_path / "new" / "host.json"
    run = run_well([*BENCHMARK, "--host", "--rounds", "1", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["machine"] and found["torch"]
    assert all(name in run.out for name in found["figures"])
    for name, most in MOST.items():
        assert 0 < found["figures"][name] <= most, name


@pytest.mark.distributed
def test_nothing_to_measure_and_a_file_that_is_no_table_are_found_before_the_work(tmp_path):
    assert_refused([*BENCHMARK, *TINY], "nothing to measure")
    (tmp_path / "notes.csv").write_text("mine\n1\n")
    out = str(tmp_path / "notes.csv")
    assert_refused([*BENCHMARK, *TINY, "ours:0", "--out", out], "is not a table of benchmark results")
    assert (tmp_path / "notes.csv").read_text() == "mine\n1\n"
