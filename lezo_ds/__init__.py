"""Layer-wise sparse zeroth-order fine-tuning (LeZO, MeZO) on DeepSpeed ZeRO-3."""

import os

# Huge pages for large CPU tensors: small ones cost a fifth of a step. torch reads it at its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
