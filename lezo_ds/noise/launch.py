"""Launches of Triton kernels, to be run again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Launch:
    """A kernel with the number of its programs and its last arguments, which are the same in all runs.

    Triton looks at all arguments to find the kernel that is compiled for them, which takes longer than the
    launch. It looks at the types, and at which addresses and integers are multiples of 16, unless a kernel
    says `do_not_specialize`. Runs of one launch must not differ in these, so only the first looks.
    """

    def __init__(
        self,
        kernel: Any,  # noqa: ANN401
        num_programs: int,
        constants: Mapping[str, Any],
        num_warps: int = 4,
    ) -> None:
        self._kernel = kernel
        self._grid = (num_programs, 1, 1)
        self._constants = [constants[name] for name in kernel.arg_names[-len(constants) :]]
        self._num_warps = num_warps
        self._compiled: Any = None

    def run(self, first: Tensor, *others: object) -> None:
        """Run the kernel on its arguments before the constants, on the device of the first."""
        if self._grid[0] == 0:
            return
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            if self._compiled is not None:
                self._compiled[self._grid](first, *others, *self._constants)
                return
            # enable_fp_fusion=False: a fused multiply-add rounds once where the other backends round twice.
            # Triton's interpreter returns None.
            self._compiled = self._kernel[self._grid](
                first, *others, *self._constants, num_warps=self._num_warps, enable_fp_fusion=False
            )
