"""ZeRO-3: makes the shards of a model, and the engines that run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lezo_ds.distributed import device
from lezo_ds.sharding.gather import GatherAhead, keep_in_step
from lezo_ds.sharding.parameters import put_parameters
from lezo_ds.sharding.shards import is_on_device


def shard_model(
    model: nn.Module, ds_config: Mapping[str, Any], partition_size: int | None = None
) -> None:
    """Turn a model on the meta device into a ZeRO-3 sharded model in place, one parameter at a time.

    Tied parameters stay tied. The values of the shards are undefined until they are loaded. Memory for one
    full parameter at a time is reserved, but never written. `partition_size` ranks share one copy of the
    weights (None: all ranks).
    """
    group = _partition_group(partition_size or comm.get_world_size())
    init = deepspeed.zero.Init(config_dict_or_path=dict(ds_config), data_parallel_group=group)
    sharded: dict[nn.Parameter, Any] = {}
    for parameter in model.parameters():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=init.local_device)
        sharded[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
        # zero.Init's _zero_init_param (0.19.8) without its broadcast from rank 0: nothing is loaded yet.
        init._convert_to_deepspeed_param(sharded[parameter])
        sharded[parameter].partition()
    put_parameters(model, sharded)


def _partition_group(partition_size: int) -> Any:
    """Return this rank's shard group: `partition_size` consecutive ranks. No rank makes the other groups."""
    if partition_size == comm.get_world_size():
        return comm.get_world_group()
    start = comm.get_rank() - comm.get_rank() % partition_size
    # A new group has torch's default timeout, and torch 2.13 has no public method that returns the world's.
    timeout = dist.group.WORLD._get_backend(device()).options._timeout  # type: ignore[union-attr]
    # MPI cannot make a group without the other ranks. DeepSpeed uses NCCL on GPUs and gloo on CPUs.
    ranks = range(start, start + partition_size)
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)


def finish_updates() -> None:
    """Wait until the shards are updated: they are gathered on a stream that does not wait for the updates."""
    get_accelerator().synchronize()


def start_forward_engine(
    model: nn.Module, blocks: Sequence[nn.Module], ds_config: Mapping[str, Any]
) -> Any:
    """Wrap a sharded model in a DeepSpeed engine without an optimizer, for forward passes only.

    DeepSpeed makes, keeps and offloads the shards. Its hooks, which gather module by module and take two
    thirds of the host's time in a step, are replaced by those of `GatherAhead`. Weights that this rank has in
    full, on its device, are not gathered at all.
    """
    engine, *_ = deepspeed.initialize(model=model, config=dict(ds_config))
    engine.eval()
    engine.optimizer.destroy()  # DeepSpeedZeRoOffload (0.19.8): the hooks that gather and release
    # These start timers that only a training engine reads, and let parameters gather themselves.
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    engine.forward = model.__call__
    for module in model.modules():
        # DeepSpeed has replaced it by a dict that gathers a parameter when it is read.
        module._parameters = module.__dict__.pop("_original_parameters")
    parameters: list[Any] = list(model.parameters())
    if all(is_on_device(p) and p.ds_zero_partition_world_size == 1 for p in parameters):
        for parameter in parameters:
            parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
            # With another status, DeepSpeed would gather a copy where it meets the parameter.
            parameter.ds_status = ZeroParamStatus.AVAILABLE
    else:
        if not get_accelerator().is_synchronized_device():
            keep_in_step(blocks)
        ahead = engine.zero_max_live_parameters() if engine.zero_prefetch_bucket_size() > 0 else 0
        GatherAhead(model, blocks, max_numel=ahead)
    return engine


def start_training_engine(
    *, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, ds_config: Mapping[str, Any]
) -> Any:
    """Wrap a loaded model in a DeepSpeed engine that also shards gradients and optimizer states."""
    # With offload, DeepSpeed would insist on its own CPU optimizer, which has to be compiled.
    config = {**ds_config, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    engine.eval()
    return engine


@contextmanager
def no_gathered_weights_saved() -> Iterator[None]:
    """Make autograd save a reference to a gathered weight (or a view of it) instead of the weight itself.

    Otherwise every rank holds the full model until the backward pass (DeepSpeed issue 1465), for which
    DeepSpeed gathers the weights again.
    """

    def pack(tensor: Tensor) -> Any:
        owner = tensor if isinstance(tensor, nn.Parameter) else tensor._base
        if not hasattr(owner, "ds_tensor"):
            return tensor
        assert owner is not None
        return (
            owner,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset() - owner.storage_offset(),
        )

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        owner, shape, stride, offset = saved
        data: Tensor = owner.data
        return data.as_strided(shape, stride, data.storage_offset() + offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
