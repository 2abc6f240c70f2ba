"""launch/train.py whose ranks miss each other after seconds instead of minutes."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from lezo_ds.distributed import heartbeat

if __name__ == "__main__":
    heartbeat.LIMIT_SECONDS = float(os.environ.get("LIMIT_SECONDS", "6"))
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "launch" / "train.py"), run_name="__main__")
