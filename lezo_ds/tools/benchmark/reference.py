"""MeZO as published (Malladi et al. 2023, algorithm 1): plain PyTorch that changes the weights in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lezo_ds import distributed
from lezo_ds.model.batch import MicroBatch, to_device
from lezo_ds.model.blocks import find_blocks
from lezo_ds.tools.benchmark.inputs import loss_function, split_batch
from lezo_ds.tools.benchmark.settings import Variant
from lezo_ds.tools.benchmark.stages import StagedMethod, stage
from lezo_ds.tools.workloads import Workload

LEARNING_RATE = 1e-7
PERTURBATION_SCALE = 1e-3
WEIGHT_DECAY = 0.0


@dataclass
class InPlaceSteps:
    """MeZO's steps on stored weights; with dropped blocks, LeZO's (Wang et al. 2024, algorithm 1).

    theta += mu z; l_plus; theta -= 2 mu z; l_minus; theta += mu z; theta -= eta g z. Each time, z is drawn
    again from the same seed by torch's own generator.

    Attributes:
        tensors: the stored weights, each with the index of its block; None outside all blocks.
        loss: returns the summed loss of this rank's share of the batch, and the number of its terms.
        num_blocks: number of blocks of the model.
        sparsity: share of the blocks that a step drops.
        fused: change each tensor by one operation, without temporary tensors: 32 bytes moved per 16-bit
            parameter and step. The expressions of the published code move 74.
        staged_methods: for `stage_seconds`, in addition to the stages of this class.
        num_steps: steps done.
    """

    tensors: Sequence[tuple[Tensor, int | None]]
    loss: Callable[[], tuple[Tensor, float]]
    num_blocks: int
    sparsity: float
    fused: bool
    staged_methods: Sequence[StagedMethod] = ()
    num_steps: int = 0

    @property
    def weight_bytes(self) -> int:
        """Size of the stored weights."""
        return sum(values.numel() * values.element_size() for values, _ in self.tensors)

    @torch.no_grad()
    def step(self) -> float:
        """Do one step and return its projected gradient. A collective."""
        self._perturb(1)
        plus, weight = self.loss()
        self._perturb(-2)
        minus, _ = self.loss()
        self._perturb(1)
        sums = torch.stack([plus.double(), minus.double(), plus.new_tensor(weight, dtype=torch.float64)])
        plus_sum, minus_sum, total = distributed.sum_vector(sums)
        gradient = (plus_sum - minus_sum) / total / (2 * PERTURBATION_SCALE)
        self._update(gradient)
        self.num_steps += 1
        return gradient

    def _perturb(self, multiple: float) -> None:
        with stage("perturb"):
            for theta, z in self._with_noise():
                if self.fused:
                    theta.data.add_(z, alpha=multiple * PERTURBATION_SCALE)
                else:
                    theta.data = theta.data + multiple * z * PERTURBATION_SCALE

    def _update(self, gradient: float) -> None:
        with stage("update"):
            for theta, z in self._with_noise():
                if self.fused:
                    theta.data.add_(z, alpha=-LEARNING_RATE * gradient)
                else:
                    theta.data = theta.data - LEARNING_RATE * (gradient * z + WEIGHT_DECAY * theta.data)

    def _with_noise(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each active tensor and its z; within a step always the same z."""
        num_dropped = int(self.sparsity * self.num_blocks + 0.5)
        dropped = random.Random(self.num_steps).sample(range(self.num_blocks), num_dropped)
        active = [values for values, block in self.tensors if block not in dropped]
        generator = torch.Generator(active[0].device).manual_seed(self.num_steps)
        for theta in active:
            yield theta, torch.empty_like(theta).normal_(generator=generator)


def plain_steps(variant: Variant, model: nn.Module, workload: Workload) -> InPlaceSteps:
    """Return "mezo_reference" or "mezo_fused": each rank runs its share of the batch on a model of its own.

    As in the published code, each candidate is a sequence of its own, and all logits are computed. To its
    advantage there is no padding and no mask, only the tokens of the candidates enter the loss, and a step
    has one reduction.
    """
    layout = find_blocks(model)
    tensors = [(values, layout.block_of(name)) for name, values in model.named_parameters()]

    def forward(batch: MicroBatch) -> Tensor:
        with stage("forward"):
            logits: Tensor = model(**batch.inputs).logits
            return logits

    loss = loss_of_all_logits(forward, workload)
    fused = variant.kind == "mezo_fused"
    return InPlaceSteps(tensors, loss, layout.num_blocks, variant.sparsity, fused=fused)


def loss_of_all_logits(
    forward: Callable[[MicroBatch], Tensor], workload: Workload
) -> Callable[[], tuple[Tensor, float]]:
    """Return the loss of `InPlaceSteps`.

    Args:
        forward: returns the logits of a micro-batch: [sequences, tokens, vocabulary].
        workload: size of the batch.
    """
    shares = split_batch(workload, distributed.world_size(), published=True)
    batch = to_device(shares[distributed.rank()], distributed.device())
    assert batch.selection is not None, "a batch of candidates"
    rows, positions = batch.selection.rows, batch.selection.positions
    summed = loss_function(workload)

    def loss() -> tuple[Tensor, float]:
        logits = forward(batch)[rows, positions]
        return summed(logits, batch).sum(), batch.weight

    return loss
