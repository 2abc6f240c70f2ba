"""ZeRO-3: makes the shards of a model, and the engines that run it.

    model on the meta device
      | shard_model                shards without values; ShardedWeights.load fills them
      v
    sharded model
      | start_forward_engine       forward passes only, at perturbed weights
      v
    DeepSpeed's engine

docs/deepspeed.md lists the facts about DeepSpeed that this relies on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from lezo_ds.distributed import device
from lezo_ds.sharding.gather import GatherAhead, keep_in_step
from lezo_ds.sharding.surgery import put_parameters, start_engine


def shard_model(
    model: nn.Module, ds_config: Mapping[str, Any], partition_size: int | None = None
) -> None:
    """Turn a model on the meta device into a ZeRO-3 sharded model in place. A collective.

    Tied parameters stay tied. The values of the shards are undefined until they are loaded. Memory
    for one full parameter at a time is reserved, but never written.

    Args:
        model: on the meta device.
        ds_config: DeepSpeed config, of stage 3.
        partition_size: number of ranks that share one copy of the weights; None for all ranks.
    """
    group = _partition_group(partition_size or comm.get_world_size())
    init = deepspeed.zero.Init(config_dict_or_path=dict(ds_config), data_parallel_group=group)
    sharded: dict[nn.Parameter, Any] = {}
    for parameter in model.parameters():
        full = torch.empty_like(parameter, device=init.local_device)
        sharded[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
        # zero.Init would also broadcast from rank 0 (_zero_init_param). Nothing is loaded yet.
        init._convert_to_deepspeed_param(sharded[parameter])
        sharded[parameter].partition()
    put_parameters(model, sharded)


def _partition_group(partition_size: int) -> Any:
    """Return this rank's shard group: `partition_size` consecutive ranks. A collective."""
    if partition_size == comm.get_world_size():
        return comm.get_world_group()
    # A new group has torch's default timeout, and torch 2.13 has no public method that returns the
    # timeout of the world.
    backend = dist.group.WORLD._get_backend(device())  # type: ignore[union-attr]
    timeout = backend.options._timeout
    # Every rank makes all groups: NCCL splits them off a world that is bound to GPUs.
    groups = dist.new_subgroups(partition_size, timeout=timeout)  # type: ignore[no-untyped-call]
    own_group, _ = groups
    return own_group


def finish_updates() -> None:
    """Wait until the shards are updated.

    They are gathered on a stream of their own, which does not wait for the updates.
    """
    get_accelerator().synchronize()


def start_forward_engine(
    model: nn.Module, blocks: Sequence[nn.Module], ds_config: Mapping[str, Any]
) -> Any:
    """Wrap a sharded model in a DeepSpeed engine without an optimizer, for forward passes only.

    DeepSpeed makes, keeps and offloads the shards. Its hooks, which gather module by module and
    take two thirds of the host's time in a step, are replaced by those of `GatherAhead`. Weights
    that this rank has in full, on its device, are not gathered at all.
    """
    engine = start_engine(model, ds_config)
    # Without an optimizer, this is a DeepSpeedZeRoOffload: the hooks that gather and release.
    engine.optimizer.destroy()
    for module in model.modules():
        # DeepSpeed has replaced it by a dict that gathers a parameter when it is read.
        module._parameters = module.__dict__.pop("_original_parameters")
    parameters: list[Any] = list(model.parameters())
    own = device()
    if all(p.ds_zero_partition_world_size == 1 and p.ds_tensor.device == own for p in parameters):
        for parameter in parameters:
            parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
            # With another status, DeepSpeed would gather a copy where it meets the parameter.
            parameter.ds_status = ZeroParamStatus.AVAILABLE
            # The weight is the shard itself: DeepSpeed's GatheredParameters must not free it.
            parameter.partition = lambda *_, **__: None
        return engine
    if not get_accelerator().is_synchronized_device():
        keep_in_step(blocks)
    GatherAhead(model, blocks)
    return engine
