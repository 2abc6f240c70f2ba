"""MeZO as published (Malladi et al. 2023, algorithm 1): plain PyTorch that changes the weights in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

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


class InPlaceSteps:
    """MeZO's steps on stored weights; with dropped blocks, LeZO's (Wang et al. 2024, algorithm 1).

    theta += mu z; l_plus; theta -= 2 mu z; l_minus; theta += mu z; theta -= eta g z. Each time, z is drawn
    again from the same seed by torch's own generator. Each rank runs its share of the batch in the published
    layout, where each candidate is a sequence of its own, and computes all logits.

    Args:
        variant: says the share of the blocks that a step drops.
        workload: size of the batch.
        tensors: the stored weights, each with the index of its block; None outside all blocks.
        num_blocks: number of blocks of the model.
        forward: returns the logits of a micro-batch: [sequences, tokens, vocabulary].
        published: use the expressions of the published code, which make temporary tensors. A view of a
            shard has to be changed by one in-place operation instead, which also moves fewer bytes.
        staged_methods: for `stage_seconds`, in addition to the stages of this class.
    """

    def __init__(
        self,
        variant: Variant,
        workload: Workload,
        *,
        tensors: Sequence[tuple[Tensor, int | None]],
        num_blocks: int,
        forward: Callable[[MicroBatch], Tensor],
        published: bool,
        staged_methods: Sequence[StagedMethod] = (),
    ) -> None:
        self.staged_methods = staged_methods
        self._tensors, self._forward, self._published = tensors, forward, published
        self._blocks = range(num_blocks)
        self._num_dropped = int(variant.sparsity * num_blocks + 0.5)
        self._num_steps = 0
        shares = split_batch(workload, distributed.world_size(), published=True)
        self._batch = to_device(shares[distributed.rank()], distributed.device())
        self._loss_function = loss_function(workload)

    @property
    def weight_bytes(self) -> int:
        """Size of the stored weights."""
        return sum(values.numel() * values.element_size() for values, _ in self._tensors)

    @torch.no_grad()
    def step(self) -> float:
        """Do one step and return its projected gradient. A collective."""
        self._perturb(1)
        plus = self._summed_loss()
        self._perturb(-2)
        minus = self._summed_loss()
        self._perturb(1)
        weight = plus.new_tensor(self._batch.weight, dtype=torch.float64)
        sums = torch.stack([plus.double(), minus.double(), weight])
        plus_sum, minus_sum, total = distributed.sum_vector(sums)
        gradient = (plus_sum - minus_sum) / total / (2 * PERTURBATION_SCALE)
        self._update(gradient)
        self._num_steps += 1
        return gradient

    def _summed_loss(self) -> Tensor:
        selection = self._batch.selection
        assert selection is not None, "a batch of candidates"
        logits = self._forward(self._batch)[selection.rows, selection.positions]
        return self._loss_function(logits, self._batch).sum()

    def _perturb(self, multiple: float) -> None:
        with stage("perturb"):
            for theta, z in self._with_noise():
                if self._published:
                    theta.data = theta.data + multiple * z * PERTURBATION_SCALE
                else:
                    theta.data.add_(z, alpha=multiple * PERTURBATION_SCALE)

    def _update(self, gradient: float) -> None:
        with stage("update"):
            for theta, z in self._with_noise():
                if self._published:
                    theta.data = theta.data - LEARNING_RATE * (gradient * z + WEIGHT_DECAY * theta.data)
                else:
                    theta.data.add_(z, alpha=-LEARNING_RATE * gradient)

    def _with_noise(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each active tensor and its z; within a step always the same z."""
        dropped = random.Random(self._num_steps).sample(self._blocks, self._num_dropped)
        active = [values for values, block in self._tensors if block not in dropped]
        generator = torch.Generator(active[0].device).manual_seed(self._num_steps)
        for theta in active:
            yield theta, torch.empty_like(theta).normal_(generator=generator)


def plain_steps(variant: Variant, model: nn.Module, workload: Workload) -> InPlaceSteps:
    """Return "mezo_reference", on every rank's own model.

    To the advantage of the published code there is no padding and no mask, only the tokens of the candidates
    enter the loss, and a step has one reduction.
    """
    layout = find_blocks(model)

    def forward(batch: MicroBatch) -> Tensor:
        with stage("forward"):
            logits: Tensor = model(**batch.inputs).logits
            return logits

    tensors = [(values, layout.block_of(name)) for name, values in model.named_parameters()]
    return InPlaceSteps(
        variant,
        workload,
        tensors=tensors,
        num_blocks=layout.num_blocks,
        forward=forward,
        published=True,
    )
