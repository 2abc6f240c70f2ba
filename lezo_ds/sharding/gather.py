"""Gathers weights a block at a time, one block ahead of the forward pass."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from lezo_ds.distributed import device
from lezo_ds.sharding.parameters import OpenShard, is_on_device


class Part:
    """Weights of one dtype that are gathered by one message and released together.

    Each parameter is copied from the message to memory of its own, whose alignment does not depend on its
    neighbors: matrix products may give other bits otherwise.
    """

    def __init__(self, parameters: Sequence[Any], stream: Any, *, is_shared: bool = False) -> None:
        self.numel = sum(parameter.ds_numel for parameter in parameters)
        self.is_shared = (
            is_shared  # by several modules: gathered once, and released when the pass ends
        )
        self._parameters = parameters
        self._stream = stream  # on a GPU, messages and copies overlap with the forward pass
        self._sizes = [parameter.ds_tensor.ds_numel for parameter in parameters]
        first = parameters[0]
        self._group = first.ds_process_group
        self._rank, self._num_ranks = (
            first.ds_zero_partition_rank,
            first.ds_zero_partition_world_size,
        )
        self._like = {"dtype": first.dtype, "device": device()}
        self._are_here = all(is_on_device(parameter) for parameter in parameters)
        self._released = torch.empty(0, **self._like)

    def start(self) -> tuple[Tensor, Any]:
        """Send the message without waiting for it. Return what `wait` needs."""
        with get_accelerator().stream(self._stream):
            flat = torch.empty(self._num_ranks, sum(self._sizes), **self._like)
            mine = flat[self._rank]
            if self._are_here:
                torch.cat([parameter.ds_tensor for parameter in self._parameters], out=mine)
            else:
                for parameter, part in zip(
                    self._parameters, torch.split(mine, self._sizes), strict=True
                ):
                    opened = OpenShard(parameter, part.numel())
                    with opened as shard:  # the buffer of a swapped shard is reused at once
                        part.copy_(shard, non_blocking=not opened.is_swapped)
            work = comm.all_gather_into_tensor(
                flat.view(-1), mine, group=self._group, async_op=True
            )
        return flat, work

    def wait(self, flat: Tensor, work: Any) -> None:
        """Receive what `start` has sent."""
        with get_accelerator().stream(self._stream):
            work.wait()
            padded = [torch.empty(self._num_ranks, size, **self._like) for size in self._sizes]
            torch.split_with_sizes_copy(flat, self._sizes, dim=1, out=padded)
        if self._stream is not None:
            get_accelerator().current_stream().wait_stream(self._stream)
        for parameter, full in zip(self._parameters, padded, strict=True):
            parameter.data = full.view(-1)[: parameter.ds_numel].view(parameter.ds_shape)

    def release(self) -> None:
        """Free the gathered weights, as soon as the GPU is done with them."""
        for parameter in self._parameters:
            if self._stream is not None:
                parameter.data.record_stream(get_accelerator().current_stream())
            parameter.data = self._released


class GatherAhead:
    """Gathers the parts that a module needs before it runs, and those of the next module while it runs.

    The next module is the one that followed the last time. All ranks must run the same modules. Nothing is
    gathered ahead if there would then be more elements than `max_numel`.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], max_numel: float = 0) -> None:
        self._max_numel = max_numel
        self._numel = 0
        self._started: dict[Part, tuple[Tensor, Any]] = {}
        self._gathered: list[Part] = []
        self._following: dict[int, Sequence[Part]] = {}
        self._last: Sequence[Part] = ()
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._reset)
        ]  # an error may end a pass
        for module, parts in _parts_of(model, blocks).items():
            self._hooks.append(module.register_forward_pre_hook(partial(self.gather, parts)))
            self._hooks.append(module.register_forward_hook(partial(self.release, parts)))
        self._hooks.append(model.register_forward_hook(self._reset))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def gather(self, parts: Sequence[Part], *_: object) -> None:
        for part in parts:
            if part not in self._gathered:
                if part not in self._started:
                    self._start(part)
                self._wait(part)
        self._following[id(self._last)] = parts
        self._last = parts
        for part in self._following.get(id(parts), ()):
            is_here = part in self._gathered or part in self._started
            if not is_here and self._numel + part.numel <= self._max_numel:
                self._start(part)

    def release(self, parts: Sequence[Part], *_: object) -> None:
        for part in parts:
            if not part.is_shared:
                self._release(part)

    def _start(self, part: Part) -> None:
        self._started[part] = part.start()
        self._numel += part.numel

    def _wait(self, part: Part) -> None:
        part.wait(*self._started.pop(part))
        self._gathered.append(part)

    def _release(self, part: Part) -> None:
        part.release()
        self._gathered.remove(part)
        self._numel -= part.numel

    def _reset(self, *_: object) -> None:
        self._last = ()
        for part in list(self._started):
            self._wait(part)
        for part in list(self._gathered):
            self._release(part)


def _parts_of(model: nn.Module, blocks: Sequence[nn.Module]) -> Mapping[nn.Module, Sequence[Part]]:
    """Return the parts of each block, and of each module outside the blocks that has parameters."""
    used_by = {block: list(block.parameters()) for block in blocks}
    inside = {module for block in blocks for module in block.modules()}
    for module in set(model.modules()) - inside:
        used_by[module] = list(module.parameters(recurse=False))
        for child in module.children():
            if isinstance(child, nn.ParameterDict | nn.ParameterList):  # they do not run themselves
                used_by[module] += child.parameters()
    num_users = Counter(parameter for used in used_by.values() for parameter in used)
    stream = None if get_accelerator().is_synchronized_device() else get_accelerator().Stream()
    shared = {p: Part([p], stream, is_shared=True) for p, users in num_users.items() if users > 1}
    parts: dict[nn.Module, list[Part]] = {}
    for module, used in used_by.items():
        by_dtype = defaultdict(list)
        for parameter in used:
            if parameter not in shared:
                by_dtype[parameter.dtype].append(parameter)
        parts[module] = [shared[parameter] for parameter in used if parameter in shared]
        parts[module] += [Part(same, stream) for same in by_dtype.values()]
    return {module: own for module, own in parts.items() if own}


def keep_in_step(blocks: Iterable[nn.Module]) -> None:
    """Keep the host at most one block ahead of the GPU, as FSDP's limit_all_gathers (PyTorch PR 83917) does.

    A faster host would allocate new memory for every block, because that of a gathered block is reused only
    after the GPU is done with it.
    """
    events: list[Any] = []

    def wait(*_: object) -> None:
        if events:
            events.pop().synchronize()
        events.append(get_accelerator().Event())
        events[0].record()

    for block in blocks:
        block.register_forward_hook(wait)
