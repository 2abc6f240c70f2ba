"""The noise operations for CUDA devices, with Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.backend import NoiseBackend, pack_updates
from lezo_ds.zo.distributions import Distribution
from lezo_ds.zo.precision import UpdatePrecision
from lezo_ds.zo.updates import Update

_DISTRIBUTIONS: dict[Distribution, int] = {
    "normal": kernels.NORMAL.value,
    "rademacher": kernels.RADEMACHER.value,
}
_PRECISIONS: dict[UpdatePrecision, int] = {
    "nearest": kernels.NEAREST.value,
    "stochastic": kernels.STOCHASTIC.value,
    "fp32_master": kernels.MASTER.value,
}


class Tile(NamedTuple):
    """The share of one program on `NUM_WARPS` warps.

    Attributes:
        num_blocks: number of blocks, a power of two.
        per_block: number of elements of a block, which the distribution gives.
    """

    num_blocks: int
    per_block: int

    def number(self, start: int, num_elements: int) -> int:
        """Return how many tiles cover the elements [start, start + num_elements)."""
        covered = start % self.per_block + num_elements
        return -(-covered // (self.per_block * self.num_blocks)) if num_elements else 0


# No bit depends on the numbers of blocks and warps. They are not tuned: no element is read twice, so a tile
# only sets how many programs there are. triton.autotune would time the update on the weights themselves, with
# a copy of the shard in GPU memory (restore_value), during a step.
TILES: dict[Distribution, Tile] = {"normal": Tile(512, per_block=4), "rademacher": Tile(32, per_block=128)}
NUM_WARPS = 4


class TritonNoise(NoiseBackend):
    """`NoiseBackend` on CUDA devices. Rows out of range are not caught."""

    def _draw(
        self,
        distribution: Distribution,
        key: int,
        parameter_id: int,
        start: int,
        count: int,
        device: torch.device,
    ) -> Tensor:
        out = torch.empty(count, dtype=torch.float32, device=device)
        _launch(
            kernels.draw_kernel,
            distribution,
            TILES[distribution].number(start, count),
            out_ptr=out,
            key=key,
            parameter_id=parameter_id,
            start=start,
            count=count,
            aligned=start % TILES[distribution].per_block == 0,
        )
        return out

    def _perturb(
        self,
        distribution: Distribution,
        theta: Tensor,
        rows: Tensor | None,
        key: int,
        parameter_id: int,
        scale: float,
        outs: Sequence[Tensor],
    ) -> None:
        num_rows, width = (1, theta.numel()) if rows is None else (len(rows), theta.shape[1])
        tile = TILES[distribution]
        aligned = rows is None or width % tile.per_block == 0
        # A row that starts within a block can touch one more tile.
        tiles_per_row = tile.number(0 if aligned else tile.per_block - 1, width)
        _launch(
            kernels.perturb_kernel,
            distribution,
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
        distribution: Distribution,
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
            distribution,
            TILES[distribution].number(start, shard.numel()),
            shard_ptr=shard,
            low_ptr=low,
            keys_ptr=updates.view(torch.uint64),
            multipliers_ptr=updates.view(torch.float32),
            num_steps=len(steps),
            parameter_id=parameter_id,
            start=start,
            count=shard.numel(),
            precision=_PRECISIONS["nearest" if shard.dtype == torch.float32 else precision],
            aligned=start % TILES[distribution].per_block == 0,
        )


# Most parameters of a step have the same updates, so one copy to the GPU serves them all. Pinned memory and
# non_blocking let the host go on before the copy is done.
@functools.lru_cache(maxsize=4)
def _on_device(updates: bytes, device: torch.device) -> Tensor:
    """Return packed updates on a device: int64 [2 n]."""
    values = torch.frombuffer(bytearray(updates), dtype=torch.int64)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _launch(kernel: Any, distribution: Distribution, num_programs: int, **arguments: Any) -> None:  # noqa: ANN401
    """Run a kernel on the device of its first argument."""
    if num_programs == 0:
        return
    first: Tensor = next(iter(arguments.values()))
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        # enable_fp_fusion=False: a fused multiply-add rounds once where the other backends round twice.
        kernel[(num_programs,)](
            **arguments,
            distribution=_DISTRIBUTIONS[distribution],
            **TILES[distribution]._asdict(),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
