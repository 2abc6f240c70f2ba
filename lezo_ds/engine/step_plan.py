"""The plan of one step: all that the ranks must agree on before it, in one small message."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from lezo_ds.journal import StepRecord

MAX_BLOCKS = 256
_FORMAT = struct.Struct(f"<qQdd{MAX_BLOCKS // 8}s")
PLAN_BYTES = _FORMAT.size
"""Length of the broadcast message, in bytes (64)."""
NUM_FACT_NUMBERS = 4
"""How many numbers with the losses prove that all ranks work on the same (see `agreement.fact_numbers`)."""
_NUM_VOTES = 2  # to stop, and to save


@dataclass(frozen=True)
class StepPlan:
    """What every rank does at a step (LeZO, Algorithm 1, line 3).

    Attributes:
        step: index of the step, from 0.
        seed: 64-bit key of the step's noise.
        dropped_layers: sorted indices of the blocks that are neither perturbed nor updated.
        learning_rate: eta of the update.
        perturbation_scale: mu of the paper, "eps" in its tables.
    """

    step: int
    seed: int
    dropped_layers: tuple[int, ...]
    learning_rate: float
    perturbation_scale: float

    def pack(self) -> bytes:
        """Return the plan as PLAN_BYTES bytes."""
        mask = sum(1 << layer for layer in self.dropped_layers).to_bytes(MAX_BLOCKS // 8, "little")
        scalars = (self.step, self.seed, self.learning_rate, self.perturbation_scale)
        return _FORMAT.pack(*scalars, mask)

    @classmethod
    def unpack(cls, data: bytes) -> StepPlan:
        """Return the plan that `pack` made `data` from."""
        step, seed, learning_rate, scale, mask_bytes = _FORMAT.unpack(data)
        mask = int.from_bytes(mask_bytes, "little")
        dropped = tuple(layer for layer in range(MAX_BLOCKS) if mask >> layer & 1)
        return cls(step, seed, dropped, learning_rate, scale)


def scalar_bytes(num_passes: int) -> int:
    """Return the length of a step's two messages beside the gathers: its plan, and the one reduction.

    Summed over the ranks are float64 numbers: a loss of each sign and pass, the votes, and the proof that all
    ranks work on the same.

    Args:
        num_passes: micro-batches x directions of the step, on all ranks.

    >>> scalar_bytes(1)
    128
    """
    return PLAN_BYTES + 8 * (2 * num_passes + _NUM_VOTES + NUM_FACT_NUMBERS)


def direction_seed(seed: int, direction: int) -> int:
    """Return the noise key of one of a step's directions: for the first the step's own, else a hash of it."""
    if direction == 0:
        return seed
    text = f"lezo_ds direction 1|{seed}|{direction}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def noise_seed(run_seed: int, step: int) -> int:
    """Return the 64-bit noise key of a step: a hash, so that no two steps or runs share a stream.

    Sums such as seed + step collide across runs (run 0 step 1 is run 1 step 0); a hash does not.
    """
    text = f"lezo_ds noise 1|{run_seed}|{step}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def updates_of(block: int | None, records: Iterable[StepRecord]) -> list[tuple[int, float]]:
    """Return (noise key, coefficient of z) of all that applied steps subtract from a parameter, in order.

    Args:
        block: the parameter's; None outside the blocks.
        records: of applied steps.
    """
    return [
        (direction_seed(record.seed, direction), coefficient)
        for record in records
        if block not in record.dropped_layers
        for direction, gradient in enumerate(record.projected_grads)
        if (coefficient := record.learning_rate / len(record.projected_grads) * gradient) != 0
    ]
