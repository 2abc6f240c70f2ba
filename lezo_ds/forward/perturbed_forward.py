"""A forward pass at several probes of the weights, for the logits that a batch wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds.forward.batch import MicroBatch
from lezo_ds.forward.logit_selection import SelectiveHead
from lezo_ds.forward.perturbed_modules import KeyedProbe, Perturbation, PerturbedModules
from lezo_ds.forward.shared_start import SharedStart
from lezo_ds.noise import NoiseBackend
from lezo_ds.sharding.parameters import NamedParameter

__all__ = ["KeyedProbe", "Perturbation", "PerturbedForward"]


class PerturbedForward:
    """Wraps a model so that it can run at perturbed weights.

    Args:
        model: a causal language model of transformers (or one with the same interface), in eval mode.
        trainable: the parameters that may be perturbed; a parameter that is tied appears once.
        noise: draws z.
        blocks: the transformer blocks, to compute what is before the first perturbed one once for all probes.
            No parameter outside them may be trainable. Without blocks, all probes have everything of their
            own.
        at_once: blocks whose parameters are all perturbed when the block begins; see `PerturbedModules`.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Mapping[nn.Parameter, NamedParameter],
        noise: NoiseBackend,
        blocks: Sequence[nn.Module] = (),
        at_once: Sequence[nn.Module] = (),
    ) -> None:
        assert not blocks or all(named.block is not None for named in trainable.values())
        self._modules = PerturbedModules(model, trainable, noise, at_once)
        self._head = SelectiveHead(model, self._modules)
        self._num_blocks = len(blocks)
        self._shared = SharedStart(self._modules, blocks)

    def __call__(
        self, batch: MicroBatch, perturbation: Perturbation | None, call: Callable[..., Any]
    ) -> tuple[Tensor, ...]:
        """Run one forward pass, or all those of a continuation.

        Args:
            batch: R sequences and the logits wanted of them.
            perturbation: the probes; None runs the model at theta.
            call: runs the model on keyword arguments, and returns its output (DeepSpeed's engine, or the
                model), or a tensor whose first dimension is the batch (generation).

        Returns:
            For each probe the logits, or that tensor.
        """
        num_copies = 1 if perturbation is None else len(perturbation.probes)
        rows = next(iter(batch.inputs.values())).shape[0]
        keeps = batch.generation is not None and batch.generation.keep_perturbed
        first = self._first_perturbed(batch, perturbation)
        if perturbation is None or first is None:
            inputs = {name: torch.cat([value] * num_copies) for name, value in batch.inputs.items()}
            running = self._modules.running(perturbation, rows)
        else:
            inputs = dict(batch.inputs)
            running = self._shared.running(first, perturbation, rows)
        with self._modules.keeping_copies(keeps), running, self._head.selecting(batch.selection):
            output = call(**inputs)
        return tuple(getattr(output, "logits", output).chunk(num_copies))

    def _first_perturbed(self, batch: MicroBatch, perturbation: Perturbation | None) -> int | None:
        """Return the first block that probes have of their own; None if they share no part of the pass.

        The probes write continuations of their own, and share nothing from their second token on.
        """
        if perturbation is None or len(perturbation.probes) == 1 or batch.generation is not None:
            return None
        perturbed = set(range(self._num_blocks)) - perturbation.dropped_layers
        return min(perturbed, default=None)
