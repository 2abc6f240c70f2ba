"""The pass that runs, and how modules meet the weights of its probes: the behavior of a law of z.

`PassState` decides when a module runs, and on which copies of the batch. The `Directions` of a run
own all else that depends on its law:

    Directions.start_pass  ->  Perturber   runs a module whose parameters are perturbed
    Directions.update                      changes a shard

`DenseDirections` (dense.py) run a whole block once for each probe, with copies of its parameters.
`LowRankDirections` (low_rank.py) run a linear module once, on the rows of all probes, and add thin
products.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds.forward.batch import LogitSelection, MicroBatch
from lezo_ds.forward.probes import AT_THETA, Args, Forward, Kwargs, Perturbation, Place
from lezo_ds.noise import Kernels, Updater, kernels_of
from lezo_ds.zo.laws import PerturbationLaw


class PassState:
    """What the wrappers of one model know of the pass that runs.

    A wrapper replaces `module.forward`. With ZeRO-3, it therefore runs between the hooks that
    gather the module's parameters and those that release them. At theta, it calls the module's own
    forward method, and does nothing else.

    Args:
        blocks: the transformer blocks of the model.

    Attributes:
        current: the pass, or the part of it that runs now.
        perturber: runs what has perturbed parameters; None at theta.
        selection: the logits that the pass needs; None stands for all.
        log_probabilities: what the head has returned if the selection has targets.
        num_equal_blocks: all copies of the batch are equal before this block, because no block
            before it is perturbed. These blocks run on one copy.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = frozenset(blocks)
        self.finish()

    def finish(self) -> None:
        """Forget the pass. An error may have ended it anywhere."""
        self.current = AT_THETA
        self.perturber: Perturber | None = None
        self.selection: LogitSelection | None = None
        self.log_probabilities: Tensor | None = None
        self.num_equal_blocks = 0

    def wrap(self, module: nn.Module, places: Sequence[Place]) -> None:
        """Let a module run at the probes of the pass, if a place in it is perturbed."""
        own_forward = module.forward

        @wraps(own_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.run_module(module, own_forward, places, args, kwargs)

        module.forward = forward

    def share(self, block: nn.Module, index: int) -> None:
        """Let a transformer block run once on equal copies of the batch."""
        own_forward = block.forward

        @wraps(own_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if index < self.num_equal_blocks:
                first_of_all = [0] * len(self.current.probes)
                return self.current.run_copies(own_forward, first_of_all, args, kwargs)
            # Copies differ from here on, also if the model runs an earlier block again.
            self.num_equal_blocks = 0
            return own_forward(*args, **kwargs)

        block.forward = forward

    def active(self, places: Sequence[Place]) -> Sequence[Place]:
        """Return those of a module's places whose parameters are perturbed now."""
        if not self.current.probes:
            return ()
        dropped = self.current.dropped_layers
        return [place for place in places if place.trained.block not in dropped]

    def run_module(
        self,
        module: nn.Module,
        own_forward: Forward,
        places: Sequence[Place],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Run a module on all copies; each meets the weights of its probe."""
        active = self.active(places)
        if not active:
            return own_forward(*args, **kwargs)
        assert self.perturber is not None
        return self.perturber.run_module(module, own_forward, active, args, kwargs)

    def run_each_probe(self, run: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Call `run` on each copy of the batch, and join the outputs.

        While it runs, `current` has the probe of its copy only.
        """
        whole = self.current
        if len(whole.probes) == 1:
            return run(*args, **kwargs)
        singles = whole.one_by_one()

        def run_probe(*args: Any, **kwargs: Any) -> Any:
            self.current = next(singles)
            return run(*args, **kwargs)

        output = whole.run_copies(run_probe, range(len(whole.probes)), args, kwargs)
        self.current = whole
        return output


class Perturber(ABC):
    """Runs modules at the probes of one pass.

    `state.current` has the probes that run. In the methods, k is their number and n =
    `current.rows`.
    """

    def __init__(self, state: PassState) -> None:
        self.state = state

    @abstractmethod
    def run_module(
        self,
        module: nn.Module,
        own_forward: Forward,
        active: Sequence[Place],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Return the output of a module, k * n rows, each row at the weights of its probe.

        Args:
            module: holds theta; its weights are gathered. A transformer block, or a module outside
                the blocks; with `Directions.runs_linear_modules`, a linear module.
            own_forward: its forward method without our wrapper.
            active: where it, or a module in it, reads perturbed parameters. At least one.
            args: its positional inputs for all copies of the batch: tensors [k * n, ...], or
                [1, ...] if all rows share them.
            kwargs: its keyword inputs, in the same layout.
        """

    def rows_of(self, place: Place, rows: Tensor) -> Tensor:
        """Return some rows of a perturbed matrix at the one probe that runs (k = 1).

        Only a law that perturbs weights outside the blocks is asked for them.

        Args:
            place: of a matrix [num_rows, width] or a vector [num_rows].
            rows: int64 of any shape, indices in [0, num_rows).

        Returns:
            [*rows.shape, width] or [*rows.shape], in the dtype of the parameter.
        """
        raise NotImplementedError


class Directions(Updater):
    """What a run does with the random directions of its law: perturb, and update.

    Attributes:
        law: says what a direction is.
        kernels_of: (device) -> the kernels that draw and apply z there.
        runs_linear_modules: whether a perturber runs single linear modules on the rows of all
            probes. Else it runs whole blocks, and the modules outside them, and the probes write
            answers one after the other, because a block extends one key-value cache.
    """

    runs_linear_modules = False

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


def directions_of(law: PerturbationLaw) -> Directions:
    """Return the implementation of a law."""
    implementation = pkgutil.resolve_name(law.implementation)
    directions: Directions = implementation(law)
    return directions
