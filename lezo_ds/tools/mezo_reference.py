"""MeZO as published (Malladi et al. 2023, algorithm 1): plain PyTorch that changes the weights in place."""

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
    """MeZO's steps on every rank's own model; with dropped blocks, LeZO's (Wang et al. 2024, algorithm 1).

    theta += mu z; l_plus; theta -= 2 mu z; l_minus; theta += mu z; theta -= eta g z. Each time, z is drawn
    again from the same seed by torch's own generator. Each rank runs its share of the batch, computes all
    logits, and one all-reduce sums the losses. Weights change by the expressions of the published code.

    What differs from that code is to its advantage: no mask, as the padding is on the right, and a loss of
    the candidates' tokens alone.
    """

    def __init__(self, zo: ZoConfig, model: nn.Module) -> None:
        assert zo.learning_rate is not None and zo.sparsity is not None
        layout = find_blocks(model)
        self._learning_rate, self._scale, self._model = (
            zo.learning_rate,
            zo.perturbation_scale,
            model,
        )
        self._weights = [
            (values, layout.block_of(name)) for name, values in model.named_parameters()
        ]
        self._num_blocks = layout.num_blocks
        self._num_dropped = int(zo.sparsity * layout.num_blocks + 0.5)
        self._step_seeds, self._step_seed = random.Random(0), 0

    @torch.no_grad()
    def step(self, batch: MicroBatch, loss: LossFunction) -> float:
        """Do one step on this rank's share of the batch; return the projected gradient. A collective."""
        batch = to_device(batch, distributed.device())
        self._step_seed = self._step_seeds.randrange(10**9)
        self._perturb(1)
        plus = self._summed_loss(batch, loss)
        self._perturb(-2)
        minus = self._summed_loss(batch, loss)
        self._perturb(1)
        sums = [plus.double(), minus.double(), plus.new_tensor(batch.weight, dtype=torch.float64)]
        plus_sum, minus_sum, total = distributed.sum_vector(torch.stack(sums))
        gradient = (plus_sum - minus_sum) / total / (2 * self._scale)
        for theta, z in self._with_noise():
            # The published code has a weight decay, which is 0.
            theta.data = theta.data - self._learning_rate * (gradient * z + 0.0 * theta.data)
        return gradient

    def _summed_loss(self, batch: MicroBatch, loss: LossFunction) -> Tensor:
        assert batch.selection is not None, "a batch of candidates"
        logits = self._model(**batch.inputs).logits[batch.selection.rows, batch.selection.positions]
        if batch.selection.vocabulary is not None:
            logits = logits[:, batch.selection.vocabulary]
        return loss(logits, batch).sum()

    def _perturb(self, multiple: float) -> None:
        for theta, z in self._with_noise():
            theta.data = theta.data + multiple * z * self._scale

    def _with_noise(self) -> Iterator[tuple[Tensor, Tensor]]:
        dropped = random.Random(self._step_seed).sample(range(self._num_blocks), self._num_dropped)
        active = [values for values, block in self._weights if block not in dropped]
        generator = torch.Generator(active[0].device).manual_seed(self._step_seed)
        for theta in active:
            yield theta, torch.empty_like(theta).normal_(generator=generator)
