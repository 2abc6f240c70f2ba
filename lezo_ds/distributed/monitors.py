"""DeepSpeed's monitors, apart from its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster


def open_monitors(ds_config: Mapping[str, Any]) -> MonitorMaster:
    """Return what writes to the monitors of a DeepSpeed JSON. Only rank 0 writes."""
    return MonitorMaster(get_monitor_config(dict(ds_config)))
