"""launch/plan.py: what fits where, the command it gives, what crosses the network, and what it refuses."""

from __future__ import annotations

import argparse
import shlex
import sys

import pytest
from assets import REPOSITORY
from commands import run, run_well

from lezo_ds.config import check_world
from lezo_ds.ds_config import load_ds_config
from lezo_ds.errors import UserError
from lezo_ds.recipes import load_recipe
from lezo_ds.tools.benchmark.shapes import opt_config
from lezo_ds.tools.planning.arguments import GPUS, REACHED, add_request, read_request, read_speeds
from lezo_ds.tools.planning.plan import GIB, Choice, Request, make_plan, plan_command
from lezo_ds.tools.planning.speed import Speeds, StepWork, step_time
from lezo_ds.tools.planning.text import plan_text

NUM_PARAMETERS = 29_974_540_288
NUM_IN_BLOCKS = 48 * 616_655_872


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def parse(*words):
    parser = argparse.ArgumentParser()
    add_request(parser)
    return parser.parse_args([str(word) for word in words])


def plan_of(*words):
    return make_plan(read_request(parse(*words)))


@pytest.mark.parametrize(
    ("words", "choice"),
    [
        (["--gpus", 2, "--gpu", "a100-40g"], Choice(2, "stochastic", False, 8, 16)),
        (["--gpus", 4, "--gpu", "a100-40g"], Choice(4, "fp32_master", False, 4, 16)),
        (["--gpus", 4, "--gpu", "a100-40g", "--task", "boolq"], Choice(4, "fp32_master", False, 4, 16)),
        (["--gpus", 1, "--gpu", "h200"], Choice(1, "fp32_master", False, 16, 16)),
        (["--gpus", 8, "--gpu", "h200"], Choice(1, "fp32_master", False, 2, 16)),
        (["--gpus", 8, "--gpu-memory", 24, "--offload"], Choice(8, "fp32_master", True, 2, 16)),
        (["--gpus", 8, "--gpu-memory", 8], Choice(8, "fp32_master", True, 2, 16)),
        (["--gpus", 4, "--gpu-memory", 40, "--peft", "lora"], Choice(2, "fp32_master", False, 4, 16)),
        (["--gpus", 1, "--gpu-memory", 80, "--method", "zero_shot"], Choice(1, "fp32_master", False, 1, 16)),
    ],
)
def test_opt_30b_runs_on_the_fewest_ranks_that_hold_it_and_keeps_all_bits_where_it_can(words, choice):
    plan = plan_of("opt-30b", *words)
    assert plan.chosen.choice == choice
    assert plan.chosen.memory.total <= plan.request.gpu_bytes
    smaller = [o for o in plan.options if o.choice.precision == choice.precision and o is not plan.chosen]
    assert (
        not any(o.fits and o.choice.partition_size < choice.partition_size for o in smaller) or choice.offload
    )


@pytest.mark.parametrize(
    "words",
    [
        ["opt-30b", "--gpus", 2, "--gpu-memory", 40],
        ["facebook/opt-30b", "--gpus", 8, "--gpu-memory", 141, "--task", "boolq"],
        ["opt-30b", "--gpus", 8, "--gpu-memory", 24, "--offload", "--batch", 32],
        ["opt-66b", "--gpus", 8, "--gpu-memory", 40, "--method", "mezo", "--dtype", "bf16"],
        ["opt-6.7b", "--gpus", 1, "--gpu-memory", 40, "--dtype", "fp32", "--task", "squad"],
        ["opt-13b", "--gpus", 8, "--gpu-memory", 80, "--method", "adamw"],
        ["opt-13b", "--gpus", 2, "--gpu-memory", 40, "--peft", "lora", "--task", "copa"],
        ["opt-2.7b", "--gpus", 1, "--gpu-memory", 16, "--peft", "prefix", "--task", "drop"],
        ["opt-13b", "--gpus", 1, "--gpu-memory", 40, "--method", "icl"],
        ["opt-125m", "--gpus", 1, "--gpu-memory", 8, "--method", "zero_shot", "--task", "record"],
    ],
)
def test_the_command_asks_for_what_was_planned(words):
    plan = plan_of(*words)
    program, option, count, script, *rest = shlex.split(plan_command(plan))
    assert [program, option, count, script] == [
        *("deepspeed", "--num_gpus", str(plan.request.num_gpus), "launch/train.py")
    ]
    recipe = rest[1] if rest[0] == "--config" else None
    config = load_recipe(recipe, rest[2:] if recipe else rest)
    check_world(config, plan.request.num_gpus)
    planned = plan.chosen.config
    load_ds_config(config.deepspeed, config.model.dtype, plan.request.num_gpus, config.train.micro_batch_size)
    assert (config.model, config.method, config.peft) == (planned.model, planned.method, planned.peft)
    assert (config.zo, config.adamw) == (planned.zo, planned.adamw)
    assert (config.train.batch_size, config.train.micro_batch_size) == (
        *(planned.train.batch_size, planned.train.micro_batch_size),
    )
    assert config.train.eval_batch_size == planned.train.eval_batch_size
    assert (config.partition_size, config.deepspeed) == (planned.partition_size, planned.deepspeed)
    assert config.data.task == planned.data.task


def test_the_papers_runs_need_little_beside_their_recipes():
    plan = plan_of("opt-30b", "--gpus", 2, "--gpu", "a100-40g")
    assert plan_command(plan) == ("deepspeed --num_gpus 2 launch/train.py --config opt-30b-sst2-lezo")


def test_what_a_rank_does_in_a_step_follows_from_the_sizes():
    work = plan_of("opt-30b", "--gpus", 4, "--gpu-memory", 40, "--batch", 32, "--length", 64).chosen.work
    num_passes = 1
    assert work.gathered_bytes == num_passes * 2 * NUM_PARAMETERS * 3 / 4
    tokens = 32 // 4 * 64
    assert work.operations == 2 * tokens * (2 * NUM_IN_BLOCKS + 2 * 64 * 7168 * 48)
    outside = NUM_PARAMETERS - NUM_IN_BLOCKS
    active = NUM_IN_BLOCKS / 4 + outside
    assert work.update_bytes == active / 4 * (2 * 2 + 2 * 2)  # read and written, the low bits too
    assert work.perturb_bytes == num_passes * 6 * (active - 50272 * 7168)
    assert work.host_bytes == 0


def test_each_of_more_forward_passes_gathers_the_model_again():
    one, two = (
        plan_of("opt-30b", "--gpus", 2, "--gpu-memory", memory, "--length", 1024).chosen
        for memory in (80, 36.5)
    )
    assert (one.config.train.micro_batch_size, two.config.train.micro_batch_size) == (8, 4)
    assert two.work.gathered_bytes == 2 * one.work.gathered_bytes


def test_offloaded_shards_come_from_the_host_once_a_pass():
    work = plan_of("opt-30b", "--gpus", 8, "--gpu-memory", 24, "--offload").chosen.work
    assert work.host_bytes == 2 * NUM_PARAMETERS / 8
    time = step_time(work, Speeds(operations=1e15, memory_bytes=1e12, link_bytes=1e11, host_bytes=1e10))
    assert time.gather == pytest.approx(work.gathered_bytes / 1e11 + work.host_bytes / 1e10)
    assert time.update == pytest.approx(work.update_bytes / 1e10)


def test_the_time_of_a_step_lies_between_all_overlapped_and_nothing():
    time = step_time(StepWork(6.0, 8.0, 10.0, 14.0, 0.0), Speeds(2.0, 2.0, 2.0, 2.0))
    assert (time.forward, time.perturb, time.update, time.gather) == (3, 4, 5, 7)
    assert (time.shortest, time.longest) == (7 + 5, 3 + 4 + 5 + 7)


def test_speeds_are_those_given_and_else_a_share_of_published_ones():
    timed = read_speeds(parse("opt-30b", "--gpus", 2, "--gpu", "h200", "--tflops", 790))
    assert timed.speeds.operations == 790e12
    assert timed.speeds.memory_bytes == pytest.approx(REACHED * GPUS["h200"].memory_bandwidth * 1e9)
    assert "790 TFLOP/s (given)" in timed.source
    assert "assumed" in timed.source
    assert read_speeds(parse("opt-30b", "--gpus", 2, "--gpu-memory", 40, "--tflops", 790)) is None


def test_the_text_says_what_is_estimated_and_what_is_assumed():
    plan = plan_of("opt-30b", "--gpus", 8, "--gpu-memory", 24, "--offload")
    timed = read_speeds(parse("opt-30b", "--gpus", 8, "--gpu", "rtx-4090"))
    text = plan_text(plan, timed)
    lines = {line[:15].strip(): line[16:] for line in text.splitlines() if line[:15].strip()}
    assert "assumed, give --length" in lines["inputs"]
    assert lines["time"].startswith("ESTIMATE, not measured")
    assert "assumed" in lines["speeds"]
    assert lines["host memory"] == "129 GiB for all ranks together"  # 112, and what pinning rounds up
    # 64 bytes of plan, and 8 a number: two losses of each of 8 passes, two votes, four of proof.
    assert lines["traffic a step"].endswith(", and 240 bytes of all else")
    assert lines["memory a rank"].startswith(f"{plan.chosen.memory.total / GIB:.1f} of 24 GiB: gathered")
    assert text.count("chosen") == 1
    assert "not estimated" in plan_text(plan, None)


def test_a_model_in_a_directory_is_planned_from_its_config_alone(tmp_path):
    opt_config("opt-125m").save_pretrained(tmp_path)
    plan = make_plan(Request(str(tmp_path), 1, 8 * GIB))
    assert plan.model == make_plan(Request("opt-125m", 1, 8 * GIB)).model
    assert f"model.path={tmp_path}" in plan_command(plan)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["opt-30b", "--gpus", 1, "--gpu-memory", 4], "opt-30b does not fit, not even with its weights"),
        (
            ["opt-31b", "--gpus", 1, "--gpu-memory", 4],
            "there is no model opt-31b .* one of opt-125m, .* opt-30b",
        ),
        (["opt-30b", "--gpus", 3, "--gpu-memory", 40], "batch does not go evenly .* give --batch 18"),
        (["opt-30b", "--gpus", 2, "--gpu-memory", 40, "--length", 4096], "--length is more .* --length 2048"),
        (["opt-30b", "--gpus", 2, "--gpu-memory", 40, "--task", "sst"], "sst"),
        (["opt-30b", "--gpus", 2], "memory of a GPU is not known; .* --gpu-memory 40"),
    ],
)
def test_what_cannot_be_planned_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        plan_of(*words)


def test_the_command_prints_a_plan_and_refuses_in_one_line():
    command = [sys.executable, str(REPOSITORY / "launch" / "plan.py"), "opt-30b", "--gpus", "2"]
    assert "--config opt-30b-sst2-lezo" in run_well([*command, "--gpu", "a100-40g"]).out
    refused = run([*command, "--gpu-memory", "4"])
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.count("error: ") == 1
