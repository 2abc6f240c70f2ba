from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from tiny_runs import DS_CONFIG, NUM_BLOCKS, start_engine, train
from torch import nn

from lezo_ds import distributed
from lezo_ds.distributed import accelerator
from lezo_ds.errors import UserError
from lezo_ds.sharding import zero3
from lezo_ds.sharding.parameters import NamedParameter
from lezo_ds.sharding.zero3 import shard_range


@given(numel=st.integers(1, 10_000), world_size=st.integers(1, 64))
def test_shard_ranges_cover_every_element_once_in_order(numel, world_size):
    ranges = [shard_range(numel, rank, world_size) for rank in range(world_size)]
    covered = [element for start, count in ranges for element in range(start, start + count)]
    assert covered == list(range(numel))
    assert max(count for _, count in ranges) == -(-numel // world_size)


@dataclass
class _Accelerator:
    """What DeepSpeed says of a node with so many GPUs; there is none here."""

    count: int
    current: int = 0

    def device_name(self):
        return "cuda"

    def device_count(self):
        return self.count

    def set_device(self, index):
        self.current = index


def test_a_rank_takes_the_gpu_of_its_own(monkeypatch):
    """Before the first message: every rank's would start from GPU 0 otherwise."""
    node = _Accelerator(2)
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: node)
    monkeypatch.setenv("LOCAL_RANK", "1")
    accelerator.take_device()
    assert node.current == 1


class _Event:
    """An event of a GPU that runs what it is asked for only when it is waited for."""

    done: ClassVar[list[int]] = []

    def record(self):
        self.number = len(_Event.done)
        _Event.done.append(0)

    def synchronize(self):
        _Event.done[self.number] = 1


def test_the_host_is_one_block_ahead_of_the_gpu_and_no_more(monkeypatch):
    monkeypatch.setattr(_Accelerator, "Event", _Event, raising=False)
    monkeypatch.setattr(_Event, "done", [])
    monkeypatch.setattr(zero3, "get_accelerator", lambda: _Accelerator(1))
    blocks = [nn.Identity() for _ in range(4)]
    zero3.keep_in_step(blocks)
    for number, block in enumerate(blocks):
        block(torch.zeros(1))
        assert _Event.done == [1] * number + [0]


def test_a_rank_without_a_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: _Accelerator(1))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match=r"rank 1 of its node has no GPU.*got: 1 visible.*--gpus-per-node"):
        accelerator.take_device()


# What this package knows of DeepSpeed's inside, checked against the installed version.

SHAPES = {"matrix": (7, 3), "vector": (5,), "single": (1,), "even": (4, 6)}


class _Holder(nn.Module):
    """Parameters whose sizes the ranks do not divide, one tied, one frozen, one in 16 bits; and a buffer."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            dtype = torch.bfloat16 if name == "even" else torch.float32
            setattr(self, name, nn.Parameter(torch.empty(shape, device="meta", dtype=dtype)))
        self.vector.requires_grad_(False)
        self.inner = nn.Linear(3, 7, bias=False, device="meta")
        self.inner.weight = self.matrix
        self.register_buffer("table", torch.arange(3.0))


def _sharded_holder():
    distributed.init_distributed()
    model = _Holder()
    zero3.shard_model(model, json.loads(DS_CONFIG.read_text()) | {"train_micro_batch_size_per_gpu": 1})
    named = {parameter: NamedParameter(name, 0, None) for name, parameter in model.named_parameters()}
    parameters = zero3.sharded_parameters(model, named)
    for parameter in parameters:
        stored = parameter.parameter.ds_tensor
        stored.data.fill_(float("nan"))  # the padding keeps it
        with parameter.shard(write=True) as shard:
            assert shard.shape == (parameter.count,)
            shard.copy_(torch.arange(parameter.start, parameter.start + parameter.count))
    return model, parameters


def _describe_shards(num_ranks):
    model, parameters = _sharded_holder()
    rank = distributed.rank()
    for p in parameters:
        stored = p.parameter.ds_tensor
        size = -(-p.numel // num_ranks)
        assert (p.start, p.count) == shard_range(p.numel, rank, num_ranks)
        assert stored.shape == (size,)  # flat
        assert stored.dtype == p.parameter.dtype
        assert p.parameter.data.numel() == 0  # nothing stays whole
        assert p.shape == SHAPES[p.name]
        assert torch.isnan(stored[p.count :]).all()
        with deepspeed.zero.GatheredParameters([p.parameter]):
            # DeepSpeed builds the row-major parameter from the slices, and drops the padding.
            full = p.parameter.data.clone()
        assert torch.equal(full.float(), torch.arange(p.numel).view(p.shape).float())
        assert torch.equal(p.gather().float(), full.float())
        int16 = torch.arange(p.start, p.start + p.count, dtype=torch.int16) - 3
        assert torch.equal(p.gather_like(int16), torch.arange(p.numel, dtype=torch.int16).view(p.shape) - 3)
    assert model.inner.weight is model.matrix
    assert torch.equal(model.table, torch.arange(3.0))
    return [(p.name, p.count, p.parameter.requires_grad, p.parameter.dtype) for p in parameters]


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_shards_are_flat_slices_and_their_padding_is_never_read(num_ranks):
    results = run_ranks(_describe_shards, num_ranks, num_ranks)
    for result in results:
        assert [(name, grad) for name, _, grad, _ in result] == [(name, name != "vector") for name in SHAPES]
        assert [str(dtype) for *_, dtype in result] == ["torch.float32"] * 3 + ["torch.bfloat16"]
    if num_ranks == 4:
        assert [[count for _, count, *_ in result] for result in results] == [
            [6, 2, 1, 6],
            [6, 2, 0, 6],
            [6, 1, 0, 6],
            [3, 0, 0, 6],
        ]


def _hold_a_gathered_parameter():
    _, parameters = _sharded_holder()
    zero3.assert_released(parameters)
    with deepspeed.zero.GatheredParameters([parameters[0].parameter]):
        assert parameters[0].parameter.ds_status == ZeroParamStatus.AVAILABLE
        try:
            zero3.assert_released(parameters)
        except RuntimeError as error:
            message = str(error)
    zero3.assert_released(parameters)
    return message


@pytest.mark.distributed
def test_a_parameter_that_is_still_gathered_is_named():
    assert (
        run_ranks(_hold_a_gathered_parameter, 2)
        == ["parameters still gathered after a forward pass: ['matrix']"] * 2
    )


def _change_the_gathered_copy():
    _, parameters = _sharded_holder()
    before, parameter = parameters[0].gather(), parameters[0].parameter
    parameter.all_gather_coalesced([parameter]).wait()  # as DeepSpeed's hooks do before a forward
    parameter.data.add_(1.0)
    parameter.partition()
    return torch.equal(parameters[0].gather(), before)


@pytest.mark.distributed
def test_a_change_of_a_gathered_copy_is_lost_but_on_one_rank_it_is_the_shard_itself():
    # Why updates go to shards, and perturbations out of place.
    assert run_ranks(_change_the_gathered_copy, 2) == [True, True]
    assert run_ranks(_change_the_gathered_copy, 1) == [False]


def _gather_both_ways(dtype, count):
    distributed.init_distributed()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    found = []
    for group in (None, groups[dist.get_rank() % 2]):
        size = dist.get_world_size(group)
        mine = torch.arange(count).mul(dist.get_rank() + 1).to(dtype)
        wanted, own, in_place = (torch.zeros(size * count, dtype=dtype) for _ in range(3))
        dist.all_gather_into_tensor(wanted, mine, group)
        comm.all_gather_into_tensor(own, mine, group=group)
        slot = in_place.view(size, count)[dist.get_rank(group)]  # DeepSpeed gathers several weights in place
        slot.copy_(mine)
        comm.all_gather_into_tensor(in_place, slot, group=group, async_op=True).wait()
        found += [torch.equal(own, wanted), torch.equal(in_place, wanted), bool(wanted.any())]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_broadcasts_gather_what_an_all_gather_does(dtype):
    assert run_ranks(_gather_both_ways, 4, dtype, 1001) == [[True] * 6] * 4


def _hooks_of(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def _count_gathers(directory):
    """Return the weights that each of two passes gathered by part, the hooks, and what stayed gathered."""
    engine = start_engine(directory)
    owner, (gather, _) = zero3.GATHERING[0]
    original, asked, started = getattr(owner, gather), [], []
    setattr(owner, gather, lambda self, parts: (asked.append(len(parts)), original(self, parts)))
    start = zero3._ShardedPart.start
    zero3._ShardedPart.start = lambda self: (started.append(self.numel), start(self))
    passes = []
    for _ in range(2):
        train(engine, 1, num_micro_batches=distributed.world_size())
        passes.append((len(asked), list(started)))
        asked.clear()
        started.clear()
    held = [p.name for p in engine.weights.parameters if p.parameter.numel()]
    return passes, _hooks_of(engine.module), held, sum(p.numel for p in engine.weights.parameters)


@pytest.mark.distributed
def test_a_block_is_one_message_and_every_weight_is_gathered_once_a_pass(opt_directory):
    for passes, num_hooks, held, numel in run_ranks(_count_gathers, 2, opt_directory):
        for num_modules, started in passes:
            # Blocks, both embeddings, the last norm, and the head, which is tied.
            assert (num_modules, len(started)) == (NUM_BLOCKS + 4, NUM_BLOCKS + 3)
            assert sum(started) == numel
        assert num_hooks == 2 * (NUM_BLOCKS + 4) + 2  # and the root's own
        assert held == []


def _look_at_resident_weights(directory):
    engine = start_engine(directory)
    train(engine, 1)
    found = []
    for parameter in engine.weights.parameters:
        tensor = parameter.parameter
        found.append(
            (tensor.data_ptr() == tensor.ds_tensor.data_ptr(), tuple(tensor.shape) == parameter.shape)
        )
    return found, _hooks_of(engine.module), {type(m._parameters) for m in engine.module.modules()}


@pytest.mark.distributed
def test_whole_weights_are_their_own_shards_and_deepspeed_does_nothing_in_a_pass(opt_directory):
    ((found, num_hooks, kinds),) = run_ranks(_look_at_resident_weights, 1, opt_directory)
    assert set(found) == {(True, True)}
    assert (num_hooks, kinds) == (0, {dict})


def _spoil_resident_weights(directory):
    """Return what a step says after each way to take a resident parameter away from its shard."""
    engine = start_engine(directory)
    before, parameter = engine.weights.digest(), engine.weights.parameters[5]
    tensor = parameter.parameter

    def copy():
        tensor.data = tensor.data.clone()

    def gather():
        """What DeepSpeed does where it reads a parameter that it believes not gathered."""
        tensor.ds_status = ZeroParamStatus.NOT_AVAILABLE
        tensor.data = tensor.ds_tensor.data.clone().view(tensor.ds_shape)

    def forget():
        tensor.ds_status = ZeroParamStatus.NOT_AVAILABLE

    messages = []
    for spoil in (copy, gather, forget):
        spoil()
        try:
            train(engine, 1)
        except RuntimeError as error:
            messages.append(str(error))
        zero3._keep_resident([tensor])
    unchanged = engine.weights.digest() == before
    tensor.partition()  # DeepSpeed releases it, and no module can run without it
    try:
        train(engine, 1)
    except RuntimeError:
        return messages, parameter.name, unchanged


@pytest.mark.distributed
def test_a_resident_parameter_that_is_not_its_shard_is_named_before_any_update(opt_directory):
    ((messages, name, unchanged),) = run_ranks(_spoil_resident_weights, 1, opt_directory)
    assert messages == [f"parameters still gathered after a forward pass: ['{name}']"] * 3
    assert unchanged


def _interrupt(directory):
    """Return the records after a pass that ended in the middle, and those without it."""
    engine = start_engine(directory)
    num_passes = distributed.world_size()
    expected = train(engine, 2, num_passes)
    again = start_engine(directory)
    train(again, 1, num_passes)

    def fail(*_):
        raise InterruptedError

    hook = again.module.model.decoder.layers[1].fc1.register_forward_hook(fail)
    try:
        train(again, 1, num_passes)
    except InterruptedError:
        hook.remove()
    return expected[1] == train(again, 1, num_passes)[0]


@pytest.mark.distributed
def test_a_pass_after_one_that_an_error_ended_is_as_any_other(opt_directory):
    assert run_ranks(_interrupt, 2, opt_directory) == [True, True]
