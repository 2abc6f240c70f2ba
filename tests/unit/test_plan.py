"""lezo-ds plan: what fits where, the command it gives, the weights that travel, and what it refuses."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace

import pytest
from assets import REPOSITORY
from commands import assert_refused, run_well

from lezo_ds import tasks
from lezo_ds.config import check_world
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.errors import UserError
from lezo_ds.recipes import load_recipe
from lezo_ds.tools.opt_shapes import opt_config
from lezo_ds.tools.planning.dry_run import describe_plan
from lezo_ds.tools.planning.hardware import GPUS, Cluster
from lezo_ds.tools.planning.memory import GIB
from lezo_ds.tools.planning.model_sizes import model_sizes
from lezo_ds.tools.planning.options import make_plan
from lezo_ds.tools.planning.plan_text import plan_command, plan_text
from lezo_ds.tools.workloads import DEFAULT_LENGTH

NUM_PARAMETERS = 29_974_540_288  # of OPT-30B
OFFLOAD = "deepspeed=ds_configs/zero3_cpu_offload.json"


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def plan_of(name, num_gpus, gigabytes, *overrides, length=None):
    return make_plan(
        load_recipe(name, overrides), num_gpus=num_gpus, gpu_bytes=int(gigabytes * GIB), length=length
    )


@pytest.mark.parametrize(
    ("num_gpus", "gigabytes", "overrides", "chosen"),
    [
        (2, 40, [], (2, "stochastic", 8, 16)),
        (4, 40, [], (4, "fp32_master", 4, 16)),
        (8, 140, [], (1, "fp32_master", 2, 16)),
        (8, 24, [OFFLOAD], (8, "fp32_master", 2, 16)),
        (8, 7, [], (8, "fp32_master", 2, 2)),
        (4, 40, ["peft.kind=lora"], (2, "fp32_master", 4, 16)),
        (1, 80, ["method=zero_shot"], (1, "stochastic", 8, 16)),
    ],
)
def test_opt_30b_keeps_all_bits_where_it_can_on_the_fewest_ranks_that_hold_it(
    num_gpus, gigabytes, overrides, chosen
):
    plan = plan_of("opt-30b-sst2-lezo", num_gpus, gigabytes, *overrides)
    config, memory = plan.chosen.config, plan.chosen.memory
    train = config.train
    found = (config.partition_size or num_gpus, config.zo.update_precision)
    assert (*found, train.micro_batch_size, train.eval_batch_size) == chosen
    assert memory.total <= plan.gpu_bytes
    assert (memory.host > 0) == (OFFLOAD in overrides or gigabytes == 7)


@pytest.mark.parametrize(
    ("name", "num_gpus", "gigabytes", "overrides"),
    [
        ("opt-30b-boolq-lezo", 8, 141, ["train.steps=7", "seed=3"]),
        ("opt-30b-sst2-lezo", 8, 24, [OFFLOAD, "train.batch_size=32"]),
        ("opt-30b-sst2-mezo", 8, 40, ["model.path=opt-66b", "model.dtype=bf16", "deepspeed=null"]),
        ("opt-13b-sst2-adamw", 8, 80, []),
        ("opt-13b-copa-lezo-lora", 2, 40, []),
        ("opt-13b-sst2-icl", 1, 40, []),
    ],
)
def test_the_command_asks_for_what_was_planned(name, num_gpus, gigabytes, overrides):
    plan = plan_of(name, num_gpus, gigabytes, *overrides)
    program, option, count, script, flag, recipe, *found = shlex.split(plan_command(plan, name, overrides))
    assert (program, option, count) == ("deepspeed", "--num_gpus", str(num_gpus))
    assert (script, flag) == ("launch/train.py", "--config")
    config = load_recipe(recipe, found)
    assert config == plan.chosen.config
    check_world(config, num_gpus)
    load_ds_config(config.deepspeed, config.model.dtype, num_gpus, config.train.micro_batch_size)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("opt-30b-sst2-lezo", []),
        ("opt-13b-squad-mezo", ["train.objective=f1"]),
        ("opt-30b-sst2-lezo", [OFFLOAD, "peft.kind=prefix"]),
    ],
)
def test_the_plan_and_the_dry_run_give_the_same_memory(name, overrides):
    plan = plan_of(name, 2, 80, *overrides)
    lines = describe_plan(plan.chosen.config, 2).splitlines()
    (dry_run,) = [line for line in lines if line.startswith("memory a rank")]
    assert f"on a GPU {plan.chosen.memory}" in dry_run
    assert f"memory a rank   {plan.chosen.memory}" in plan_text(plan)


def test_each_forward_pass_gathers_what_other_ranks_hold():
    one, two = (plan_of("opt-30b-sst2-lezo", 2, gigabytes, length=1024).chosen for gigabytes in (80, 40))
    assert (one.config.train.micro_batch_size, two.config.train.micro_batch_size) == (8, 4)
    assert one.traffic.gathered == 2 * NUM_PARAMETERS / 2
    assert two.traffic.gathered == 2 * one.traffic.gathered
    assert (one.traffic.from_host, two.traffic.from_host) == (0, 0)


@pytest.mark.parametrize(
    ("num_gpus", "gigabytes", "overrides", "probes_per_pass", "num_passes"),
    [
        (2, 40, ["zo.directions=8"], 8, 1),  # 2 passes in total, one on each rank
        (2, 38, ["zo.directions=8"], 4, 2),
        (2, 80, ["zo.directions=8", "zo.estimator=one-sided"], 10, 1),  # all 9 probes, of half of the batch
        (2, 80, ["zo.directions=8", "zo.probes_per_pass=1"], 1, 8),  # its results would differ
        (8, 40, ["zo.directions=8", "zo.probes_per_pass=16"], 2, 1),  # 8 passes in total
        (1, 400, ["zo.directions=8"], 2, 8),  # nothing is gathered
    ],
)
def test_a_pass_has_as_many_pairs_of_probes_as_fit_and_gathers_all_weights_once(
    num_gpus, gigabytes, overrides, probes_per_pass, num_passes
):
    plan = plan_of("opt-30b-sst2-lezo", num_gpus, gigabytes, *overrides)
    assert plan.chosen.config.zo.probes_per_pass == probes_per_pass
    num_shards = plan.chosen.config.partition_size or num_gpus
    share = (num_shards - 1) / num_shards
    assert plan.chosen.traffic.gathered == num_passes * 2 * NUM_PARAMETERS * share
    check_world(plan.chosen.config, num_gpus)


def test_the_text_says_what_is_assumed_and_what_travels():
    plan = plan_of("opt-30b-sst2-lezo", 8, 24, OFFLOAD)
    text = plan_text(plan)
    lines = {line[:15].strip(): line[16:] for line in text.splitlines() if line[:15].strip()}
    assert lines["inputs"].endswith("at most 128 tokens (assumed: 4 times the typical 32 tokens)")
    assert lines["host memory"] == "129 GiB for all ranks together"  # 112, and what pinning rounds up
    gathered, host = 2 * NUM_PARAMETERS * 7 / 8 / 1e9, 2 * NUM_PARAMETERS / 8 / 1e9
    travels = f"each rank receives {gathered:.2f} GB of weights, {host:.2f} GB of weights from its host, and "
    assert lines["traffic a step"].startswith(travels)
    assert lines["memory a rank"].startswith(f"{plan.chosen.memory.total / GIB:.2f} GiB: ")
    assert text.count("chosen") == 1


# Times.

H100S = Cluster(GPUS["h100"], gpus_per_node=8)


@pytest.mark.parametrize(("node_link", "seconds"), [(25.0, 2.36), (50.0, 1.18), (None, 2.36)])
def test_sharding_over_nodes_takes_the_time_of_the_links_between_them(node_link, seconds):
    cluster = replace(H100S, node_link=node_link)
    recipe = load_recipe("opt-30b-sst2-lezo", ["train.batch_size=64"])
    plan = make_plan(recipe, num_gpus=64, gpu_bytes=80 * GIB, cluster=cluster)
    by_size = {option.config.partition_size or 64: option for option in plan.options if option.fits}
    assert by_size[64].time.parts["gathers"] == pytest.approx(seconds, rel=0.01)
    assert by_size[64].time.longest == "gathers"
    assert ("25 GB/s between nodes (--node-link)" in by_size[64].time.assumptions) == (node_link is None)
    # A group inside a node only uses its links, and the plan prefers it.
    assert by_size[8].time.parts["gathers"] == pytest.approx(7 / 8 * 2 * NUM_PARAMETERS / 360e9)
    assert plan.chosen.config.partition_size <= 8
    assert plan.chosen.time.total == min(
        option.time.total
        for option in plan.options
        if option.fits and option.config.zo.update_precision == "fp32_master"
    )


def test_what_would_be_faster_is_said_with_its_factor_and_its_key():
    recipe = load_recipe("opt-30b-sst2-lezo")
    plan = make_plan(recipe, num_gpus=8, gpu_bytes=80 * GIB, cluster=H100S)
    chosen, fastest = plan.chosen, plan.fastest
    assert (chosen.config.zo.update_precision, fastest.config.zo.update_precision) == (
        "fp32_master",
        "stochastic",
    )
    factor = chosen.time.total / fastest.time.total
    assert factor > 1.2
    line = f"faster          zo.update_precision=stochastic would be {factor:.1f} times as fast: about "
    assert line in plan_text(plan)


def test_the_text_names_all_that_an_estimate_assumes_and_there_is_none_without_a_kind_of_gpu():
    recipe = load_recipe("opt-30b-boolq-lezo", ["train.batch_size=16"])
    plan = make_plan(recipe, num_gpus=16, gpu_bytes=24 * GIB, cluster=Cluster(GPUS["rtx-4090"]))
    text = plan_text(plan)
    assert "16 GPUs of 24 GiB, 8 on each of 2 nodes" in text
    for assumption in (
        "25 GB/s inside a node (--link)",
        "8 GPUs on a node (--gpus-per-node)",
        "inputs of 200 tokens",
        "40% of the products, 80% of the memory's speed and 75% of the instructions a second in the GPU's",
        "ms of Python for a block, as on a CPU that was measured",
        "Nothing of this was measured on a GPU.",
    ):
        assert assumption in text
    given = replace(plan.cluster, gpus_per_node=8, link=20.0)
    text = plan_text(make_plan(recipe, num_gpus=16, gpu_bytes=24 * GIB, cluster=given))
    assert "--link" not in text and "--gpus-per-node" not in text
    unknown = plan_text(plan_of("opt-30b-boolq-lezo", 8, 24))
    assert "time a step     not estimated: give --gpu for an estimate" in unknown
    answers = load_recipe("opt-13b-squad-mezo", ["train.objective=f1"])
    unknown = plan_text(make_plan(answers, num_gpus=1, gpu_bytes=80 * GIB, cluster=H100S))
    assert "time a step     not estimated: the answers' lengths are not known" in unknown


def test_a_plan_of_several_nodes_has_a_command_for_them_and_refuses_nodes_that_are_not_full():
    recipe = load_recipe("opt-30b-sst2-lezo")
    plan = make_plan(recipe, num_gpus=16, gpu_bytes=80 * GIB, cluster=H100S)
    command = plan_command(plan, "opt-30b-sst2-lezo", [])
    assert command.startswith("deepspeed --num_gpus 8 --hostfile HOSTFILE launch/train.py ")
    with pytest.raises(UserError, match=r"12 GPUs, 8 on each node; .* change --gpus or --gpus-per-node"):
        make_plan(recipe, num_gpus=12, gpu_bytes=80 * GIB, cluster=H100S)


PUBLISHED = {
    "facebook/opt-66b": 65_719_701_504,
    "facebook/opt-175b": 174_604_468_224,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
}
"""Numbers of parameters by name, as the hub's pages of the models have them."""


@pytest.mark.parametrize("path", PUBLISHED)
def test_a_published_model_is_planned_for_without_the_hub(path):
    recipe = load_recipe("opt-30b-sst2-lezo", [f"model.path={path}", "model.dtype=bf16"])
    assert model_sizes(recipe).num_parameters == PUBLISHED[path]


def test_a_directory_with_the_name_of_a_published_model_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opt_config("opt-125m").save_pretrained("qwen3-8b")
    recipe = load_recipe(str(REPOSITORY / "launch/recipes/demo.yaml"), ["model.path=qwen3-8b"])
    assert model_sizes(recipe).class_name == "OPTForCausalLM"


def test_a_dry_run_refuses_blocks_that_the_model_does_not_have():
    overrides = ["zo.layer_policy=fixed", "zo.layer_policy_options.blocks=37-48"]
    with pytest.raises(UserError, match="got: 37-48; expected: different blocks from 0 to 47"):
        describe_plan(load_recipe("opt-30b-sst2-lezo", overrides), 1)
    overrides[1] = "zo.layer_policy_options.blocks=36-47"
    described = describe_plan(load_recipe("opt-30b-sst2-lezo", overrides), 1)
    assert "48 in model.decoder.layers, 36 dropped per step" in described


def test_a_task_that_no_table_has_gets_a_default_length_and_is_said_to(monkeypatch):
    monkeypatch.setitem(tasks.TASKS._entries, "mine", replace(tasks.TASKS["rte"], name="mine"))
    plan = plan_of("opt-13b-rte-lezo", 1, 80, "data.task=mine")
    assumption = f"assumed: 4 times {DEFAULT_LENGTH}, since no typical length of mine is known"
    assert assumption in plan_text(plan)
    assert f"at most {4 * DEFAULT_LENGTH} tokens (assumed" in describe_plan(plan.chosen.config, 1)


def test_a_model_in_a_directory_is_planned_from_its_config_alone(tmp_path):
    opt_config("opt-125m").save_pretrained(tmp_path)
    found, published = (
        plan_of("opt-13b-sst2-lezo", 1, 8, f"model.path={path}") for path in (tmp_path, "opt-125m")
    )
    assert found.model == published.model


@pytest.mark.parametrize(
    ("num_gpus", "gigabytes", "overrides", "message"),
    [
        (1, 4, [], "opt-30b does not fit, not even with its weights"),
        (1, 4, ["model.path=opt-31b"], "opt-31b"),
        (3, 40, [], "set train.batch_size=18"),
        (2, 40, ["data.task=sst"], "sst2"),
    ],
)
def test_what_cannot_be_planned_is_refused(num_gpus, gigabytes, overrides, message):
    with pytest.raises(UserError, match=message):
        plan_of("opt-30b-sst2-lezo", num_gpus, gigabytes, *overrides)


def test_a_length_beyond_the_models_positions_is_refused():
    with pytest.raises(UserError, match=r"--length is longer .* --length 2048"):
        plan_of("opt-30b-sst2-lezo", 2, 40, length=4096)


def test_the_command_prints_a_plan_and_refuses_in_one_line():
    command = [sys.executable, str(REPOSITORY / "launch" / "plan.py"), "--gpus", "2"]
    command += ["--config", "opt-30b-sst2-lezo"]
    printed = run_well([*command, "--gpu", "a100-40g"]).out
    expected = "command         deepspeed --num_gpus 2 launch/train.py --config opt-30b-sst2-lezo"
    assert printed.splitlines()[-1] == expected
    assert_refused([*command, "--gpu-memory", "4"], "opt-30b does not fit")
    assert_refused(command, "one of the arguments --gpu --gpu-memory is required")
