"""Perturbation laws: what a direction z is.

A probe measures the loss at theta + scale * z, and an update subtracts coefficient * z from theta.
No z is ever stored or sent: z = z(key, parameter id, element) is a pure function of three integers,
so every rank draws the elements that it needs, and a replay of the journal draws them again.

    key           unsigned 64 bits: names a direction of a step (see `zo.keys.direction_key`)
    parameter id  unsigned 32 bits: names a parameter, whatever rank or file holds it
    element       0 to 2**40: index of an element in the full parameter, in row-major order

A law decides which numbers z has. `lezo_ds.noise.noise_backend(device, law)` returns the operations
that draw and apply them. Estimators, layer policies and the journal are the same under every law.

Two more decisions belong to a law. So far they have one answer, because there is one law:

- Which parameters z perturbs. A dense direction perturbs every trainable parameter. A direction
  that is a sum of outer products would exist for matrices only.
- How z enters the computation. The forward pass of a dense direction needs a perturbed copy of
  each weight, and `NoiseBackend.update_` rounds after each direction. A direction of thin factors
  would need no copy, since (W + mu a b^T) x = W x + mu a (b . x), and would round once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Distribution = Literal["normal", "rademacher"]
"""Standard normal numbers, or +1 and -1 with equal probability (the Rademacher distribution)."""


@dataclass(frozen=True)
class PerturbationLaw:
    """What a direction z is. Equal laws give equal bits of z. A subclass adds its parameters.

    Attributes:
        entries: the distribution of the independent random numbers that z is made of.
    """

    entries: Distribution = "normal"


@dataclass(frozen=True)
class DenseLaw(PerturbationLaw):
    """Each element of each trainable parameter has its own independent entry.

    Source: Spall 1992 (entries +1 and -1); MeZO, Malladi et al. 2023, Algorithm 1 (normal).
    """
