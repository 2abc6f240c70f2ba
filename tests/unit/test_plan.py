"""launch/plan.py: what fits where, the command it gives, what crosses the network, and what it refuses."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace

import pytest
from assets import REPOSITORY
from commands import run, run_well

from lezo_ds import tasks
from lezo_ds.config import check_world
from lezo_ds.ds_config import load_ds_config
from lezo_ds.errors import UserError
from lezo_ds.recipes import load_recipe
from lezo_ds.tools.opt_shapes import opt_config
from lezo_ds.tools.planning.arguments import GPUS, REACHED, add_arguments, gpu_bytes, hardware_speeds
from lezo_ds.tools.planning.dry_run import describe_plan
from lezo_ds.tools.planning.memory import GIB
from lezo_ds.tools.planning.options import make_plan
from lezo_ds.tools.planning.plan_text import plan_command, plan_text
from lezo_ds.tools.planning.step_cost import Speeds, StepWork
from lezo_ds.tools.workloads import DEFAULT_LENGTH

NUM_PARAMETERS = 29_974_540_288  # of OPT-30B
NUM_IN_BLOCKS = 48 * 616_655_872
OFFLOAD = "deepspeed=ds_configs/zero3_cpu_offload.json"


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def parse(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_intermixed_args([str(word) for word in words])


def plan_of(name, *words):
    arguments = parse("--config", name, *words)
    recipe = load_recipe(arguments.config, arguments.overrides)
    plan = make_plan(recipe, num_gpus=arguments.gpus, gpu_bytes=gpu_bytes(arguments), length=arguments.length)
    return plan, plan_command(plan, arguments.config, arguments.overrides)


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["--gpus", 2, "--gpu", "a100-40g"], (2, "stochastic", 8, 16)),
        (["--gpus", 4, "--gpu", "a100-40g"], (4, "fp32_master", 4, 16)),
        (["--gpus", 8, "--gpu", "h200"], (1, "fp32_master", 2, 16)),
        (["--gpus", 8, "--gpu-memory", 24, OFFLOAD], (8, "fp32_master", 2, 16)),
        (["--gpus", 8, "--gpu-memory", 7], (8, "fp32_master", 2, 16)),
        (["--gpus", 4, "--gpu-memory", 40, "peft.kind=lora"], (2, "fp32_master", 4, 16)),
        (["--gpus", 1, "--gpu-memory", 80, "method=zero_shot"], (1, "stochastic", 8, 16)),
    ],
)
def test_opt_30b_keeps_all_bits_where_it_can_on_the_fewest_ranks_that_hold_it(words, chosen):
    plan, _ = plan_of("opt-30b-sst2-lezo", *words)
    config, memory = plan.chosen.config, plan.chosen.memory
    train = config.train
    found = (config.partition_size or plan.num_gpus, config.zo.update_precision)
    assert (*found, train.micro_batch_size, train.eval_batch_size) == chosen
    assert memory.total <= plan.gpu_bytes
    assert (memory.host > 0) == (OFFLOAD in words or 7 in words)


@pytest.mark.parametrize(
    "words",
    [
        ["opt-30b-sst2-lezo", "--gpus", 2, "--gpu-memory", 40],
        ["opt-30b-boolq-lezo", "--gpus", 8, "--gpu-memory", 141, "train.steps=7", "seed=3"],
        ["opt-30b-sst2-lezo", "--gpus", 8, "--gpu-memory", 24, OFFLOAD, "train.batch_size=32"],
        [
            "opt-30b-sst2-mezo",
            "--gpus",
            8,
            "--gpu-memory",
            40,
            "model.path=opt-66b",
            "model.dtype=bf16",
            "deepspeed=null",
        ],
        ["opt-13b-sst2-adamw", "--gpus", 8, "--gpu-memory", 80],
        ["opt-13b-copa-lezo-lora", "--gpus", 2, "--gpu-memory", 40],
        ["opt-13b-sst2-icl", "--gpus", 1, "--gpu-memory", 40],
    ],
)
def test_the_command_asks_for_what_was_planned(words):
    plan, command = plan_of(*words)
    program, option, count, script, flag, recipe, *overrides = shlex.split(command)
    assert (program, option, count) == ("deepspeed", "--num_gpus", str(plan.num_gpus))
    assert (script, flag) == ("launch/train.py", "--config")
    config = load_recipe(recipe, overrides)
    assert config == plan.chosen.config
    check_world(config, plan.num_gpus)
    load_ds_config(config.deepspeed, config.model.dtype, plan.num_gpus, config.train.micro_batch_size)


def test_the_papers_run_needs_nothing_besides_its_recipe():
    _, command = plan_of("opt-30b-sst2-lezo", "--gpus", 2, "--gpu", "a100-40g")
    assert command == "deepspeed --num_gpus 2 launch/train.py --config opt-30b-sst2-lezo"


@pytest.mark.parametrize("words", [["opt-30b-sst2-lezo"], ["opt-13b-squad-mezo", "train.objective=f1"]])
def test_the_plan_and_the_dry_run_give_the_same_memory(words):
    plan, _ = plan_of(*words, "--gpus", 2, "--gpu-memory", 80)
    lines = describe_plan(plan.chosen.config, 2).splitlines()
    (dry_run,) = [line for line in lines if line.startswith("memory a rank")]
    assert f"on a GPU {plan.chosen.memory}" in dry_run
    assert f"memory a rank   {plan.chosen.memory}" in plan_text(plan, None)


def test_what_a_rank_does_in_a_step_follows_from_the_sizes():
    plan, _ = plan_of(
        "opt-30b-sst2-lezo", "--gpus", 4, "--gpu-memory", 40, "train.batch_size=32", "--length", 64
    )
    work = plan.chosen.work
    assert work.gathered_bytes == 2 * NUM_PARAMETERS * 3 / 4
    assert work.operations == 2 * 32 // 4 * 64 * (2 * NUM_IN_BLOCKS + 2 * 64 * 7168 * 48)
    active = NUM_IN_BLOCKS / 4 + NUM_PARAMETERS - NUM_IN_BLOCKS
    assert work.update_bytes == active / 4 * (2 * 2 + 2 * 2)  # read and written, the low bits too
    assert work.perturb_bytes == 6 * (active - 50272 * 7168)
    assert work.host_bytes == 0


def test_each_of_more_forward_passes_gathers_the_weights_again():
    one, two = (
        plan_of("opt-30b-sst2-lezo", "--gpus", 2, "--gpu-memory", memory, "--length", 1024)[0].chosen
        for memory in (80, 36.5)
    )
    assert (one.config.train.micro_batch_size, two.config.train.micro_batch_size) == (8, 4)
    assert two.work.gathered_bytes == 2 * one.work.gathered_bytes


def test_the_time_is_that_of_the_stages_overlapped_or_not():
    speeds = Speeds(operations=2.0, memory=2.0, link=2.0, host=1.0)
    work = StepWork(6.0, perturb_bytes=8.0, update_bytes=10.0, gathered_bytes=14.0, host_bytes=0.0)
    assert work.seconds(speeds) == {"forward": 3, "perturb": 4, "gather": 7, "update": 5}
    assert work.step_seconds(speeds) == (7 + 5, 3 + 4 + 5 + 7)
    offloaded = StepWork(6.0, perturb_bytes=8.0, update_bytes=10.0, gathered_bytes=14.0, host_bytes=3.0)
    assert offloaded.seconds(speeds) == {"forward": 3, "perturb": 4, "gather": 7 + 3, "update": 10}


def test_speeds_are_those_given_and_otherwise_a_share_of_published_ones():
    speeds = hardware_speeds(parse("--gpus", 2, "--gpu", "h200", "--tflops", 790))
    assert speeds.operations == 790e12
    assert speeds.memory == pytest.approx(REACHED * GPUS["h200"].memory_bandwidth * 1e9)
    assert "790 TFLOP/s (given)" in speeds.source
    assert "GB/s between ranks (assumed" in speeds.source
    assert hardware_speeds(parse("--gpus", 2, "--gpu-memory", 40, "--tflops", 790)) is None


def test_the_text_says_what_is_estimated_and_what_is_assumed():
    plan, _ = plan_of("opt-30b-sst2-lezo", "--gpus", 8, "--gpu-memory", 24, OFFLOAD)
    text = plan_text(plan, hardware_speeds(parse("--gpus", 8, "--gpu", "rtx-4090")))
    lines = {line[:15].strip(): line[16:] for line in text.splitlines() if line[:15].strip()}
    assert lines["inputs"].endswith("at most 128 (assumed: 4 times the typical 32 tokens)")
    assert lines["time"].startswith("ESTIMATE, not measured")
    assert lines["host memory"] == "129 GiB for all ranks together"  # 112, and what pinning rounds up
    assert " GB of weights from its host, and " in lines["traffic a step"]
    assert lines["memory a rank"].startswith(f"{plan.chosen.memory.total / GIB:.2f} GiB: ")
    assert text.count("chosen") == 1
    assert "time            not estimated" in plan_text(plan, None)


def test_a_task_that_no_table_has_gets_a_default_length_and_is_said_to(monkeypatch):
    monkeypatch.setitem(tasks.TASKS._entries, "mine", replace(tasks.TASKS["rte"], name="mine"))
    plan, _ = plan_of("opt-13b-rte-lezo", "--gpus", 1, "--gpu-memory", 80, "data.task=mine")
    assert f"assumed: 4 times {DEFAULT_LENGTH}, since no typical length of mine is known" in plan_text(
        plan, None
    )
    assert f"at most {4 * DEFAULT_LENGTH} tokens (assumed" in describe_plan(plan.chosen.config, 1)


def test_a_model_in_a_directory_is_planned_from_its_config_alone(tmp_path):
    opt_config("opt-125m").save_pretrained(tmp_path)
    words = ["opt-13b-sst2-lezo", "--gpus", 1, "--gpu-memory", 8]
    plan, command = plan_of(*words, f"model.path={tmp_path}")
    assert plan.model == plan_of(*words, "model.path=opt-125m")[0].model
    assert f"model.path={tmp_path}" in command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", 1, "--gpu-memory", 4], "opt-30b does not fit, not even with its weights"),
        (["--gpus", 1, "--gpu-memory", 4, "model.path=opt-31b"], "opt-31b"),
        (["--gpus", 3, "--gpu-memory", 40], "set train.batch_size=18"),
        (["--gpus", 2, "--gpu-memory", 40, "--length", 4096], "--length is longer .* --length 2048"),
        (["--gpus", 2, "--gpu-memory", 40, "data.task=sst"], "sst2"),
        (["--gpus", 2], "memory of a GPU is not known; .* --gpu-memory 40"),
    ],
)
def test_what_cannot_be_planned_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        plan_of("opt-30b-sst2-lezo", *words)


def test_the_command_prints_a_plan_and_refuses_in_one_line():
    command = [sys.executable, str(REPOSITORY / "launch" / "plan.py"), "--gpus", "2"]
    command += ["--config", "opt-30b-sst2-lezo"]
    printed = run_well([*command, "--gpu", "a100-40g"]).out
    assert printed.splitlines()[-1].startswith("command         deepspeed --num_gpus 2 launch/train.py")
    refused = run([*command, "--gpu-memory", "4"])
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.count("error: ") == 1
