"""Parameter-efficient fine-tuning: adapters by the value of peft.kind. All other parameters freeze.

A parameter of an adapter has three names:

    in the module tree   ...q_proj.lora_A.default.weight   an adapter may wrap modules
    its own name         ...q_proj.lora_A.weight           noise, journal and messages use it
    in a snapshot        base_model.model. + its own name  `stored_prefix`, as peft's files have it
"""

from __future__ import annotations

from lezo_ds.config import PeftConfig
from lezo_ds.forward.adapters.lora import LoraAdapter
from lezo_ds.forward.adapters.prefix import PrefixAdapter, load_prefix

__all__ = ["Adapter", "load_prefix", "make_adapter"]

Adapter = LoraAdapter | PrefixAdapter
"""Both have `attach`, `hide`, `own_name`, `fill` and `write_config`, which run in this order."""


def make_adapter(config: PeftConfig | None) -> Adapter | None:
    """Return the adapter of a configuration, or None if all weights are trained."""
    if config is None or config.kind == "none":
        return None
    if config.kind == "lora":
        return LoraAdapter(config.lora_rank, config.lora_alpha, config.lora_targets)
    return PrefixAdapter(config.prefix_length)
