"""The distribution of a direction's elements; lezo_ds.noise draws them."""

from __future__ import annotations

from typing import Literal

Distribution = Literal["normal", "rademacher"]
"""Standard normal numbers, or +1 and -1 with equal probability (the Rademacher distribution)."""
