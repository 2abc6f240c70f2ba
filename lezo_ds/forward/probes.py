"""What a forward pass at several probes is: its probes, its rows, its perturbed parameters.

A probe is a point theta + scale * z(key) at which the loss is measured. A pass of k probes repeats
its batch k times, so that one gather of a weight serves all of them:

    rows of the input   [0, n)      [n, 2n)     ...   [(k - 1) n, k n)
    copy of the batch   of probe 0  of probe 1  ...   of probe k - 1

What has no perturbed parameters runs once, on all k * n rows. For all else, a `Perturber` decides
how the copies meet the weights of their probes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lezo_ds.noise import Elements
from lezo_ds.sharding.quantization import full_shape
from lezo_ds.zo.passes import KeyedProbe


@dataclass(frozen=True)
class Perturbation:
    """The weights at which one forward pass measures the loss.

    Attributes:
        probes: at least one. Each runs on its own copy of the batch, and has as many keys as the
            others.
        dropped_layers: indices of the transformer blocks that stay at theta.
    """

    probes: tuple[KeyedProbe, ...]
    dropped_layers: frozenset[int] = frozenset()

    @property
    def num_groups(self) -> int:
        """Number of groups of examples that have directions of their own."""
        return len(self.probes[0].keys)

    def one_by_one(self) -> Iterator[Perturbation]:
        """Yield a perturbation for each probe."""
        for probe in self.probes:
            yield replace(self, probes=(probe,))


class TrainedParameter(NamedTuple):
    """A parameter that may be perturbed.

    Attributes:
        name: in the model.
        parameter: holds theta while a module that reads it runs.
        block: index of its transformer block, or of its group of layers outside the blocks.
        elements: those that modules compute with on this rank.
    """

    name: str
    parameter: nn.Parameter
    block: int
    elements: Elements


Trainable = Mapping[nn.Parameter, TrainedParameter]


class Place(NamedTuple):
    """Where a trained parameter is read. A tied parameter is read in several places.

    Attributes:
        table: `_parameters` of the module that reads it. The module's own `__setattr__` refuses
            plain tensors where parameters are registered.
        key: its name in the table.
        trained: the parameter.
        dtype_of_copies: of its perturbed copies: float32 in norms, else its own. Around 1.0, a
            16-bit weight of a norm is too coarse to hold theta + mu z.
    """

    table: dict[str, Any]
    key: str
    trained: TrainedParameter
    dtype_of_copies: torch.dtype


def places_in(modules: Iterable[nn.Module], trainable: Trainable) -> list[Place]:
    """Return where some modules read trained parameters of their own."""
    places = []
    for module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter in trainable:
                dtype = torch.float32 if is_norm(module) else parameter.dtype
                places.append(Place(module._parameters, key, trainable[parameter], dtype))
    return places


def is_norm(module: nn.Module) -> bool:
    """Return whether a module holds nothing but vectors, at least one."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    has_children = next(module.children(), None) is not None
    are_vectors = all(len(full_shape(parameter)) == 1 for parameter in own)
    return bool(own) and not has_children and are_vectors
