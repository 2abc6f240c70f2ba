"""The same blocks in every step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lezo_ds.zo.layers.base import LayerPolicy, LayerSample
from lezo_ds.zo.options import check_option
from lezo_ds.zo.records import StepRecord

_KEY = "zo.layer_policy_options.blocks"


@dataclass(frozen=True)
class Fixed(LayerPolicy):
    """Perturbs the same blocks in every step and drops all others.

    Attributes:
        blocks: the blocks that are perturbed, from 0: numbers and ranges with commas between them, such as
            "0, 8-11". Empty stands for the last blocks. A text of one number needs quotes, or is a range.

    Raises:
        UserError: `blocks` is not of this form, names a block twice or one that the model does not have, or
            does not name as many as a step perturbs.
    """

    blocks: str = ""
    bias: ClassVar[str] = "only the blocks of the set are updated"

    def __post_init__(self) -> None:
        super().__post_init__()
        kept = self._kept()
        valid = kept is not None and set(kept) <= set(range(self.num_layers)) and len(set(kept)) == len(kept)
        check_option(
            _KEY,
            self.blocks,
            valid,
            expected=f'different blocks from 0 to {self.num_layers - 1}, such as "0, 2-3"',
            fix="leave it out for the last blocks",
        )
        assert kept is not None
        check_option(
            _KEY,
            self.blocks,
            len(kept) == self.num_kept,
            expected=f"{self.num_kept} blocks, because {self.num_dropped} of {self.num_layers} are dropped",
            fix=f"set zo.sparsity={1 - len(kept) / self.num_layers:.4g}",
        )

    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the sample of the next step."""
        kept = set(self._kept() or ())
        return LayerSample(dropped=tuple(layer for layer in range(self.num_layers) if layer not in kept))

    def _kept(self) -> list[int] | None:
        """Return the blocks that are perturbed; None if the option cannot be read."""
        if not self.blocks.strip():
            return list(range(self.num_dropped, self.num_layers))
        found: list[int] = []
        for part in self.blocks.split(","):
            match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                return None
            found += range(int(match[1]), int(match[2] or match[1]) + 1)
        return found
