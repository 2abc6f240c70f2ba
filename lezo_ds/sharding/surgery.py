"""What both ways of sharding change in a model and in DeepSpeed's engine.

docs/deepspeed.md lists the facts about DeepSpeed that this relies on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
from torch import nn

from lezo_ds.distributed import device
from lezo_ds.sharding.quantization import quantization_of


def put_parameters(model: nn.Module, replacements: Mapping[nn.Parameter, Any]) -> None:
    """Replace all parameters of a model, tied ones too; move its buffers to this rank's device."""
    for old, new in replacements.items():
        quantization = quantization_of(old)
        if quantization is not None:
            new.quantization = quantization
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replacements[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device())


def start_engine(model: nn.Module, ds_config: Mapping[str, Any]) -> Any:
    """Return an engine of DeepSpeed that runs a model in eval mode, without the engine's own hooks.

    They start timers that only a training engine reads, and let sharded parameters gather
    themselves.
    """
    engine, *_ = deepspeed.initialize(model=model, config=dict(ds_config))
    engine.eval()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    engine.forward = model.__call__
    return engine
