"""What the rest of the package needs to know of an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import nn

from lezo_ds.model.blocks import BlockLayout
from lezo_ds.sharding.weights import ShardedWeights


class Adapter(Protocol):
    """The parameters that are trained in the place of a model's own.

    A parameter has three names: in the module tree, where an adapter may wrap modules; its own, by which
    noise, journal and messages know it, and which for the model's own parameters is the one they have without
    an adapter; and the one it is stored under.
    """

    @property
    def weights_file(self) -> str:
        """Name of the safetensors file of a snapshot."""
        ...

    def attach(self, model: nn.Module, layout: BlockLayout) -> None:
        """Freeze the model and put the adapter's parameters into it; not their values.

        Args:
            model: not sharded yet, on any device; changed in place.
            layout: where its blocks are.

        Raises:
            UserError: the adapter does not fit this model.
        """
        ...

    def own_name(self, module_name: str) -> str:
        """Return the own name of the parameter that `named_parameters` calls `module_name`."""
        ...

    def stored_name(self, own_name: str) -> str:
        """Return the name under which a snapshot holds one of the adapter's parameters."""
        ...

    def unstored_name(self, stored_name: str) -> str:
        """Return the own name of a tensor of a snapshot: the inverse of `stored_name`."""
        ...

    def fill(self, weights: ShardedWeights, model: nn.Module, seed: int) -> None:
        """Give the adapter's parameters their initial values, and switch it on. A collective.

        Args:
            weights: of the model, the model's own loaded.
            model: attached to, and sharded.
            seed: of the run, unsigned 64-bit; the same values follow on any number of ranks.

        Raises:
            UserError: the model does not work as this adapter needs it to.
        """
        ...

    def write_config(self, directory: Path, base_model: str) -> None:
        """Write what is needed besides the weights file to use a snapshot.

        Args:
            directory: of the snapshot.
            base_model: hub id or directory of the model it belongs to.
        """
        ...
