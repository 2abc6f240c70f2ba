"""What the server that forks ranks has imported: a rank then starts in a tenth of a second."""

from __future__ import annotations

import gc

import datasets  # noqa: F401
import deepspeed
import torch._inductor.compile_fx  # noqa: F401  (DeepSpeed's optimizers import it at their first step)
import transformers.models.opt.modeling_opt  # noqa: F401

import lezo_ds.runs.trainer  # noqa: F401

# torch computes in fp16 on any CPU, but DeepSpeed refuses those without instructions for it.
deepspeed.get_accelerator().is_fp16_supported = lambda: True
gc.collect()
gc.freeze()  # a collection in a rank would copy all memory that it shares with the server
