"""All that knows the inside of DeepSpeed's ZeRO-3: shards, their ranges, building and gathering them.

Facts this module rests on (DeepSpeed 0.19.8; tests/test_zero3.py checks them against the installed version):
a sharded parameter holds `ds_tensor`, flat, ceil(numel / world) elements of the row-major flattened parameter,
starting at rank * ceil(numel / world); what lies past the last element is uninitialised memory; `data` is empty
while the parameter is not gathered. On NVMe, `ds_tensor` is only there between a swap in and a swap out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus
from torch import Tensor, nn

from lezo_ds.perturbed_forward import NamedParameter

ReadRange = Callable[[str, int, int], Tensor]
"""(parameter name, start, stop) -> that range of the flattened parameter, on the CPU, in the model's dtype."""


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter of the sharded model, as this rank holds it.

    Attributes:
        named: its name, noise stream and block.
        parameter: the torch parameter; its data is there only while DeepSpeed has gathered it.
        shape: full shape.
        start: index of this rank's first element in the flattened parameter.
        count: number of valid elements this rank holds (0 for a rank past the end).
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

    @contextmanager
    def shard(self, *, write: bool = False) -> Iterator[Tensor]:
        """Give this rank's valid elements: a flat view [count] of the shard, without its padding.

        With `write`, changes made to the view are kept (on NVMe: written back).
        """
        stored = self.parameter.ds_tensor
        swapped_in = stored.status == PartitionedParamStatus.NOT_AVAILABLE
        if swapped_in:
            self.parameter.nvme_swapper.swap_in([self.parameter], async_op=False)
        try:
            yield stored.data.view(-1)[: self.count]
        finally:
            if swapped_in:
                swapper = self.parameter.nvme_swapper
                if write:
                    swapper.swap_out_and_release([self.parameter])
                else:
                    swapper.remove_partition_and_release_buffers([self.parameter])

    def gather(self) -> Tensor:
        """Return the full parameter on the CPU, on every rank. A collective: every rank must call it."""
        with self.shard() as shard:
            world_size = comm.get_world_size()
            padded = torch.zeros(
                -(-self.numel // world_size), dtype=shard.dtype, device=get_accelerator().current_device_name()
            )
            padded[: self.count] = shard
        return self.gather_like(padded)

    def gather_like(self, padded: Tensor) -> Tensor:
        """Gather a tensor that is sharded as this parameter is; `padded` is [ceil(numel / world)]."""
        world_size = comm.get_world_size()
        full = torch.empty(padded.numel() * world_size, dtype=padded.dtype, device=padded.device)
        # Bytes: gloo cannot gather every dtype (16-bit integers among them).
        comm.all_gather_into_tensor(full.view(torch.uint8), padded.view(torch.uint8))
        return full[: self.numel].view(self.shape).cpu()

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return self.parameter.ds_numel  # type: ignore[no-any-return]


def shard_range(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return (start, count) of the elements of a parameter that a rank holds.

    >>> [shard_range(10, rank, 4) for rank in range(4)]
    [(0, 3), (3, 3), (6, 3), (9, 1)]
    """
    size = -(-numel // world_size)
    start = min(rank * size, numel)
    return start, min(start + size, numel) - start


def shard_model(model: nn.Module, ds_config: Mapping[str, Any], read_range: ReadRange) -> None:
    """Turn a model on the meta device into a ZeRO-3 sharded one, a parameter at a time, in place.

    Each rank reads only the elements it will hold; at no time is more than one parameter's memory allocated in
    full (and of that only this rank's range is ever touched).

    Args:
        model: parameters on the meta device, tied ones tied; buffers real.
        ds_config: the DeepSpeed config, stage 3; decides where shards live (device, CPU, NVMe).
        read_range: gives the weights.
    """
    rank, world_size = comm.get_rank(), comm.get_world_size()
    init = deepspeed.zero.Init(config_dict_or_path=dict(ds_config))
    device = init.local_device
    for name, parameter in model.named_parameters():
        start, count = shard_range(parameter.numel(), rank, world_size)
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if count:
            full.view(-1)[start : start + count] = read_range(name, start, start + count).to(device)
        _replace(model, parameter, nn.Parameter(full, requires_grad=parameter.requires_grad), init)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter, init: Any) -> None:  # noqa: ANN401
    init._convert_to_deepspeed_param(new)
    new.partition()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def sharded_parameters(
    model: nn.Module, named: Mapping[nn.Parameter, NamedParameter]
) -> list[ShardedParameter]:
    """List all parameters of a sharded model, in the order of its named_parameters."""
    rank, world_size = comm.get_rank(), comm.get_world_size()
    return [
        ShardedParameter(
            named[parameter], parameter, tuple(parameter.ds_shape), *shard_range(parameter.ds_numel, rank, world_size)
        )
        for parameter in model.parameters()
    ]


def assert_released(parameters: list[ShardedParameter]) -> None:
    """Check that no parameter is gathered: a resident copy would be stale after an update of the shards."""
    held = [p.name for p in parameters if p.parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE]
    if held:
        raise RuntimeError(f"parameters still gathered after a forward pass: {held}")


def finish_updates() -> None:
    """Wait until shard updates are done: DeepSpeed reads shards on a stream that does not wait for this one."""
    get_accelerator().synchronize()


def start_engine(model: nn.Module, ds_config: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Wrap a sharded model in a DeepSpeed engine without an optimizer: forward passes only."""
    engine, *_ = deepspeed.initialize(model=model, config=dict(ds_config))
    engine.eval()
    return engine


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device(get_accelerator().current_device_name())


def skip_unused_cpu_op() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce at start on a CPU.

    It takes a compiler and half a minute, serves only `inference_all_reduce`, which is not used here, and
    DeepSpeed raises without a compiler.
    """
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def local_rank() -> int:
    """Return this rank's index on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))
