"""Perturbation laws: what a direction z is.

A probe measures the loss at theta + scale * z, and an update subtracts coefficient * z from theta.
No z is ever stored or sent: z = z(key, parameter id, element) is a pure function of three integers,
so every rank draws the elements that it needs, and a replay of the journal draws them again.

    key           unsigned 64 bits: names a direction of a step (see `zo.keys.direction_key`)
    parameter id  unsigned 32 bits: names a parameter, whatever rank or file holds it
    element       0 to 2**40: index of an element in the full parameter, in row-major order

A law decides which numbers z has, and what it perturbs. Estimators, layer policies and the journal
are the same under every law.

                     DenseLaw                             LowRankLaw
    z perturbs       every trainable parameter            matrices of the transformer blocks
    a forward pass   copies each weight for each probe    adds thin products: nothing is copied
    an update        rounds after each direction          rounds once a step

A law is light: it is part of a configuration. Its `implementation` is a subclass of
`lezo_ds.forward.directions.Directions`, which draws z and applies it. To add a law: a file with
both and a line at the end, or `zo.law: package.module:Name`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lezo_ds.errors import UserError
from lezo_ds.registry import Registry

Distribution = Literal["normal", "rademacher"]
"""Standard normal numbers, or +1 and -1 with equal probability (the Rademacher distribution)."""

TrainedPart = Literal["all", "blocks", "products"]
"""The part of a model, or of its adapter, that is perturbed and updated: all of it, what is in the
transformer blocks, or the matrices of linear modules in the blocks."""


@dataclass(frozen=True)
class PerturbationLaw:
    """What a direction z is. Equal laws give equal bits of z. A subclass adds its parameters.

    Attributes:
        entries: the distribution of the independent random numbers that z is made of.
        rank: r of directions of low rank, at least 1; 0 for others.
        implementation: `package.module:Name` of its `Directions`.
        perturbs: the part of a model that z perturbs. A run may perturb less.
        takes_groups: whether groups of a pass's examples may have directions of their own.
        most_probes: most probes of a forward pass by default.
    """

    entries: Distribution = "normal"
    rank: int = 0
    implementation: ClassVar[str]
    perturbs: ClassVar[TrainedPart] = "all"
    takes_groups: ClassVar[bool] = False
    most_probes: ClassVar[int] = 2  # both signs of a direction


@dataclass(frozen=True)
class DenseLaw(PerturbationLaw):
    """Each element of each trainable parameter has its own independent entry.

    Source: Spall 1992 (entries +1 and -1); MeZO, Malladi et al. 2023, Algorithm 1 (normal).
    """

    implementation: ClassVar[str] = "lezo_ds.forward.dense:DenseDirections"

    def __post_init__(self) -> None:
        if self.rank > 0:
            raise UserError(
                f"zo.law=dense has no rank, and zo.noise_rank={self.rank}",
                fix="remove one of them",
            )


@dataclass(frozen=True)
class LowRankLaw(PerturbationLaw):
    """z of a matrix [m, n] is a sum of outer products: z = rank^-1/2 (a_1 b_1^T + ... + a_r b_r^T).

    Its entries are a_s[i] = entry s * m + i and b_s[j] = entry 2**39 + s * n + j of the parameter,
    with s from 0. Each element of z has mean 0 and variance 1, as under `DenseLaw`.

    All rows of a batch share one product with W, whatever direction each row has:

        (W + mu z) x = W x + mu rank^-1/2 (a_1 (b_1 . x) + ... + a_r (b_r . x))

    Source: EGGROLL (Sarkar et al. 2025, arXiv 2511.16652), with rank 1.
    """

    rank: int = 1
    implementation: ClassVar[str] = "lezo_ds.forward.low_rank:LowRankDirections"
    perturbs: ClassVar[TrainedPart] = "products"
    takes_groups: ClassVar[bool] = True
    most_probes: ClassVar[int] = 32  # activations limit their number, as no weight is copied

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(
                f"{type(self).__name__} needs a rank, and zo.noise_rank={self.rank}",
                fix="set zo.noise_rank=1",
            )


FIRST_OF_COLUMNS = 2**39
"""The entry of a parameter that is the first of b_1. A matrix has fewer than 2**39 / rank rows."""

LAWS: Registry[type[PerturbationLaw]] = Registry("law", "zo.law", kind=PerturbationLaw)
LAWS.add("dense", DenseLaw)
LAWS.add("low-rank", LowRankLaw)
