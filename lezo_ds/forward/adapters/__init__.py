"""Parameter-efficient fine-tuning: adapters by name. All other parameters of the model are frozen.

To add an adapter: a file with a subclass of `Adapter`, a line here, and its name in `PeftKind` of
lezo_ds.config.schema. The config has a list of its own, because importing it must not load torch.
"""

from __future__ import annotations

from collections.abc import Callable

from lezo_ds.config import PeftConfig
from lezo_ds.forward.adapters.base import Adapter
from lezo_ds.forward.adapters.lora import LoraAdapter
from lezo_ds.forward.adapters.prefix import PrefixAdapter, load_prefix
from lezo_ds.registry import Registry

__all__ = ["ADAPTERS", "Adapter", "load_prefix", "make_adapter"]

ADAPTERS: Registry[Callable[[PeftConfig], Adapter]] = Registry("adapter", "peft.kind")
ADAPTERS.add("lora", LoraAdapter)
ADAPTERS.add("prefix", lambda config: PrefixAdapter(config.prefix_length))


def make_adapter(config: PeftConfig | None) -> Adapter | None:
    """Return the adapter of a configuration, or None if all weights are trained."""
    if config is None or config.kind == "none":
        return None
    return ADAPTERS.find(config.kind)(config)
