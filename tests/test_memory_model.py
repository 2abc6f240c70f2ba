"""The memory model against what real runs take, and against sums that can be done by hand."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from transformers import OPTConfig

from lezo_ds import distributed
from lezo_ds.config import PeftConfig, ZoConfig
from lezo_ds.ds_config import load_ds_config
from lezo_ds.engine.lezo_engine import initialize
from lezo_ds.tools.benchmark.shapes import Workload, opt_config, write_empty_model
from lezo_ds.tools.benchmark.steps import fill_with_random_weights
from lezo_ds.tools.planning.gathering import gathered_elements
from lezo_ds.tools.planning.memory import (
    CPU_RESERVE,
    ForwardInputs,
    Sharding,
    Training,
    memory_of,
    sharding_of,
)
from lezo_ds.tools.planning.model_facts import ModuleFacts, ParameterFacts, model_facts

MIB = 1 << 20
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
STATUS = Path("/proc/self/status")
PEAK = Path("/proc/self/clear_refs")

SMALL = OPTConfig(
    vocab_size=50272,
    hidden_size=512,
    word_embed_proj_dim=512,
    ffn_dim=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    max_position_embeddings=2048,
)
NUM_PARAMETERS = 29_974_540_288
WORKLOAD = Workload(16, 64)
WITHOUT_TRAINING = Training("zero_shot", "nearest", "dual", None, ForwardInputs(1, 8, 1))


def resident(field):
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def peak_of_steps(directory, dtype, peft, num_ranks):
    """Return the peak resident memory of this process, in loading and in training a model."""
    torch.set_num_threads(1)
    # Freed blocks go back at once, so that what is resident is what is in use.
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    assert libc.mallopt(M_TRIM_THRESHOLD, 1 << 16)
    distributed.init_distributed()
    config = ZoConfig(learning_rate=1e-6, sparsity=0.5)
    ds_config = load_ds_config(None, dtype, num_ranks, 16 // num_ranks)
    PEAK.write_text("5")
    engine = initialize(str(directory), config, ds_config, dtype, peft=peft)
    loading = resident("VmHWM")
    if peft is None:
        fill_with_random_weights(engine)
    gc.collect()
    PEAK.write_text("5")  # random weights are another matter
    for _ in range(4):
        engine.train_batch(WORKLOAD.micro_batches(num_ranks), WORKLOAD.loss)
    return max(loading, resident("VmHWM"))


@pytest.mark.distributed
@pytest.mark.skipif(not PEAK.exists(), reason="the peak of a process can be reset on Linux only")
@pytest.mark.parametrize(
    ("dtype", "num_ranks", "peft"),
    [
        ("fp32", 1, None),
        ("fp32", 2, None),
        ("bf16", 1, None),  # loading takes most
        ("bf16", 2, None),
        ("fp32", 2, PeftConfig(kind="lora")),
        ("fp32", 1, PeftConfig(kind="prefix")),
    ],
)
def test_the_model_predicts_what_a_rank_takes(dtype, num_ranks, peft, tmp_path):
    """Within an eighth: usually 5%, but now and then gloo has a buffer more."""
    write_empty_model(SMALL, dtype, tmp_path)
    rows = 16 // num_ranks
    sharding = sharding_of(load_ds_config(None, dtype, num_ranks, rows), num_ranks, on_cpu=True)
    training = Training("lezo", "fp32_master", "dual", ForwardInputs(rows, 64, rows, 2), None)
    predicted = memory_of(model_facts(SMALL, dtype, peft), sharding, training, CPU_RESERVE).total
    peaks = run_ranks(peak_of_steps, num_ranks, tmp_path, dtype, peft, num_ranks)
    error, kind = predicted / max(peaks) - 1, "all weights" if peft is None else peft.kind
    print(f"\n{dtype}, {num_ranks} ranks, {kind}: {predicted // MIB} MiB predicted, {error:+.1%}")
    assert 0.875 * max(peaks) < predicted < 1.125 * max(peaks), (predicted // MIB, [p // MIB for p in peaks])


def most_gathered_at_once(directory):
    """Return how many elements are gathered at most while a module runs, in steps after the first."""
    distributed.init_distributed()
    ds_config = load_ds_config(None, "fp32", 2, 1)
    engine = initialize(str(directory), ZoConfig(learning_rate=1e-6, sparsity=0.5), ds_config, "fp32")
    fill_with_random_weights(engine)
    workload = Workload(2, 8)

    def count(*_):
        found.append(sum(p.numel for p in engine.weights.parameters if p.is_gathered))

    for module in engine.module.modules():
        module.register_forward_hook(count)
    for _ in range(2):
        found = []
        engine.train_batch(workload.micro_batches(2), workload.loss)
    return max(found)


@pytest.mark.distributed
@pytest.mark.parametrize("feed_forward", [10_000, 40_000], ids=["table", "block"])
def test_no_more_is_gathered_at_once_than_two_of_the_largest_modules(feed_forward, tmp_path):
    config = OPTConfig(
        vocab_size=50272,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=feed_forward,
        num_hidden_layers=12,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    write_empty_model(config, "fp32", tmp_path)
    model = model_facts(config, "fp32")
    block = model.num_in_blocks // 12
    assert model.largest_module == max(block, 50272 * 16)
    one_more = max(parameter.numel for parameter in model.parameters)
    for most in run_ranks(most_gathered_at_once, 2, tmp_path):
        assert model.largest_module < most < 2 * model.largest_module + one_more < model.num_parameters
        assert most <= max(gathered_elements(model.modules, 2 * model.largest_module, model.largest_module))


def zo_memory(model, partition_size=1, **changes):
    training = Training("lezo", "stochastic", "dual", ForwardInputs(1, 8, 1, 2), None)
    sharding = {k: changes.pop(k) for k in ("offload", "on_cpu", "pinned") if k in changes}
    return memory_of(model, Sharding(partition_size, **sharding), replace(training, **changes), reserve=0)


@pytest.fixture(scope="module")
def opt_30b():
    return model_facts(opt_config("opt-30b"), "fp16")


def test_the_facts_of_opt_30b_are_the_published_ones(opt_30b):
    assert opt_30b.num_parameters == opt_30b.num_trained == NUM_PARAMETERS
    assert opt_30b.num_in_blocks == opt_30b.num_trained_in_blocks == 48 * 616_655_872
    assert (opt_30b.num_blocks, opt_30b.hidden_size, opt_30b.widest) == (48, 7168, 4 * 7168)
    assert opt_30b.num_widest == 1
    assert opt_30b.modules[-1].kind == "head"
    assert opt_30b.modules[-1].parameters[0].key in {p.key for p in opt_30b.modules[3].parameters}


@pytest.mark.parametrize(("kind", "count"), [("lora", 48 * 2 * 2 * 8 * 7168), ("prefix", 48 * 2 * 5 * 7168)])
def test_with_an_adapter_only_it_has_low_bits_and_copies(kind, count, opt_30b):
    model = model_facts(opt_config("opt-30b"), "fp16", PeftConfig(kind=kind))
    assert model.num_trained == count
    memory = zo_memory(model, precision="fp32_master")
    assert memory.low_bits == 2 * count
    assert memory.copies < zo_memory(opt_30b).copies / 100


def test_a_model_on_one_rank_gathers_nothing_and_copies_its_largest_layer_twice(opt_30b):
    memory = zo_memory(opt_30b)
    assert (memory.weights, memory.gathered, memory.low_bits) == (2 * NUM_PARAMETERS, 0, 0)
    layer = 7168 * 4 * 7168
    assert memory.copies == 2 * (2 * layer + 4 * 4 * 7168)  # the bias of 4 * 7168 is perturbed in float32
    assert zo_memory(opt_30b, forward="two_pass").copies == memory.copies / 2


def test_low_bits_are_as_large_as_the_weights_and_shrink_with_the_shards(opt_30b):
    memory = zo_memory(opt_30b, 4, precision="fp32_master")
    assert memory.low_bits == memory.weights == pytest.approx(2 * NUM_PARAMETERS / 4, rel=1e-5)


def test_offloaded_weights_lie_in_the_host_and_are_gathered(opt_30b):
    memory = zo_memory(opt_30b, 1, offload="cpu", precision="fp32_master")
    assert memory.weights == memory.low_bits == 0
    assert memory.host == 4 * NUM_PARAMETERS
    assert memory.gathered > 0
    assert zo_memory(opt_30b, 1, offload="cpu", on_cpu=True).host == 0


def test_pinned_shards_in_the_host_are_rounded_up_to_powers_of_two(opt_30b):
    """As torch's allocator of pinned memory does (CachingHostAllocator.h, 2.13)."""
    memory = zo_memory(opt_30b, 1, offload="cpu", pinned=True)
    assert memory.host / (2 * NUM_PARAMETERS) == pytest.approx(1.31, abs=0.005)
    assert zo_memory(opt_30b, 1, offload="cpu").host == 2 * NUM_PARAMETERS


def test_of_weights_on_a_disk_small_shards_and_buffers_stay_in_memory(opt_30b):
    memory = zo_memory(opt_30b, 1, offload="nvme", precision="fp32_master")
    assert memory.weights == memory.low_bits == 0
    assert memory.disk + memory.host_weights == 2 * (NUM_PARAMETERS + 5 * 10**8)
    small = 48 * (4 * 7168 + 4 * 7168 + 7168 + 4 * 7168) + 2 * 7168  # biases and norms
    assert memory.host_weights == 2 * (5 * 10**8 + small)
    assert memory.host_low_bits == 2 * NUM_PARAMETERS
    on_cpu = zo_memory(opt_30b, 1, offload="nvme", on_cpu=True)
    assert (on_cpu.weights, on_cpu.disk, on_cpu.host) == (memory.host_weights, memory.disk, 0)


def test_loading_takes_the_hosts_memory_for_a_shard_at_a_time(opt_30b):
    def loading(precision, on_cpu):
        return zo_memory(opt_30b, precision=precision, on_cpu=on_cpu, forward="two_pass").loading

    assert loading("stochastic", False) == loading("fp32_master", False) == 0
    assert loading("stochastic", True) == 2 * 50272 * 7168
    # The last matrix: all other low bits are there, and its own are counted among them.
    assert loading("fp32_master", True) == (18 - 2) * 7168 * 4 * 7168 - 2 * 3 * 7168


def test_a_prefix_starts_from_a_pass_that_gathers_the_largest_module(opt_30b):
    model = model_facts(opt_config("opt-30b"), "fp16", PeftConfig(kind="prefix"))
    assert zo_memory(model).loading == 2 * 50272 * 7168


def test_adamw_takes_sixteen_bytes_a_parameter_and_as_much_again_in_its_step_or_backward_pass(opt_30b):
    def memory(tokens, on_cpu=False):
        training = Training("adamw", "nearest", "dual", ForwardInputs(1, tokens, 1, 2), None)
        return memory_of(opt_30b, Sharding(1, on_cpu=on_cpu), training, 0)

    short, long = memory(8), memory(2**17)
    assert short.weights + short.optimizer == 16 * NUM_PARAMETERS
    assert short.buckets == memory(8, on_cpu=True).buckets == 2 * 5 * 10**8
    assert (short.update, short.activations) == (12 * NUM_PARAMETERS, 0)
    assert (long.update, long.copies) == (0, 0)
    assert long.activations > 2**17 * 48 * 2 * (9 * 7168 + 2 * 4 * 7168)


def test_gradients_of_several_ranks_take_a_bucket_more_in_a_backward_pass(opt_30b):
    def memory(partition_size):
        training = Training("adamw", "nearest", "dual", ForwardInputs(1, 2**17, 1, 2), None)
        return memory_of(opt_30b, Sharding(partition_size), training, 0)

    assert (memory(1).buckets, memory(2).buckets) == (2 * 5 * 10**8, 2 * 2 * 5 * 10**8)


@pytest.mark.parametrize(("signs", "forward"), [(2, "dual"), (1, "two_pass")])
def test_full_logits_need_the_whole_head_perturbed_and_float32(signs, forward, opt_30b):
    some = zo_memory(opt_30b, forward=forward)
    all_of_them = zo_memory(opt_30b, forward=forward, train=ForwardInputs(16, 104, 16 * 100))
    assert some.logits == 0
    assert all_of_them.copies == 2 * signs * 50272 * 7168
    count = 16 * 100 * 50272
    assert all_of_them.logits == 2 * signs * count + max(2 * signs * count, 8 * count)


def test_written_tokens_keep_keys_and_values(opt_30b):
    def activations(num_written):
        evaluate = ForwardInputs(4, 256, 4, None, num_written)
        return memory_of(opt_30b, Sharding(1), replace(WITHOUT_TRAINING, evaluate=evaluate), 0).activations

    assert activations(50) - activations(0) == 4 * 306 * 48 * 2 * 7168 * 2


def modules(*sizes):
    """Return modules that own parameters of these sizes; equal keys are one parameter."""
    return [
        ModuleFacts("block", tuple(ParameterFacts(key, numel, False, True) for key, numel in own))
        for own in sizes
    ]


def test_without_prefetch_a_module_has_its_own_weights():
    assert gathered_elements(modules([(0, 10)], [(1, 20), (2, 5)], []), 1000, 0) == [10, 25, 0]


def test_a_tied_table_stays_until_its_last_use():
    assert gathered_elements(modules([(0, 10)], [(1, 20)], [(0, 10)], []), 1000, 0) == [10, 30, 10, 0]


def test_prefetch_gathers_up_to_its_bucket_and_no_more_than_may_live():
    chain = modules(*[[(key, 10)] for key in range(6)])
    assert gathered_elements(chain, 1000, 10) == [20, 20, 20, 20, 20, 10]
    assert gathered_elements(chain, 1000, 25)[0] == 40  # it ends with the parameter that reaches 25
    assert max(gathered_elements(chain, 20, 1000)) == 20


def test_the_limits_of_prefetch_are_read_from_the_ds_config():
    zero = {"stage": 3, "stage3_max_live_parameters": 7, "stage3_prefetch_bucket_size": 5}
    config = {"zero_optimization": {**zero, "offload_param": {"device": "cpu"}}}
    assert sharding_of(config, 2, on_cpu=False) == Sharding(2, "cpu", 7, 5)
    zero["offload_param"] = {"device": "nvme", "buffer_count": 3, "buffer_size": 11}
    on_disk = {"zero_optimization": zero}
    assert sharding_of(on_disk, 1, on_cpu=False) == Sharding(1, "nvme", 7, 5, disk_buffers=33)
    assert sharding_of({"zero_optimization": {"stage": 3}}, 2, on_cpu=True) == Sharding(2, on_cpu=True)


def test_limits_of_the_ds_config_take_the_place_of_those_of_the_model(opt_30b):
    largest = 616_655_872
    assert opt_30b.largest_module == largest

    def gathered(method="lezo", **limits):
        training = replace(WITHOUT_TRAINING, method=method)
        return memory_of(opt_30b, Sharding(1000, **limits), training, 0).gathered

    assert gathered() == gathered(max_live=2 * largest, prefetch_bucket=largest)
    behind = 2 * largest  # bytes: of the block that a GPU still runs in a zeroth-order step
    assert gathered("adamw") + behind == gathered(max_live=10**9, prefetch_bucket=5 * 10**7)
    assert gathered(prefetch_bucket=0) < gathered(max_live=10**9) < gathered()
