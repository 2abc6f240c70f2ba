"""Counts of what a step asks of the host."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

NO_KERNELS = ("_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty")


class Operators(TorchDispatchMode):
    """Counts the operators that launch a kernel on a GPU: no views, and none that only allocate memory."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.overloadpacket.__name__ not in NO_KERNELS:
            self.count += 1
        return func(*args, **(kwargs or {}))
