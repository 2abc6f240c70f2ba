"""A program of launch/ whose ranks miss each other after seconds instead of minutes."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from lezo_ds.distributed import heartbeat

if __name__ == "__main__":
    heartbeat.LIMIT_SECONDS = float(os.environ.get("LIMIT_SECONDS", "6"))
    heartbeat._JOINING_SECONDS = heartbeat._NOTICE_SECONDS = 2.0
    program = Path(__file__).resolve().parents[2] / "launch" / os.environ.get("PROGRAM", "train.py")
    runpy.run_path(str(program), run_name="__main__")
