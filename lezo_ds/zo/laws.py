"""Perturbation laws: what a direction z is.

A probe measures the loss at theta + scale * z, and an update subtracts coefficient * z from theta. No z is
ever stored or sent: z = z(key, parameter id, element) is a pure function of three integers, so every rank
draws the elements that it needs, and a replay of the journal draws them again.

    key           unsigned 64 bits: names a direction of a step (see `zo.keys.direction_key`)
    parameter id  unsigned 32 bits: names a parameter of the model, whatever rank or file holds it
    element       0 to 2**40: the index of an element in the full parameter, counted in row-major order

A law decides the numbers that z has. `lezo_ds.noise.noise_backend(device, law)` returns the operations that
draw and apply them; all else (estimators, layer policies, the journal) is the same under every law.

Two more decisions belong to a law, although the only law so far makes them for all parameters alike:

- Which parameters z perturbs. A dense direction perturbs every trainable parameter. A direction that is a sum
  of outer products exists for matrices only.
- How z enters the computation. The forward pass of a dense direction needs a perturbed copy of each weight,
  and each of its updates is rounded to storage on its own, in order. A direction of thin factors needs no
  copy: (W + mu a b^T) x = W x + mu a (b . x). Its update sums all directions of a step and rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Distribution = Literal["normal", "rademacher"]
"""Standard normal numbers, or +1 and -1 with equal probability (the Rademacher distribution)."""


@dataclass(frozen=True)
class PerturbationLaw:
    """What a direction z is. Equal laws give equal bits of z. Subclasses add their parameters.

    Attributes:
        entries: the distribution of the independent random numbers that z is made of.
    """

    entries: Distribution = "normal"


@dataclass(frozen=True)
class DenseLaw(PerturbationLaw):
    """Each element of each trainable parameter has its own independent entry (MeZO, LeZO, FZOO).

    Source: Spall 1992 (+1 and -1); MeZO, Malladi et al. 2023, Algorithm 1 (normal).
    """
