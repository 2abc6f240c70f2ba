"""Shards: how they are made, read, written and gathered. Only this module knows the internals of ZeRO-3.

It relies on these facts about DeepSpeed 0.19.8, which tests/ranks/test_zero3.py checks:
- A sharded parameter holds `ds_tensor`, a flat tensor of ceil(numel / size) elements. They are a slice of the
  row-major flattened parameter that starts at rank * ceil(numel / size). Rank and size are those in the
  process group that shares the parameter. Elements past the parameter's end are uninitialized memory.
- `data` is empty while the parameter is not gathered.
- If one rank holds the whole parameter, in memory of its device, its `data` is a view of `ds_tensor`
  (`_keep_resident`, for forward passes only).
- With NVMe offload, `ds_tensor` holds data only between a swap in and a swap out.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lezo_ds.distributed.accelerator import device
from lezo_ds.sharding.gather_ahead import GatherAhead
from lezo_ds.sharding.parameters import NamedParameter

GATHERING: tuple[tuple[type, tuple[str, str]], ...] = (
    (GatherAhead, ("gather", "release")),
    (PartitionedParameterCoordinator, ("fetch_sub_module", "release_sub_module")),
)
"""The classes and their methods that gather a module's weights before it runs and release them after it runs.
Profilers wrap these methods."""


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """One parameter of the sharded model, as this rank holds it.

    Attributes:
        named: its name, id and transformer block.
        parameter: the torch parameter. Its data is empty unless DeepSpeed has gathered it.
        shape: shape of the full parameter.
        start: index of this rank's first element in the flattened parameter.
        count: number of valid elements on this rank. It is 0 if the shard is all padding.
    """

    named: NamedParameter
    parameter: nn.Parameter
    shape: tuple[int, ...]
    start: int
    count: int

    @property
    def name(self) -> str:
        """Name in the unsharded model."""
        return self.named.name

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, but not to biases and norms (as in MeZO's code)."""
        return len(self.shape) > 1

    @property
    def group(self) -> Any:  # noqa: ANN401
        """The process group of the ranks that share the parameter."""
        return self._deepspeed.ds_process_group

    @property
    def is_gathered(self) -> bool:
        """Whether the full parameter is resident on this rank."""
        return bool(self._deepspeed.ds_status != ZeroParamStatus.NOT_AVAILABLE)

    @property
    def shard_in_memory(self) -> Tensor | None:
        """Shard of this rank, as `shard` gives it. None if it is in a file, and in memory only while open."""
        stored = self._deepspeed.ds_tensor
        if stored.status is PartitionedParamStatus.NOT_AVAILABLE:
            return None
        return _without_padding(stored, self.count)

    @property
    def _deepspeed(self) -> Any:  # noqa: ANN401  # the parameter, with the attributes that DeepSpeed adds
        return self.parameter

    def shard(self, *, write: bool = False) -> _OpenShard:
        """Open this rank's shard: a flat view [count] of its valid elements, without the padding.

        Args:
            write: whether changes of the view are kept. With NVMe offload they are written back.
        """
        return _OpenShard(self.parameter, self.count, write=write)

    def gather(self) -> Tensor:
        """Return the full parameter on the CPU, on every rank. A collective: every rank must call it."""
        with self.shard() as shard:
            return self.gather_like(shard)

    def gather_like(self, mine: Tensor) -> Tensor:
        """Return the full tensor, on the CPU, of a tensor that is sharded like this parameter. A collective.

        Args:
            mine: [count], this rank's elements.
        """
        partition_size = self._deepspeed.ds_zero_partition_world_size
        padded = torch.zeros(-(-self.numel // partition_size), dtype=mine.dtype, device=device())
        padded[: self.count] = mine
        full = torch.empty(padded.numel() * partition_size, dtype=padded.dtype, device=padded.device)
        # The message is sent as bytes, because gloo does not support every dtype (for example, int16).
        comm.all_gather_into_tensor(full.view(torch.uint8), padded.view(torch.uint8), group=self.group)
        return full[: self.numel].view(self.shape).cpu()

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return int(self._deepspeed.ds_numel)


class _OpenShard:
    """The context of `ShardedParameter.shard`.

    A step enters hundreds of them, and a generator would take twice the time.
    """

    def __init__(self, parameter: Any, count: int, *, write: bool) -> None:  # noqa: ANN401
        self._parameter = parameter
        self._count = count
        self._write = write
        self._swapped_in = False

    def __enter__(self) -> Tensor:
        stored = self._parameter.ds_tensor
        # With NVMe offload the shard lives in a file. The swapper has no public methods for one parameter.
        self._swapped_in = stored.status is PartitionedParamStatus.NOT_AVAILABLE
        if self._swapped_in:
            self._parameter.nvme_swapper.swap_in([self._parameter], async_op=False)
        return _without_padding(stored, self._count)

    def __exit__(self, *_: object) -> None:
        if not self._swapped_in:
            return
        swapper = self._parameter.nvme_swapper
        if self._write:
            swapper.swap_out_and_release([self._parameter])
        else:
            swapper.remove_partition_and_release_buffers([self._parameter])


def _without_padding(stored: Tensor, count: int) -> Tensor:
    flat: Tensor = stored.data.view(-1)
    return flat[:count]


def shard_range(numel: int, rank: int, partition_size: int) -> tuple[int, int]:
    """Return (start, count) of the elements of a parameter that one of `partition_size` ranks holds.

    >>> [shard_range(10, rank, 4) for rank in range(4)]
    [(0, 3), (3, 3), (6, 3), (9, 1)]
    """
    size = -(-numel // partition_size)
    start = min(rank * size, numel)
    return start, min(start + size, numel) - start


def shard_model(model: nn.Module, ds_config: Mapping[str, Any], partition_size: int | None = None) -> None:
    """Turn a model on the meta device into a ZeRO-3 sharded model in place, one parameter at a time.

    The values of the shards are undefined until they are loaded. Memory for one full parameter at a time is
    reserved, but never written.

    Args:
        model: its parameters are on the meta device, tied parameters are tied, and its buffers are real.
        ds_config: the DeepSpeed config, stage 3. It decides where shards live (device, CPU, NVMe).
        partition_size: number of ranks that share one copy of the weights. None shares it among all ranks.
    """
    group = _partition_group(partition_size or comm.get_world_size())
    init = deepspeed.zero.Init(config_dict_or_path=dict(ds_config), data_parallel_group=group)
    sharded: dict[nn.Parameter, Any] = {}
    for parameter in model.parameters():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=init.local_device)
        sharded[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
        # These are the two halves of zero.Init's _zero_init_param (0.19.8). In between it broadcasts the full
        # parameter from rank 0, which is of no use here, because the values are not loaded yet.
        init._convert_to_deepspeed_param(sharded[parameter])
        sharded[parameter].partition()
    for module in model.modules():
        module._parameters.update({n: sharded[p] for n, p in module._parameters.items() if p is not None})
        module._buffers.update(
            {n: b.to(init.local_device) for n, b in module._buffers.items() if b is not None}
        )


@functools.cache
def _partition_group(partition_size: int) -> Any:  # noqa: ANN401
    """Return this rank's shard group: `partition_size` consecutive ranks. A collective on its first call.

    Every rank makes its own group only. A thousand ranks would otherwise make a thousand groups each.
    """
    world_size, rank = comm.get_world_size(), comm.get_rank()
    if partition_size == world_size:
        return comm.get_world_group()
    start = rank - rank % partition_size
    ranks = range(start, start + partition_size)
    # MPI cannot make a group without the other ranks. DeepSpeed uses NCCL on GPUs and gloo on CPUs.
    return dist.new_group(ranks, timeout=_world_timeout(), use_local_synchronization=True)


def _world_timeout() -> timedelta | None:
    """Return how long a message of all ranks waits; None, torch's default, if torch does not tell.

    A new group has torch's default timeout, not that of the world group. torch 2.13 has no public method that
    returns the latter, and its fake process group has none.
    """
    backend = dist.group.WORLD._get_backend(device())  # type: ignore[union-attr]
    return getattr(getattr(backend, "options", None), "_timeout", None)


def sharded_parameters(
    model: nn.Module, named: Mapping[nn.Parameter, NamedParameter]
) -> list[ShardedParameter]:
    """Return all parameters of a sharded model, in the order of its named_parameters."""
    found = []
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        start, count = shard_range(
            numel=parameter.ds_numel,
            rank=parameter.ds_zero_partition_rank,
            partition_size=parameter.ds_zero_partition_world_size,
        )
        found.append(
            ShardedParameter(
                named=named[parameter],
                parameter=parameter,
                shape=tuple(parameter.ds_shape),
                start=start,
                count=count,
            )
        )
    return found


def assert_released(parameters: Sequence[ShardedParameter]) -> None:
    """Check that no parameter holds a gathered copy of its weights.

    DeepSpeed and our forward pass read what a parameter holds as it is. After an update of the shards, a copy
    would be stale. A parameter may hold nothing, or its own shard if that is the whole weight.

    Raises:
        RuntimeError: a parameter is gathered, or a resident one holds something else than its shard.
    """
    tensors: list[Any] = [parameter.parameter for parameter in parameters]
    shards = [tensor.ds_tensor for tensor in tensors]
    # `map` keeps these hundreds of calls out of the interpreter.
    held, owned = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.data_ptr, shards))
    wanted = [
        own if tensor.ds_status is ZeroParamStatus.AVAILABLE else 0
        for tensor, own in zip(tensors, owned, strict=True)
    ]
    if held != wanted:
        triples = zip(parameters, held, wanted, strict=True)
        names = [parameter.name for parameter, is_at, must_be_at in triples if is_at != must_be_at]
        raise RuntimeError(f"parameters still gathered after a forward pass: {names}")


@contextmanager
def gathered_modules(model: nn.Module) -> Iterator[None]:
    """Gather each module's own parameters while it runs. This allows forward passes before the engine starts.

    Every rank must run the same passes.
    """
    running: list[Any] = []

    def gather(module: nn.Module, _inputs: Any) -> None:  # noqa: ANN401
        running.append(deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False))))
        running[-1].__enter__()

    def release(_module: nn.Module, _inputs: Any, _output: Any) -> None:  # noqa: ANN401
        running.pop().__exit__(None, None, None)

    hooks: list[Any] = []
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            hooks += [module.register_forward_pre_hook(gather), module.register_forward_hook(release)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def finish_updates() -> None:
    """Wait until the shards are updated.

    DeepSpeed gathers them on a stream of its own, which does not wait for the stream that updates them.
    """
    get_accelerator().synchronize()


class ForwardEngine:
    """Runs a sharded model forward.

    Args:
        deepspeed_engine: on the model.
        run: the engine itself, if DeepSpeed's hooks gather the weights; otherwise the model.

    Attributes:
        module: the model.
        monitor: DeepSpeed's monitor.
        has_whole_blocks: whether all weights of a block are there when the block begins. DeepSpeed's hooks
            gather those of one module at a time.
    """

    def __init__(self, deepspeed_engine: Any, run: Callable[..., Any]) -> None:  # noqa: ANN401
        self.has_whole_blocks = run is not deepspeed_engine
        self.module = deepspeed_engine.module
        self.monitor = deepspeed_engine.monitor
        self._deepspeed = deepspeed_engine  # what it holds ends with it
        self._run = run

    def __call__(self, **inputs: Any) -> Any:  # noqa: ANN401
        """Return the model's output. A collective if the weights are sharded."""
        return self._run(**inputs)


def start_forward_engine(
    model: nn.Module, blocks: Iterable[nn.Module], ds_config: Mapping[str, Any]
) -> ForwardEngine:
    """Wrap a sharded model in a DeepSpeed engine without an optimizer, for forward passes only.

    DeepSpeed makes and keeps the shards. Its hooks gather them, module by module, only if they are offloaded
    from this rank's device: the hooks take two thirds of the host's time in a step. If the shards are on the
    device, a block is gathered with one message. If they are whole weights, nothing is gathered at all.

    Args:
        model: from `shard_model`.
        blocks: its transformer blocks.
        ds_config: stage 3.
    """
    blocks = list(blocks)
    parameters: list[Any] = list(model.parameters())
    is_here = all(map(_is_here, parameters))
    is_whole = is_here and all(parameter.ds_zero_partition_world_size == 1 for parameter in parameters)
    if not is_whole and get_accelerator().device_name() != "cpu":
        keep_in_step(blocks)
    engine, *_ = deepspeed.initialize(model=model, config=dict(ds_config))
    engine.eval()
    if not is_here:
        # Without an optimizer, `engine.optimizer` is DeepSpeedZeRoOffload (0.19.8). Its backward hooks are
        # registered as forward hooks, so they cost time even if there is no backward pass.
        for hook in engine.optimizer.backward_hooks:
            hook.remove()
        return ForwardEngine(engine, run=engine)
    _remove_hooks(engine)
    if is_whole:
        _keep_resident(parameters)
    else:
        stream = None if get_accelerator().is_synchronized_device() else get_accelerator().Stream()
        ahead = engine.zero_max_live_parameters() if engine.zero_prefetch_bucket_size() > 0 else 0
        GatherAhead(model, _parts_of(model, blocks, stream), max_numel=ahead)
    return ForwardEngine(engine, run=model)


def _is_here(parameter: Any) -> bool:  # noqa: ANN401  # the parameter, with what DeepSpeed adds
    stored = parameter.ds_tensor
    return bool(stored.status == PartitionedParamStatus.AVAILABLE and stored.device == device())


def _remove_hooks(engine: Any) -> None:  # noqa: ANN401
    """Remove all that DeepSpeed does while a model runs forward (0.19.8)."""
    engine.optimizer.destroy()  # the hooks that gather and release
    # These start timers that only a training engine reads, and let parameters gather themselves.
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    for module in engine.module.modules():
        # DeepSpeed has put in its place a dict that gathers a parameter when it is read.
        module._parameters = module.__dict__.pop("_original_parameters")


def _keep_resident(parameters: Iterable[Any]) -> None:
    """Let each parameter be its own shard, which is the whole weight."""
    for parameter in parameters:
        parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
        # With another status, DeepSpeed would gather a copy where it meets the parameter.
        parameter.ds_status = ZeroParamStatus.AVAILABLE


def _parts_of(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    stream: Any,  # noqa: ANN401
) -> dict[nn.Module, list[_ShardedPart]]:
    """Return the parts of each block, and of each module outside the blocks that has parameters."""
    used_by = {block: list(block.parameters()) for block in blocks}
    inside = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        if module not in inside:
            used_by[module] = list(module.parameters(recurse=False))
            for child in module.children():
                if isinstance(child, nn.ParameterDict | nn.ParameterList):  # they do not run themselves
                    used_by[module] += child.parameters()
    num_users = Counter(parameter for used in used_by.values() for parameter in used)
    shared = {p: _ShardedPart([p], stream, is_shared=True) for p, users in num_users.items() if users > 1}
    found: dict[nn.Module, list[_ShardedPart]] = {}
    for module, used in used_by.items():
        own = [parameter for parameter in used if parameter not in shared]
        found[module] = [shared[parameter] for parameter in used if parameter in shared]
        by_kind: dict[Any, list[Any]] = {}
        for parameter in own:
            by_kind.setdefault(parameter.dtype, []).append(parameter)
        found[module] += [_ShardedPart(same, stream) for same in by_kind.values()]
    return {module: parts for module, parts in found.items() if parts}


class _ShardedPart:
    """Parameters that are gathered with one message. It is a `gather_ahead.Part`.

    The message has the shards of each rank one after the other. Each parameter is then copied to memory of
    its own, whose alignment does not depend on its neighbors: matrix products may give other bits otherwise.

    Args:
        parameters: at least one, of one dtype.
        stream: on a GPU, where messages and copies run, so that they overlap with the forward pass.
        is_shared: see `gather_ahead.Part`.
    """

    def __init__(self, parameters: Sequence[Any], stream: Any, *, is_shared: bool = False) -> None:  # noqa: ANN401
        self.numel = sum(parameter.ds_numel for parameter in parameters)
        self.is_shared = is_shared
        self._parameters = parameters
        self._stream = stream
        self._sizes = [parameter.ds_tensor.numel() for parameter in parameters]
        first = parameters[0]
        self._group = first.ds_process_group
        self._rank, self._num_ranks = first.ds_zero_partition_rank, first.ds_zero_partition_world_size
        self._like = {"dtype": first.dtype, "device": device()}
        self._released = torch.empty(0, **self._like)
        self._message: tuple[Tensor, Any] | None = None

    def start(self) -> None:
        """Send the message."""
        shards = []
        for parameter in self._parameters:
            parameter.ds_status = ZeroParamStatus.INFLIGHT
            shards.append(parameter.ds_tensor)
        with get_accelerator().stream(self._stream):
            flat = torch.empty(self._num_ranks, sum(self._sizes), **self._like)
            mine = flat[self._rank]
            torch.cat(shards, out=mine)
            work = comm.all_gather_into_tensor(flat.view(-1), mine, group=self._group, async_op=True)
        self._message = flat, work

    def wait(self) -> None:
        """Receive the message."""
        assert self._message is not None, "a part is asked for before it is waited for"
        flat, work = self._message
        with get_accelerator().stream(self._stream):
            work.wait()
            whole = [torch.empty(self._num_ranks, size, **self._like) for size in self._sizes]
            torch.split_with_sizes_copy(flat, self._sizes, dim=1, out=whole)
        if self._stream is not None:
            get_accelerator().current_stream().wait_stream(self._stream)
        for parameter, padded in zip(self._parameters, whole, strict=True):
            parameter.data = padded.view(-1)[: parameter.ds_numel].view(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        self._message = None

    def release(self) -> None:
        """Free the whole weights, as soon as the GPU is done with them."""
        for parameter in self._parameters:
            if self._stream is not None:
                parameter.data.record_stream(get_accelerator().current_stream())
            parameter.data = self._released
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE


def keep_in_step(blocks: Iterable[nn.Module]) -> None:
    """Keep the host at most one block ahead of the GPU.

    The memory of a gathered block is reused only after the GPU is done with the block. A faster host would
    allocate new memory for every block. FSDP's limit_all_gathers (PyTorch pull request 83917) does the same.
    """
    asked: deque[Any] = deque()

    def wait(*_: Any) -> None:  # noqa: ANN401
        event = get_accelerator().Event()
        event.record()
        asked.append(event)
        if len(asked) > 1:
            asked.popleft().synchronize()

    for block in blocks:
        block.register_forward_hook(wait)


def start_training_engine(
    *, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, ds_config: Mapping[str, Any]
) -> Any:  # noqa: ANN401
    """Wrap a sharded model in a DeepSpeed engine that also shards gradients and optimizer states.

    Args:
        model: from `shard_model`, with its shards loaded.
        optimizer: of its trainable parameters.
        schedule: of the learning rate, from torch or transformers.
        ds_config: stage 3, with gradient_accumulation_steps.
    """
    # With offload, DeepSpeed would insist on its own CPU optimizer, which has to be compiled.
    config = {**ds_config, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    engine.eval()
    return engine


def release_gathered(training_engine: Any) -> None:  # noqa: ANN401
    """Release every weight that is still gathered after a forward pass without a backward pass."""
    training_engine.optimizer.parameter_offload.partition_all_parameters()


@contextmanager
def no_gathered_weights_saved() -> Iterator[None]:
    """Make autograd save a reference to a gathered weight (or a view of it) instead of the weight itself.

    Otherwise the graph of a forward pass keeps every gathered weight until the backward pass, so that every
    rank holds the whole model (DeepSpeed issue 1465). When the backward pass reads a weight, DeepSpeed has
    gathered it again.
    """

    def pack(tensor: Tensor) -> Any:  # noqa: ANN401
        owner = tensor if isinstance(tensor, nn.Parameter) else tensor._base
        if not hasattr(owner, "ds_tensor"):
            return tensor
        assert owner is not None
        offset = tensor.storage_offset() - owner.storage_offset()
        return owner, tensor.shape, tensor.stride(), offset

    def unpack(saved: Any) -> Tensor:  # noqa: ANN401
        if isinstance(saved, Tensor):
            return saved
        owner, shape, stride, offset = saved
        data: Tensor = owner.data
        return data.as_strided(shape, stride, data.storage_offset() + offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
