"""The steps that are compared: MeZO as published, the same under ZeRO-3 as first written, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lezo_ds import distributed
from lezo_ds.config import Forward, ZoConfig, num_dropped_from_sparsity
from lezo_ds.engine.lezo_engine import LezoEngine
from lezo_ds.engine.step_plan import noise_seed
from lezo_ds.errors import UserError
from lezo_ds.model.batch import MicroBatch, to_device
from lezo_ds.model.blocks import draw_dropped_layers, find_blocks
from lezo_ds.noise import NoiseMode, UpdatePrecision, noise_backend
from lezo_ds.sharding import zero3
from lezo_ds.tools.benchmark.shapes import Workload
from lezo_ds.tools.benchmark.stages import StageClock

LEARNING_RATE = 1e-7
PERTURBATION_SCALE = 1e-3
WEIGHT_DECAY = 0.0
RUN_SEED = 0
NAMES = ("mezo_reference", "mezo_fused", "naive_zero3", "ours")
_NOISE_METHODS = ("perturb", "perturb_pair", "perturb_rows", "perturb_rows_pair")


@dataclass(frozen=True)
class VariantName:
    """What is to be timed, as the command line names it.

    Attributes:
        text: as given: NAME[:SPARSITY[:FORWARD[:DIRECTIONS]]], the last two for "ours" only.
        kind: one of NAMES.
        sparsity: share of the blocks a step drops; 0 is MeZO.
        forward: "dual" or "two_pass".
        directions: of a step.
    """

    text: str
    kind: str
    sparsity: float = 0.0
    forward: Forward = "dual"
    directions: int = 1

    @classmethod
    def parse(cls, text: str) -> VariantName:
        """Read a variant's name.

        >>> VariantName.parse("ours:0.75:two_pass")
        VariantName(text='ours:0.75:two_pass', kind='ours', sparsity=0.75, forward='two_pass', directions=1)

        Raises:
            UserError: there is no such variant.
        """
        kind, *more = text.split(":")
        try:
            sparsity = float(more[0]) if more else 0.0
            forward: Any = more[1] if len(more) > 1 else "dual"
            directions = int(more[2]) if len(more) > 2 else 1
        except ValueError:
            raise _no_variant(text) from None
        allowed = kind in NAMES and 0 <= sparsity <= 1 and forward in get_args(Forward) and directions > 0
        if not allowed or len(more) > (3 if kind == "ours" else 1):
            raise _no_variant(text)
        return cls(text, kind, sparsity, forward, directions)


def _no_variant(text: str) -> UserError:
    return UserError(
        "no such variant",
        got=text,
        expected=f"{', '.join(NAMES[:-1])} with [:SPARSITY], or ours[:SPARSITY[:FORWARD[:DIRECTIONS]]]",
        fix="for instance mezo_reference ours:0 ours:0.75 ours:0.75:two_pass",
    )


@dataclass(frozen=True)
class Variant:
    """A way to do a training step.

    Attributes:
        name: as given.
        weight_bytes: what this rank holds of the model between steps.
        step: does one step and returns its projected gradient (of several directions, their mean). A
            collective.
        timed_stages: while it is open, the clock sees the stages of the steps.
    """

    name: str
    weight_bytes: int
    step: Callable[[], float]
    timed_stages: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class StoredTensor:
    """Weights that are changed in place, and the block they belong to (None outside all blocks)."""

    values: Tensor
    block: int | None


@dataclass(frozen=True)
class Arithmetic:
    """How MeZO's steps compute with weights theta and noise z of their shape; theta.data becomes the result.

    Attributes:
        perturb: (theta, z, multiple): theta += multiple mu z; the multiples of a step are 1, -2 and 1.
        update: (theta, z, projected gradient): theta -= eta g z.
    """

    perturb: Callable[[Tensor, Tensor, float], None]
    update: Callable[[Tensor, Tensor, float], None]


def _published_perturb(theta: Tensor, z: Tensor, multiple: float) -> None:
    theta.data = theta.data + multiple * z * PERTURBATION_SCALE


def _published_update(theta: Tensor, z: Tensor, gradient: float) -> None:
    theta.data = theta.data - LEARNING_RATE * (gradient * z + WEIGHT_DECAY * theta.data)


def _fused_perturb(theta: Tensor, z: Tensor, multiple: float) -> None:
    theta.data.add_(z, alpha=multiple * PERTURBATION_SCALE)


def _fused_update(theta: Tensor, z: Tensor, gradient: float) -> None:
    theta.data.add_(z, alpha=-LEARNING_RATE * gradient)


PUBLISHED = Arithmetic(_published_perturb, _published_update)
"""As the published code: with z it moves 74 bytes a 16-bit parameter and step."""

FUSED = Arithmetic(_fused_perturb, _fused_update)
"""One operation and no temporary but z: 32 bytes."""


class InPlaceSteps:
    """MeZO's algorithm (Malladi et al. 2023, algorithm 1) on tensors that it changes in place.

    theta += mu z; l_plus; theta -= 2 mu z; l_minus; theta += mu z; theta -= eta g z; z is drawn four times,
    from the same seed, by torch's own generator. With dropped blocks it is LeZO's (Wang et al. 2024).

    Args:
        tensors: the stored weights.
        arithmetic: what is computed with them.
        loss: returns the summed loss of this rank's share of the batch, and of how many terms it is the sum.
        num_blocks: blocks of the model.
        num_dropped: how many of them a step drops.
        clock: sees perturbation and update.
    """

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        arithmetic: Arithmetic,
        loss: Callable[[], tuple[Tensor, float]],
        num_blocks: int,
        num_dropped: int,
        clock: StageClock,
    ) -> None:
        self._tensors = tensors
        self._arithmetic = arithmetic
        self._loss = loss
        self._num_blocks = num_blocks
        self._num_dropped = num_dropped
        self._clock = clock
        self._num_steps = 0

    @torch.no_grad()
    def step(self) -> float:
        """Do one step and return its projected gradient. A collective."""
        self._perturb(1)
        plus, weight = self._loss()
        self._perturb(-2)
        minus, _ = self._loss()
        self._perturb(1)
        sums = torch.stack([plus.double(), minus.double(), plus.new_tensor(weight, dtype=torch.float64)])
        plus_sum, minus_sum, total = distributed.sum_vector(sums)
        gradient = (plus_sum - minus_sum) / total / (2 * PERTURBATION_SCALE)
        with self._clock.stage("update"):
            for theta, z in self._with_noise():
                self._arithmetic.update(theta, z, gradient)
            zero3.finish_updates()
        self._num_steps += 1
        return gradient

    def _perturb(self, multiple: float) -> None:
        with self._clock.stage("perturb"):
            for theta, z in self._with_noise():
                self._arithmetic.perturb(theta, z, multiple)

    def _with_noise(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Give each active tensor and its z, always the same z in a step."""
        dropped = draw_dropped_layers(RUN_SEED, self._num_steps, self._num_blocks, self._num_dropped)
        active = [tensor.values for tensor in self._tensors if tensor.block not in dropped]
        generator = torch.Generator(active[0].device)
        generator.manual_seed(noise_seed(RUN_SEED, self._num_steps))
        for theta in active:
            z = torch.normal(
                0.0, 1.0, theta.shape, generator=generator, dtype=theta.dtype, device=theta.device
            )
            yield theta, z


def mezo_reference(name: VariantName, model: nn.Module, workload: Workload, clock: StageClock) -> Variant:
    """Return MeZO as published: a plain model on every rank, which runs its share of the batch.

    Each candidate is a sequence of its own, and all logits are computed, as the published code does. In its
    favour: no padding, no mask, the losses of the candidates' tokens only, one reduction a step. "mezo_fused"
    is kinder still: see FUSED.
    """
    arithmetic = PUBLISHED if name.kind == "mezo_reference" else FUSED
    layout = find_blocks(model)
    tensors = [StoredTensor(p, layout.block_of(n)) for n, p in model.named_parameters()]

    def run(batch: MicroBatch) -> Tensor:
        with clock.stage("forward"):
            logits: Tensor = model(**batch.inputs).logits
            return logits

    loss = _loss_of_all_logits(run, workload, tensors[0].values.device)
    return _in_place(name, tensors, arithmetic, loss, layout.num_blocks, clock)


def naive_zero3(name: VariantName, engine: LezoEngine, workload: Workload, clock: StageClock) -> Variant:
    """Return MeZO on a ZeRO-3 model as one would first write it: two forwards, shards changed in place."""
    tensors = []
    for parameter in engine.weights.parameters:
        with parameter.shard() as shard:  # the view stays valid, but for weights on NVMe
            if parameter.count:
                tensors.append(StoredTensor(shard, parameter.named.block))

    def run(batch: MicroBatch) -> Tensor:
        zero3.finish_updates()  # of the shards, which have just been perturbed
        return engine.forward(replace(batch, selection=None))

    loss = _loss_of_all_logits(run, workload, engine.device)
    made = _in_place(name, tensors, FUSED, loss, engine.layout.num_blocks, clock)
    return replace(made, timed_stages=lambda: _sharded_stages(engine, clock))


def ours(
    name: VariantName, engine: LezoEngine, workload: Workload, num_micro_batches: int, clock: StageClock
) -> Variant:
    """Return the engine's own step."""
    trained = engine.with_config(ours_config(name))
    batch = workload.micro_batches(num_micro_batches)

    def step() -> float:
        record = trained.train_batch(batch, workload.loss)
        return sum(record.projected_grads) / len(record.projected_grads) if record.applied else float("nan")

    stored = sum(p.count * p.parameter.element_size() for p in engine.weights.parameters)
    low_bits = sum(low.numel() * low.element_size() for low in engine.weights.low_bits.values())
    return Variant(name.text, stored + low_bits, step, lambda: _sharded_stages(engine, clock))


def ours_config(
    name: VariantName, precision: UpdatePrecision = "fp32_master", noise: NoiseMode = "exact"
) -> ZoConfig:
    """Return the engine's settings for a variant of it."""
    return ZoConfig(
        learning_rate=LEARNING_RATE,
        perturbation_scale=PERTURBATION_SCALE,
        sparsity=name.sparsity,
        forward=name.forward,
        directions=name.directions,
        update_precision=precision,
    )


def _in_place(
    name: VariantName,
    tensors: Sequence[StoredTensor],
    arithmetic: Arithmetic,
    loss: Callable[[], tuple[Tensor, float]],
    num_blocks: int,
    clock: StageClock,
) -> Variant:
    num_dropped = num_dropped_from_sparsity(name.sparsity, num_blocks)
    steps = InPlaceSteps(tensors, arithmetic, loss, num_blocks, num_dropped, clock)
    num_bytes = sum(tensor.values.numel() * tensor.values.element_size() for tensor in tensors)
    return Variant(name.text, num_bytes, steps.step, nullcontext)


def _loss_of_all_logits(
    run: Callable[[MicroBatch], Tensor], workload: Workload, device: torch.device
) -> Callable[[], tuple[Tensor, float]]:
    batch = to_device(workload.published_batch(distributed.rank(), distributed.world_size()), device)
    assert batch.selection is not None, "a batch of candidates"
    rows, positions = batch.selection.rows, batch.selection.positions

    def loss() -> tuple[Tensor, float]:
        logits = run(batch)[rows, positions]
        return workload.loss(logits, batch).sum(), batch.weight

    return loss


@contextmanager
def _sharded_stages(engine: LezoEngine, clock: StageClock) -> Iterator[None]:
    owner, gathering = zero3.GATHERING
    with (
        clock.methods(engine.module, ["forward"], "forward"),
        clock.methods(noise_backend(engine.device, engine.weights.noise), _NOISE_METHODS, "perturb"),
        clock.methods(engine.weights, ["apply"], "update"),
        clock.methods(owner, gathering, "gather"),
    ):
        yield
