"""The interface of an adapter: parameters that are trained instead of a model's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from torch import nn

from lezo_ds.forward.blocks import BlockLayout
from lezo_ds.sharding.weights import ShardedWeights


class Adapter(ABC):
    """Gives each of its parameters three names.

    One is that in the module tree, where an adapter may wrap modules. Noise, journal and messages use its own
    name, and a snapshot uses `stored_prefix` and its own name.
    """

    weights_file: ClassVar[str]  # safetensors file of a snapshot
    stored_prefix: ClassVar[str] = ""

    @abstractmethod
    def attach(self, model: nn.Module, layout: BlockLayout) -> None:
        """Freeze the model, which is not sharded yet, and add the adapter's parameters, without values."""

    def own_name(self, module_name: str) -> str:
        """Return the own name of a parameter from its name in `named_parameters`."""
        return module_name

    @abstractmethod
    def fill(self, weights: ShardedWeights, model: nn.Module, seed: int) -> None:
        """Set the initial values, which depend only on the seed and the base weights. A collective."""

    @abstractmethod
    def write_config(self, directory: Path, base_model: str) -> None:
        """Write the files that a snapshot needs in addition to the weights."""
