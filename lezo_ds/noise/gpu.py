"""The noise operations for CUDA devices, with Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.backend import NoiseBackend, pack_updates
from lezo_ds.zo.precision import UpdatePrecision
from lezo_ds.zo.updates import Update

_PRECISIONS: dict[UpdatePrecision, int] = {
    "nearest": kernels.NEAREST.value,
    "stochastic": kernels.STOCHASTIC.value,
    "fp32_master": kernels.MASTER.value,
}

# A program handles 256 blocks of 4 elements on 4 warps; no bit depends on these numbers. They are not tuned:
# no element is read twice, so a tile only sets how many programs there are. triton.autotune would time the
# update on the weights themselves, with a copy of the shard in GPU memory (restore_value), during a step.
NUM_BLOCKS = 256
NUM_WARPS = 4


class TritonNoise(NoiseBackend):
    """`NoiseBackend` on CUDA devices. Rows out of range are not caught."""

    def _normal(self, key: int, parameter_id: int, start: int, count: int, device: torch.device) -> Tensor:
        out = torch.empty(count, dtype=torch.float32, device=device)
        _launch(
            kernels.normal_kernel,
            _num_tiles(start, count),
            out_ptr=out,
            key=key,
            parameter_id=parameter_id,
            start=start,
            count=count,
            aligned=start % 4 == 0,
        )
        return out

    def _perturb(
        self,
        theta: Tensor,
        rows: Tensor | None,
        key: int,
        parameter_id: int,
        scale: float,
        outs: Sequence[Tensor],
    ) -> None:
        num_rows, width = (1, theta.numel()) if rows is None else (len(rows), theta.shape[1])
        aligned = rows is None or width % 4 == 0
        # A row that starts within a block can touch one more tile.
        tiles_per_row = _num_tiles(0 if aligned else 3, width)
        _launch(
            kernels.perturb_kernel,
            num_rows * tiles_per_row,
            theta_ptr=theta,
            rows_ptr=rows,
            plus_ptr=outs[0],
            minus_ptr=outs[1] if len(outs) > 1 else None,
            key=key,
            parameter_id=parameter_id,
            scale=scale,
            width=width,
            tiles_per_row=tiles_per_row,
            aligned=aligned,
        )

    def _update(
        self,
        shard: Tensor,
        start: int,
        parameter_id: int,
        steps: Sequence[Update],
        precision: UpdatePrecision,
        low: Tensor | None,
    ) -> None:
        updates = _on_device(pack_updates(steps).tobytes(), shard.device)
        _launch(
            kernels.update_kernel,
            _num_tiles(start, shard.numel()),
            shard_ptr=shard,
            low_ptr=low,
            keys_ptr=updates.view(torch.uint64),
            multipliers_ptr=updates.view(torch.float32),
            num_steps=len(steps),
            parameter_id=parameter_id,
            start=start,
            count=shard.numel(),
            precision=_PRECISIONS["nearest" if shard.dtype == torch.float32 else precision],
            aligned=start % 4 == 0,
        )


# Most parameters of a step have the same updates, so one copy to the GPU serves them all. Pinned memory and
# non_blocking let the host go on before the copy is done.
@functools.lru_cache(maxsize=4)
def _on_device(updates: bytes, device: torch.device) -> Tensor:
    """Return packed updates on a device: int64 [2 n]."""
    values = torch.frombuffer(bytearray(updates), dtype=torch.int64)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _num_tiles(start: int, num_elements: int) -> int:
    """Return how many tiles cover the elements [start, start + num_elements)."""
    return -(-(start % 4 + num_elements) // (4 * NUM_BLOCKS)) if num_elements else 0


def _launch(kernel: Any, num_programs: int, **arguments: Any) -> None:  # noqa: ANN401
    """Run a kernel on the device of its first argument."""
    if num_programs == 0:
        return
    first: Tensor = next(iter(arguments.values()))
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        # enable_fp_fusion=False: a fused multiply-add rounds once where the other backends round twice.
        kernel[(num_programs,)](
            **arguments, num_blocks=NUM_BLOCKS, num_warps=NUM_WARPS, enable_fp_fusion=False
        )
