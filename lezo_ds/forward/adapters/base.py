"""The interface of an adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from torch import nn

from lezo_ds.forward.blocks import BlockLayout
from lezo_ds.sharding.weights import ShardedWeights


class Adapter(ABC):
    """Parameters that are trained instead of a model's own.

    A parameter has three names: its name in the module tree, where an adapter may wrap modules; its own name,
    which noise, journal and messages use, and which for the model's own parameters is their name without an
    adapter; and its name in a snapshot, which is `stored_prefix` and its own name.

    Attributes:
        weights_file: name of the safetensors file of a snapshot.
        stored_prefix: start of the name of every tensor of a snapshot.
    """

    weights_file: ClassVar[str]
    stored_prefix: ClassVar[str] = ""

    @abstractmethod
    def attach(self, model: nn.Module, layout: BlockLayout) -> None:
        """Freeze the model and add the adapter's parameters to it, without their values.

        Args:
            model: changed in place. It is not sharded yet, and it can be on any device.
            layout: where the blocks of the model are.

        Raises:
            UserError: the adapter does not fit this model.
        """

    def own_name(self, module_name: str) -> str:
        """Return the own name of a parameter from its name in `named_parameters`."""
        return module_name

    @abstractmethod
    def fill(self, weights: ShardedWeights, model: nn.Module, seed: int) -> None:
        """Set the adapter's parameters to their initial values and enable the adapter. A collective.

        Args:
            weights: of the model. The model's own weights are loaded.
            model: the adapter is attached to it, and it is sharded.
            seed: of the run, unsigned 64-bit. The values are the same on any number of ranks.

        Raises:
            UserError: the model does not work as the adapter needs it.
        """

    @abstractmethod
    def write_config(self, directory: Path, base_model: str) -> None:
        """Write the files that are needed to use a snapshot in addition to the weights.

        Args:
            directory: of the snapshot.
            base_model: hub id or directory of the base model.
        """
