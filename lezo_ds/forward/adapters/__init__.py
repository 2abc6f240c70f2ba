"""Parameter-efficient fine-tuning: adapters by the value of peft.kind. All other parameters are frozen.

An adapter's parameter has three names: that in the module tree, where an adapter may wrap modules; `own_name`
of it, which noise, journal and messages use; and `stored_prefix` + its own name, which snapshots use.
"""

from __future__ import annotations

from lezo_ds.config import PeftConfig
from lezo_ds.forward.adapters.lora import LoraAdapter
from lezo_ds.forward.adapters.prefix import PrefixAdapter, load_prefix

__all__ = ["Adapter", "load_prefix", "make_adapter"]

Adapter = LoraAdapter | PrefixAdapter


def make_adapter(config: PeftConfig | None) -> Adapter | None:
    """Return the adapter of a configuration, or None if all weights are trained."""
    if config is None or config.kind == "none":
        return None
    if config.kind == "lora":
        return LoraAdapter(config.lora_rank, config.lora_alpha, config.lora_targets)
    return PrefixAdapter(config.prefix_length)
