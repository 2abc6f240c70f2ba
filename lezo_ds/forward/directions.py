"""The pass that runs, and how modules meet the weights of its probes: the behavior of a law of z.

The wrappers (wrappers.py) decide when a module runs, and on which copies of the batch. The
`Directions` of a run own all else that depends on its law:

    Directions.start_pass  ->  Perturber   runs a module whose parameters are perturbed
    Directions.update                      changes a shard

`DenseDirections` (dense.py) make a copy of each weight for each probe. `LowRankDirections`
(low_rank.py) run the module once, on the rows of all probes, and add thin products.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lezo_ds.forward.batch import LogitSelection, MicroBatch
from lezo_ds.forward.copies import Args, Forward, Kwargs, map_tensors, probe_slice
from lezo_ds.forward.probes import AT_THETA, Perturbation, TrainedParameter
from lezo_ds.noise import Kernels, UpdateTarget, kernels_of
from lezo_ds.zo.laws import PerturbationLaw
from lezo_ds.zo.updates import Update, UpdatePrecision

PROBES_AT_ONCE = 2
"""Most probes of which copies of a weight, or logits, are in memory at a time.

The bits of a matrix product depend on its number of rows. With this limit, the losses of a pass of
more probes are those of passes of two, under a law that copies weights.
"""


class PassState:
    """What the wrappers of one model know of the pass that runs.

    Attributes:
        current: the pass, or the part of it that runs now.
        perturber: runs the modules with perturbed parameters; None at theta.
        selection: the logits that the pass needs; None stands for all.
        log_probabilities: what the head has returned if the selection has targets.
        num_equal_blocks: all copies of the batch are equal before this block, because no block
            before it is perturbed. These blocks run on one copy.
    """

    def __init__(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Forget the pass."""
        self.current = AT_THETA
        self.perturber: Perturber | None = None
        self.selection: LogitSelection | None = None
        self.log_probabilities: Tensor | None = None
        self.num_equal_blocks = 0

    def active(self, owned: Sequence[TrainedParameter]) -> Sequence[TrainedParameter]:
        """Return those of a module's trained parameters that are perturbed now."""
        if not self.current.probes:
            return ()
        dropped = self.current.dropped_layers
        return [entry for entry in owned if entry.block not in dropped]

    @property
    def runs_at_once(self) -> bool:
        """Whether a module runs on all copies of the batch at a time."""
        if self.perturber is None or self.current.writes_answers:
            return True  # the bits of logits do not show in the tokens of answers
        return len(self.current.probes) <= self.perturber.probes_at_once

    def run_in_parts(
        self,
        num_probes: int,
        run: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Call `run` on the copies of `num_probes` probes at a time, and concatenate the outputs.

        Args:
            num_probes: most copies of the batch in one call.
            run: (*args, **kwargs) -> output. While it runs, `current` has the probes of the call
                only.
            args: of the module, with the rows of all copies.
            kwargs: likewise.
        """
        whole = self.current
        total = len(whole.probes)
        if total <= num_probes:
            return run(*args, **kwargs)
        outputs = []
        try:
            for first in range(0, total, num_probes):
                probes = whole.probes[first : first + num_probes]
                self.current = whole._replace(probes=probes)
                take = probe_slice(whole.rows, whole.tokens, total, first, len(probes))
                outputs.append(run(*map_tensors(take, args), **map_tensors(take, kwargs)))
        finally:
            self.current = whole
        return tree_map(_concatenate, *outputs)


def _concatenate(*outputs: Any) -> Any:
    return torch.cat(outputs) if isinstance(outputs[0], Tensor) else outputs[0]


class Perturber(ABC):
    """Runs modules at the probes of one pass.

    `state.current` has the probes that run. In the methods, k is their number and n =
    `current.rows`.

    Attributes:
        probes_at_once: most probes whose copies of the batch a module may run on at a time.
        takes_blocks: whether `begin_block` is worth the memory of all that it prepares.
    """

    probes_at_once: int

    def __init__(self, state: PassState, *, takes_blocks: bool = False) -> None:
        self.state = state
        self.takes_blocks = takes_blocks

    @abstractmethod
    def run_module(
        self,
        module: nn.Module,
        own_forward: Forward,
        active: Sequence[TrainedParameter],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Return the output of a module, k * n rows, each row at the weights of its probe.

        Args:
            module: holds theta; its weights are gathered.
            own_forward: its forward method without our wrapper.
            active: those of its parameters that are perturbed, at least one.
            args: its inputs for all copies of the batch: tensors [k * n, ...], or [1, ...] if all
                rows share them.
            kwargs: likewise.
        """

    # Only a law that perturbs weights outside the blocks is asked for these two.

    def rows_of(self, table: TrainedParameter, rows: Tensor) -> Tensor:
        """Return some rows of a perturbed matrix at the one probe that runs (k = 1).

        Args:
            table: a matrix [num_rows, width].
            rows: int64 of any shape, indices in [0, num_rows).

        Returns:
            [*rows.shape, width], in the dtype of the matrix.
        """
        raise NotImplementedError

    def vector_of(self, entry: TrainedParameter) -> Tensor:
        """Return a perturbed vector at the one probe that runs (k = 1): float32 [size]."""
        raise NotImplementedError

    # Only if `takes_blocks`.

    def begin_block(self, active: Sequence[TrainedParameter]) -> None:
        """Prepare all perturbed parameters of a transformer block, whose weights are gathered."""
        raise NotImplementedError

    def end_block(self) -> None:
        """Free what `begin_block` prepared."""
        raise NotImplementedError


class Directions(ABC):
    """What a run does with the random directions of its law. It has no state.

    Attributes:
        law: says what a direction is.
        kernels_of: (device) -> the kernels that draw and apply z there.
    """

    def __init__(
        self, law: PerturbationLaw, kernels_of: Callable[[torch.device], Kernels] = kernels_of
    ) -> None:
        self.law = law
        self.kernels_of = kernels_of

    @abstractmethod
    def start_pass(
        self, state: PassState, perturbation: Perturbation, batch: MicroBatch
    ) -> Perturber:
        """Return what runs the modules of a pass.

        Args:
            state: of the pass.
            perturbation: the probes, and the keys of their directions.
            batch: of one copy, on the device of the model.
        """

    @abstractmethod
    def update(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        """Apply the same updates to all targets, in order: theta * factor - coefficient * z.

        Args:
            targets: on one device.
            updates: of one step or of many.
            precision: how 16-bit values are stored.
        """


def directions_of(law: PerturbationLaw) -> Directions:
    """Return the implementation of a law."""
    implementation = pkgutil.resolve_name(law.implementation)
    directions: Directions = implementation(law)
    return directions
