"""MeZO as published (Malladi et al. 2023, algorithm 1): plain PyTorch that changes the weights in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lezo_ds import distributed
from lezo_ds.config import ZoConfig
from lezo_ds.engine import LezoEngine
from lezo_ds.forward.batch import LossFunction, MicroBatch, to_device
from lezo_ds.forward.blocks import find_blocks
from lezo_ds.sharding import zero3

WEIGHT_DECAY = 0.0


class Weights(NamedTuple):
    """Stored weights, each with the index of its block (None outside all blocks), and a forward pass.

    `forward` returns the logits of a micro-batch: [sequences, tokens, vocabulary]. With `published`, weights
    change by the expressions of the published code, which make temporary tensors. A view of a shard has to be
    changed by one in-place operation instead, which also moves fewer bytes.
    """

    tensors: Sequence[tuple[Tensor, int | None]]
    num_blocks: int
    forward: Callable[[MicroBatch], Tensor]
    published: bool


class InPlaceSteps:
    """MeZO's steps on stored weights; with dropped blocks, LeZO's (Wang et al. 2024, algorithm 1).

    theta += mu z; l_plus; theta -= 2 mu z; l_minus; theta += mu z; theta -= eta g z. Each time, z is drawn
    again from the same seed by torch's own generator. Each rank runs its share of the batch (`shares(step)`
    returns those of all ranks), computes all logits, and one all-reduce sums the losses.
    """

    def __init__(
        self,
        zo: ZoConfig,
        weights: Weights,
        shares: Callable[[int], Sequence[MicroBatch]],
        loss: LossFunction,
    ) -> None:
        assert zo.learning_rate is not None and zo.sparsity is not None
        self._learning_rate, self._scale = zo.learning_rate, zo.perturbation_scale
        self._weights, self._shares, self._loss = weights, shares, loss
        self._num_dropped = int(zo.sparsity * weights.num_blocks + 0.5)
        self._step_seeds, self._step_seed, self._num_steps = random.Random(0), 0, 0

    @torch.no_grad()
    def step(self) -> float:
        """Do one step and return its projected gradient. A collective."""
        batch = to_device(self._shares(self._num_steps)[distributed.rank()], distributed.device())
        self._step_seed = self._step_seeds.randrange(10**9)
        self._perturb(1)
        plus = self._summed_loss(batch)
        self._perturb(-2)
        minus = self._summed_loss(batch)
        self._perturb(1)
        weight = plus.new_tensor(batch.weight, dtype=torch.float64)
        sums = torch.stack([plus.double(), minus.double(), weight])
        plus_sum, minus_sum, total = distributed.sum_vector(sums)
        gradient = (plus_sum - minus_sum) / total / (2 * self._scale)
        self._update(gradient)
        self._num_steps += 1
        return gradient

    def num_tokens(self, step: int) -> int:
        """Return the tokens, padding included, of a step's batch."""
        return sum(batch.inputs["input_ids"].numel() for batch in self._shares(step))

    def _summed_loss(self, batch: MicroBatch) -> Tensor:
        assert batch.selection is not None, "a batch of candidates"
        logits = self._weights.forward(batch)[batch.selection.rows, batch.selection.positions]
        if batch.selection.vocabulary is not None:
            logits = logits[:, batch.selection.vocabulary]
        return self._loss(logits, batch).sum()

    def _perturb(self, multiple: float) -> None:
        for theta, z in self._with_noise():
            if self._weights.published:
                theta.data = theta.data + multiple * z * self._scale
            else:
                theta.data.add_(z, alpha=multiple * self._scale)

    def _update(self, gradient: float) -> None:
        for theta, z in self._with_noise():
            if self._weights.published:
                theta.data = theta.data - self._learning_rate * (gradient * z + WEIGHT_DECAY * theta.data)
            else:
                theta.data.add_(z, alpha=-self._learning_rate * gradient)

    def _with_noise(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each active tensor and its z, which is the same throughout a step."""
        dropped = random.Random(self._step_seed).sample(range(self._weights.num_blocks), self._num_dropped)
        active = [values for values, block in self._weights.tensors if block not in dropped]
        generator = torch.Generator(active[0].device).manual_seed(self._step_seed)
        for theta in active:
            yield theta, torch.empty_like(theta).normal_(generator=generator)


def plain_weights(model: nn.Module) -> Weights:
    """Return the weights of "mezo_reference", on every rank's own model.

    Where the published code does more, this is to its advantage. It pads on the left and therefore needs a
    mask; here padding is on the right, where causal attention never looks. Only the tokens of the candidates
    enter the loss here.
    """
    layout = find_blocks(model)

    def forward(batch: MicroBatch) -> Tensor:
        logits: Tensor = model(**batch.inputs).logits
        return logits

    tensors = [(values, layout.block_of(name)) for name, values in model.named_parameters()]
    return Weights(tensors, layout.num_blocks, forward, published=True)


def sharded_weights(engine: LezoEngine) -> Weights:
    """Return the weights of "naive_zero3": MeZO as one would first write it on ZeRO-3, on the shards."""
    tensors = []
    for parameter in engine.weights.parameters:
        with parameter.shard() as shard:  # the view stays valid, except for weights on NVMe
            if parameter.count:
                tensors.append((shard, parameter.named.block))

    def forward(batch: MicroBatch) -> Tensor:
        zero3.finish_updates()  # DeepSpeed gathers on another stream, and the shards have just been perturbed
        return engine.forward(replace(batch, selection=None))

    return Weights(tensors, engine.layout.num_blocks, forward, published=False)
