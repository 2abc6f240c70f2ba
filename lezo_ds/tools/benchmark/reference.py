"""MeZO as published (Malladi et al. 2023, algorithm 1): plain PyTorch that changes the weights in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lezo_ds import distributed
from lezo_ds.forward.batch import MicroBatch, to_device
from lezo_ds.forward.blocks import find_blocks
from lezo_ds.tools.benchmark.inputs import Inputs
from lezo_ds.tools.benchmark.settings import Variant

WEIGHT_DECAY = 0.0


def fed_tokens(batches: Sequence[MicroBatch]) -> int:
    """Return the number of tokens, padding included, that some micro-batches feed to the model."""
    return sum(batch.inputs["input_ids"].numel() for batch in batches)


class InPlaceSteps:
    """MeZO's steps on stored weights; with dropped blocks, LeZO's (Wang et al. 2024, algorithm 1).

    theta += mu z; l_plus; theta -= 2 mu z; l_minus; theta += mu z; theta -= eta g z. Each time, z is drawn
    again from the same seed by torch's own generator. Each rank runs its share of the batch in the published
    layout, where each candidate is a sequence of its own, and computes all logits.

    Args:
        variant: says the share of the blocks that a step drops.
        inputs: the batch of each step, and the settings.
        tensors: the stored weights, each with the index of its block; None outside all blocks.
        num_blocks: number of blocks of the model.
        forward: returns the logits of a micro-batch: [sequences, tokens, vocabulary].
        published: use the expressions of the published code, which make temporary tensors. A view of a
            shard has to be changed by one in-place operation instead, which also moves fewer bytes.

    Attributes:
        num_probes: forward passes of the whole batch in a step, each at one probe.
    """

    num_probes = 2

    def __init__(
        self,
        variant: Variant,
        inputs: Inputs,
        *,
        tensors: Sequence[tuple[Tensor, int | None]],
        num_blocks: int,
        forward: Callable[[MicroBatch], Tensor],
        published: bool,
    ) -> None:
        self._tensors, self._forward, self._published = tensors, forward, published
        self._blocks = range(num_blocks)
        self._num_dropped = int(variant.sparsity * num_blocks + 0.5)
        self._inputs = inputs
        zo = inputs.zo_config(variant)
        assert zo.learning_rate is not None, "a zeroth-order recipe has a learning rate"
        self._learning_rate, self._scale = zo.learning_rate, zo.perturbation_scale
        self._num_steps = 0
        self._step_seeds = random.Random(inputs.seed)
        self._step_seed = 0

    @property
    def weight_bytes(self) -> int:
        """Size of the stored weights."""
        return sum(values.numel() * values.element_size() for values, _ in self._tensors)

    @property
    def model(self) -> InPlaceSteps:
        """What `evaluate` scores."""
        return self

    @torch.no_grad()
    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits that a micro-batch selects, at the current weights. A collective."""
        selection = micro_batch.selection
        assert selection is not None, "a batch of candidates"
        logits = self._forward(micro_batch)[selection.rows, selection.positions]
        return logits if selection.vocabulary is None else logits[:, selection.vocabulary]

    def fed_tokens(self, step: int) -> int:
        """Return the tokens, padding included, in a forward pass of a step's whole batch at one probe."""
        return fed_tokens(self._inputs.published_batches(step))

    @torch.no_grad()
    def step(self) -> float:
        """Do one step and return its projected gradient. A collective."""
        share = self._inputs.published_batches(self._num_steps)[distributed.rank()]
        batch = to_device(share, distributed.device())
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

    def _summed_loss(self, batch: MicroBatch) -> Tensor:
        return self._inputs.loss(self.forward(batch), batch).sum()

    def _perturb(self, multiple: float) -> None:
        for theta, z in self._with_noise():
            if self._published:
                theta.data = theta.data + multiple * z * self._scale
            else:
                theta.data.add_(z, alpha=multiple * self._scale)

    def _update(self, gradient: float) -> None:
        for theta, z in self._with_noise():
            if self._published:
                theta.data = theta.data - self._learning_rate * (gradient * z + WEIGHT_DECAY * theta.data)
            else:
                theta.data.add_(z, alpha=-self._learning_rate * gradient)

    def _with_noise(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each active tensor and its z; within a step always the same z."""
        dropped = random.Random(self._step_seed).sample(self._blocks, self._num_dropped)
        active = [values for values, block in self._tensors if block not in dropped]
        generator = torch.Generator(active[0].device).manual_seed(self._step_seed)
        for theta in active:
            yield theta, torch.empty_like(theta).normal_(generator=generator)


def plain_steps(variant: Variant, model: nn.Module, inputs: Inputs) -> InPlaceSteps:
    """Return "mezo_reference", on every rank's own model.

    Where the published code does more, this is to its advantage. It pads on the left and therefore needs a
    mask; here padding is on the right, where causal attention never looks. Only the tokens of the candidates
    enter the loss here, and a step has one reduction.
    """
    layout = find_blocks(model)

    def forward(batch: MicroBatch) -> Tensor:
        logits: Tensor = model(**batch.inputs).logits
        return logits

    tensors = [(values, layout.block_of(name)) for name, values in model.named_parameters()]
    return InPlaceSteps(
        variant,
        inputs,
        tensors=tensors,
        num_blocks=layout.num_blocks,
        forward=forward,
        published=True,
    )
