"""MeZO as published (Malladi et al. 2023, algorithm 1): PyTorch that changes weights in place."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lezo_ds import distributed
from lezo_ds.config import ZoConfig
from lezo_ds.forward.batch import LossFunction, MicroBatch, to_device
from lezo_ds.forward.blocks import find_blocks


class MezoReference:
    """MeZO's steps on every rank's own model; with dropped blocks, LeZO's (Wang et al. 2024).

    A step is

        theta += mu z;   loss_plus  = loss(theta)
        theta -= 2 mu z; loss_minus = loss(theta)
        theta += mu z
        theta -= eta g z with g = (loss_plus - loss_minus) / (2 mu)

    Each of these lines draws z again from the same seed, by torch's own generator. Each rank runs
    its own examples of the batch and computes all logits. One all-reduce sums the losses. Weights
    change by the expressions of the published code.

    Two differences from that code are to its advantage: there is no attention mask, because the
    padding is on the right, and the loss reads the tokens of the candidates alone.
    """

    def __init__(self, zo: ZoConfig, model: nn.Module) -> None:
        assert zo.learning_rate is not None
        assert zo.sparsity is not None
        layout = find_blocks(model)
        self._model = model
        self._learning_rate = zo.learning_rate
        self._scale = zo.perturbation_scale
        # Each weight with the index of its block, which is not in range(num_blocks) outside blocks.
        self._weights = [
            (weight, layout.block_of(name)) for name, weight in model.named_parameters()
        ]
        self._num_blocks = layout.num_blocks
        self._num_dropped = int(zo.sparsity * layout.num_blocks + 0.5)
        self._seeds_of_steps = random.Random(0)
        self._step_seed = 0

    @torch.no_grad()
    def step(self, batch: MicroBatch, loss: LossFunction) -> float:
        """Do one step on this rank's examples; return the projected gradient. A collective."""
        batch = to_device(batch, distributed.device())
        self._step_seed = self._seeds_of_steps.randrange(10**9)
        self._perturb(1)
        plus = self._summed_loss(batch, loss)
        self._perturb(-2)
        minus = self._summed_loss(batch, loss)
        self._perturb(1)
        weight = plus.new_tensor(batch.weight, dtype=torch.float64)
        sums = torch.stack([plus.double(), minus.double(), weight])
        plus_sum, minus_sum, total_weight = distributed.sum_vector(sums)
        gradient = (plus_sum - minus_sum) / total_weight / (2 * self._scale)
        for theta, z in self._with_noise():
            # The published code has a weight decay, which is 0.
            theta.data = theta.data - self._learning_rate * (gradient * z + 0.0 * theta.data)
        return gradient

    def _summed_loss(self, batch: MicroBatch, loss: LossFunction) -> Tensor:
        assert batch.selection is not None, "a batch of candidates"
        # [sequences, tokens, vocabulary] -> [selected tokens, vocabulary]
        logits = self._model(**batch.inputs).logits[batch.selection.rows, batch.selection.positions]
        if batch.selection.vocabulary is not None:
            logits = logits[:, batch.selection.vocabulary]
        return loss(logits, batch).sum()

    def _perturb(self, multiple: float) -> None:
        for theta, z in self._with_noise():
            theta.data = theta.data + multiple * z * self._scale

    def _with_noise(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight outside the dropped blocks with its z, the same in all of a step."""
        dropped = random.Random(self._step_seed).sample(range(self._num_blocks), self._num_dropped)
        active = [weight for weight, block in self._weights if block not in dropped]
        generator = torch.Generator(active[0].device).manual_seed(self._step_seed)
        for theta in active:
            yield theta, torch.empty_like(theta).normal_(generator=generator)
