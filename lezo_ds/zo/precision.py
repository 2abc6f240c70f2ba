"""How an update is stored in 16-bit weights; lezo_ds.noise.precision does it."""

from __future__ import annotations

from typing import Literal

UpdatePrecision = Literal["stochastic", "fp32_master", "nearest"]
"""fp32_master keeps the 16 low bits too; the others round: at random without bias, or to nearest."""
