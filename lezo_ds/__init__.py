"""Layer-wise sparse zeroth-order fine-tuning (LeZO, MeZO) on DeepSpeed ZeRO-3."""

import os

__version__ = "0.2.0"

# Huge pages for large CPU tensors: small pages cost a fifth of a step. torch reads this at its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
