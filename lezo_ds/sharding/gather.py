"""Gathers weights a block at a time, one block ahead of the forward pass.

    runs         block 0         block 1         block 2
    gathered     0, 1            1, 2            2, 3        (block 0 is released when it has run)
    messages     all-gather 1    all-gather 2    all-gather 3

DeepSpeed's own hooks gather module by module and take two thirds of the host's time in a step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from lezo_ds.distributed import device


class Bundle:
    """Weights of one dtype that are gathered by one message and released together.

    The message has a row for each rank, with that rank's slices of all parameters:

        [num_ranks, sum of slices]    row r: slice r of parameter 0 | slice r of parameter 1 | ...

    Each parameter is copied from the message to memory of its own, whose alignment does not depend
    on its neighbors: matrix products may give other bits otherwise.

    Args:
        parameters: of one dtype and shard group, with DeepSpeed's attributes.
        stream: of a GPU, on which messages and copies overlap with the forward pass; None on CPUs.
        is_shared: whether several modules use the weights. They are then gathered once, and
            released when the pass ends.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        stream: Any,
        *,
        is_shared: bool = False,
    ) -> None:
        self.is_shared = is_shared
        first = parameters[0]
        self._parameters = parameters
        self._stream = stream
        self._sizes = [parameter.ds_tensor.ds_numel for parameter in parameters]
        self._group = first.ds_process_group
        self._rank = first.ds_zero_partition_rank
        self._num_ranks = first.ds_zero_partition_world_size
        self._released = torch.empty(0, dtype=first.dtype, device=device())
        self._message: tuple[Tensor, Any] | None = None  # on its way
        self._is_gathered = False

    def start(self) -> None:
        """Send the message without waiting for it, unless the weights are here or on their way."""
        if self._is_gathered or self._message is not None:
            return
        with get_accelerator().stream(self._stream):
            flat = self._released.new_empty(self._num_ranks, sum(self._sizes))
            mine = flat[self._rank]
            own_slices = [parameter.ds_tensor for parameter in self._parameters]
            places = torch.split(mine, self._sizes)
            torch._foreach_copy_(places, own_slices, non_blocking=True)
            work = comm.all_gather_into_tensor(
                flat.view(-1),
                mine,
                group=self._group,
                async_op=True,
            )
        self._message = (flat, work)

    def wait(self) -> None:
        """Receive what `start` has sent, if it is on its way."""
        if self._message is None:
            return
        flat, work = self._message
        self._message = None
        with get_accelerator().stream(self._stream):
            work.wait()
            new_empty = self._released.new_empty
            padded = [new_empty(self._num_ranks, size) for size in self._sizes]
            torch.split_with_sizes_copy(flat, self._sizes, dim=1, out=padded)
        if self._stream is not None:
            current = get_accelerator().current_stream()
            current.wait_stream(self._stream)
        for parameter, by_rank in zip(self._parameters, padded, strict=True):
            full = by_rank.view(-1)[: parameter.ds_numel]
            parameter.data = full.view(parameter.ds_shape)
        self._is_gathered = True

    def release(self) -> None:
        """Free the gathered weights, as soon as the GPU is done with them."""
        if not self._is_gathered:
            return
        self._is_gathered = False
        for parameter in self._parameters:
            if self._stream is not None:
                parameter.data.record_stream(get_accelerator().current_stream())
            parameter.data = self._released


class GatherAhead:
    """Gathers the bundles of a module before it runs, and those of the next one while it runs.

    The next module is the one that followed the last time. All ranks must run the same modules.

    Args:
        model: whose parameters are sharded by ZeRO-3.
        blocks: its transformer blocks. Other modules with parameters are gathered one by one.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._following: dict[int, Sequence[Bundle]] = {}
        self._last: Sequence[Bundle] = ()
        self._bundles = _bundles_of(model, blocks)
        # Before a pass, too, because an error may have ended the pass before it.
        model.register_forward_pre_hook(self._reset)
        for module, bundles in self._bundles.items():
            gather = partial(self.gather, bundles)
            release = partial(self.release, bundles)
            module.register_forward_pre_hook(gather)
            module.register_forward_hook(release)
        model.register_forward_hook(self._reset)

    def gather(self, bundles: Sequence[Bundle], *_: object) -> None:
        """Have the bundles of a module here, and send for those of the next module."""
        for bundle in bundles:
            bundle.start()
            bundle.wait()
        self._following[id(self._last)] = bundles
        self._last = bundles
        for bundle in self._following.get(id(bundles), ()):
            bundle.start()

    def release(self, bundles: Sequence[Bundle], *_: object) -> None:
        """Free the bundles of a module, except those that other modules use."""
        for bundle in bundles:
            if not bundle.is_shared:
                bundle.release()

    def _reset(self, *_: object) -> None:
        """Free all bundles, at the begin and the end of a pass."""
        self._last = ()
        for bundle in chain.from_iterable(self._bundles.values()):
            bundle.wait()
            bundle.release()


def _bundles_of(
    model: nn.Module, blocks: Sequence[nn.Module]
) -> Mapping[nn.Module, Sequence[Bundle]]:
    """Return the bundles of each block, and of each module with parameters outside the blocks."""
    used_by, tied = used_together(model.modules(), blocks)
    accelerator = get_accelerator()
    stream = None
    if not accelerator.is_synchronized_device():
        stream = accelerator.Stream()
    shared = {parameter: Bundle([parameter], stream, is_shared=True) for parameter in tied}
    bundles: dict[nn.Module, list[Bundle]] = {}
    for module, used in used_by.items():
        own = []
        by_dtype = defaultdict(list)
        for parameter in used:
            if parameter in shared:
                own.append(shared[parameter])
            else:
                by_dtype[parameter.dtype].append(parameter)
        own += [Bundle(parameters, stream) for parameters in by_dtype.values()]
        if own:
            bundles[module] = own
    return bundles


def units_of(
    modules: Iterable[nn.Module], blocks: Sequence[nn.Module]
) -> dict[nn.Module, list[nn.Module]]:
    """Return what is gathered at a time, and the modules in it: each block, and each other module.

    Args:
        modules: of a model.
        blocks: its transformer blocks.
    """
    units = {block: list(block.modules()) for block in blocks}
    inside = set(chain.from_iterable(units.values()))
    return units | {module: [module] for module in modules if module not in inside}


def used_together(
    modules: Iterable[nn.Module], blocks: Sequence[nn.Module]
) -> tuple[dict[nn.Module, list[nn.Parameter]], set[nn.Parameter]]:
    """Return the parameters of each of the `units_of`, and the tied ones, which several use."""
    used_by = {
        unit: list(unit.parameters(recurse=len(inside) > 1))
        for unit, inside in units_of(modules, blocks).items()
    }
    num_users = Counter(chain.from_iterable(used_by.values()))
    tied = {parameter for parameter, number in num_users.items() if number > 1}
    return used_by, tied


def keep_in_step(blocks: Iterable[nn.Module]) -> None:
    """Keep the host at most one block ahead of the GPU.

    A faster host would allocate new memory for every block, because that of a gathered block is
    reused only after the GPU is done with it. FSDP's limit_all_gathers does the same (PyTorch PR
    83917).
    """
    events: list[Any] = []

    def wait(*_: object) -> None:
        if events:
            events.pop().synchronize()
        events.append(get_accelerator().Event())
        events[0].record()

    for block in blocks:
        block.register_forward_hook(wait)
