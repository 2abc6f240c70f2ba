"""A perturbation law as a user writes one, in a file of their own."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lezo_ds.forward.low_rank import LowRankDirections
from lezo_ds.zo.laws import LowRankLaw


@dataclass(frozen=True)
class EqualRows(LowRankLaw):
    """All rows of z are equal: z[i, j] = b_1[j] with the numbers of `LowRankLaw`."""

    implementation: ClassVar[str] = "own_law:EqualRowsDirections"


class EqualRowsDirections(LowRankDirections):
    def vectors(self, elements, keys, device):
        a, b = super().vectors(elements, keys, device)
        return torch.ones_like(a), b
