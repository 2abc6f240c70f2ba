"""What the server that forks ranks has imported: a rank then starts in a tenth of a second."""

# ruff: noqa: F401 (a module that a rank would import is imported here)

import gc

import datasets
import deepspeed
import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops.op_builder.all_ops
import tiny_adapters
import torch._inductor.compile_fx  # DeepSpeed's optimizers import it at their first step
import torch.utils.cpp_extension
import transformers.models.opt.modeling_opt
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import lezo_ds.cli
import lezo_ds.forward.dense
import lezo_ds.forward.low_rank
import lezo_ds.noise.cpu
import lezo_ds.runs.trainer

get_checkpoint_conversion_mapping("opt")  # makes those of all models
# torch computes in fp16 on any CPU, but DeepSpeed refuses those without instructions for it.
deepspeed.get_accelerator().is_fp16_supported = lambda: True
gc.collect()
gc.freeze()  # a collection in a rank would copy all memory that it shares with the server
