"""Parameter-efficient fine-tuning: a few new parameters in each block, all others frozen."""

from __future__ import annotations

from lezo_ds.config import PeftConfig
from lezo_ds.model.adapters.base import Adapter
from lezo_ds.model.adapters.lora import LoraAdapter
from lezo_ds.model.adapters.prefix import PrefixAdapter, load_prefix

__all__ = ["Adapter", "load_prefix", "make_adapter"]


def make_adapter(config: PeftConfig | None) -> Adapter | None:
    """Return the adapter that a configuration asks for, None if all weights are to be trained."""
    if config is None or config.kind == "none":
        return None
    return LoraAdapter(config) if config.kind == "lora" else PrefixAdapter(config.prefix_length)
