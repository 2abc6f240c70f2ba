"""Memory of this process, in bytes, as Linux counts it."""

from pathlib import Path

import pytest

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")

needs_peak = pytest.mark.skipif(
    not _CLEAR.exists(), reason="the peak of a process can be reset on Linux only"
)


def forget_peak():
    """Begin a new peak, and return what is in memory now."""
    _CLEAR.write_text("5")
    return _bytes("VmRSS")


def peak_memory():
    """Return the most since `forget_peak`."""
    return _bytes("VmHWM")


def _bytes(field):
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
