"""Bits: noise against plain PyTorch on the CPU, norms against float64, and the engine against itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from lezo_ds.config import ZoConfig
from lezo_ds.engine.lezo_engine import LezoEngine
from lezo_ds.forward.perturbed_norm import norm_at_probes
from lezo_ds.noise import NoiseBackend, Shard, Whole, noise_backend
from lezo_ds.noise.eager import EagerNoise
from lezo_ds.noise.precision import STORAGE_DTYPES
from lezo_ds.tools.benchmark.random_inputs import RandomInputs, fill_with_random_weights
from lezo_ds.tools.benchmark.settings import Setting, Variant
from lezo_ds.tools.gpu_check.rows import Row
from lezo_ds.zo.distributions import Distribution
from lezo_ds.zo.precision import UpdatePrecision
from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.updates import Update

_KEY, _PARAMETER = 0x0123456789ABCDEF, 0xDEADBEEF
_SIZES = (1, 127, 4099, 1 << 20)
_STARTS = (0, 5, 1 << 33)
_SCALES = (1e-3, -1e-3, 2e-3, 0.0)
_STEPS = tuple(Update(_KEY + step, 0.01 * (step + 1), 1 - 1e-3 * step) for step in range(3))
_NUM_STEPS, _RESUMED_AT = 4, 2
_NORM_WIDTH = 5120
_MOST_UNITS = 0.51  # half a unit for the last rounding, and a little for those of float32


def noise_rows(device: torch.device) -> list[Row]:
    """Compare each operation of the device's noise backend with plain PyTorch on the CPU, bit for bit."""
    rows = []
    for distribution, (name, run) in product(get_args(Distribution), _OPERATIONS.items()):
        theirs = list(run(EagerNoise(), torch.device("cpu"), distribution))
        ours = list(run(noise_backend(device), device, distribution))
        num_equal = sum(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
        found = f"{num_equal} of {len(theirs)} results equal"
        rows.append(Row("noise", f"{name}, {distribution}", found, num_equal == len(theirs)))
    return rows


def norm_rows(device: torch.device) -> list[Row]:
    """Compare the fused LayerNorm of GPUs with float64, which is rounded once."""
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        module = nn.LayerNorm(_NORM_WIDTH).to(device, dtype)
        copies = {
            name: [_theta(_NORM_WIDTH, torch.float32, device) + probe for probe in (1, 2)]
            for name in ("weight", "bias")
        }
        batch = (100 * _theta(8 * _NORM_WIDTH, dtype, device)).view(8, _NORM_WIDTH)
        found = norm_at_probes(module, copies, batch, 2)
        exact = []
        for probe, share in enumerate(batch.chunk(2)):
            weight, bias = (vectors[probe].double() for vectors in copies.values())
            exact.append(functional.layer_norm(share.double(), (_NORM_WIDTH,), weight, bias, module.eps))
        expected = torch.cat(exact)
        unit = torch.finfo(dtype).eps
        error = float(((found - expected).abs() / (expected.abs() + unit)).max()) / unit
        text = f"at most {error:.2f} units in the last place from float64"
        rows.append(Row("norm", f"LayerNorm at two probes, {dtype}", text, error < _MOST_UNITS))
    return rows


def _draws(noise: NoiseBackend, device: torch.device, distribution: Distribution) -> Iterator[Tensor]:
    for start, size in product(_STARTS, _SIZES):
        yield noise.draw(_KEY, _PARAMETER, start, size, device, distribution)


def _perturbed(noise: NoiseBackend, device: torch.device, distribution: Distribution) -> Iterator[Tensor]:
    for dtype, size in product(STORAGE_DTYPES, _SIZES):
        yield from noise.perturb(
            _theta(size, dtype, device), _KEY, _PARAMETER, _SCALES, distribution=distribution
        )


def _perturbed_at_once(
    noise: NoiseBackend, device: torch.device, distribution: Distribution
) -> Iterator[Tensor]:
    wholes = [
        Whole(_theta(size, dtype, device), _PARAMETER + place, torch.float32 if place % 2 else dtype)
        for place, (dtype, size) in enumerate(product(STORAGE_DTYPES, _SIZES))
    ]
    for copies in noise.perturb_all(wholes, _KEY, _SCALES, distribution):
        yield from copies


def _rows_perturbed(
    noise: NoiseBackend, device: torch.device, distribution: Distribution
) -> Iterator[Tensor]:
    for dtype, width in product(STORAGE_DTYPES, (7, 128)):
        table = _theta(50 * width, dtype, device).view(50, width)
        rows = torch.tensor([3, 0, 49, 3], device=device)
        yield from noise.perturb_rows(table, rows, _KEY, _PARAMETER, _SCALES, distribution=distribution)


def _updated(noise: NoiseBackend, device: torch.device, distribution: Distribution) -> Iterator[Tensor]:
    for dtype, precision, start in product(STORAGE_DTYPES, get_args(UpdatePrecision), _STARTS):
        yield from _updated_shards(
            noise, [_shard(4099, dtype, precision, start, device)], precision, distribution
        )


def _updated_at_once(
    noise: NoiseBackend, device: torch.device, distribution: Distribution
) -> Iterator[Tensor]:
    for precision in get_args(UpdatePrecision):
        shards = [
            _shard(size, dtype, precision, start, device)
            for dtype, start, size in product(STORAGE_DTYPES, _STARTS, _SIZES[:-1])
        ]
        yield from _updated_shards(noise, shards, precision, distribution)


def _updated_shards(
    noise: NoiseBackend, shards: Sequence[Shard], precision: UpdatePrecision, distribution: Distribution
) -> Iterator[Tensor]:
    noise.update_all_(shards, _STEPS, precision, distribution)
    for shard in shards:
        yield shard.values
        if shard.low is not None:
            yield shard.low


def _shard(
    size: int, dtype: torch.dtype, precision: UpdatePrecision, start: int, device: torch.device
) -> Shard:
    low = None
    if precision == "fp32_master" and dtype != torch.float32:
        low = (torch.arange(size) * 7 % 65536 - 32768).to(torch.int16).to(device)
    return Shard(_theta(size, dtype, device), start, _PARAMETER, low)


_OPERATIONS: dict[str, Callable[[NoiseBackend, torch.device, Distribution], Iterator[Tensor]]] = {
    "draw": _draws,
    "perturb": _perturbed,
    "perturb at once": _perturbed_at_once,
    "perturb rows": _rows_perturbed,
    "update": _updated,
    "update at once": _updated_at_once,
}


def _theta(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.arange(size, dtype=torch.float64).mul_(0.37).sin_() * 0.05).to(dtype).to(device)


def engine_rows(setting: Setting) -> list[Row]:
    """Compare runs of a few steps of our engine with each other, bit for bit. A collective."""
    inputs = RandomInputs(setting)
    engine = inputs.start_engine()
    base = replace(inputs.zo_config(Variant.parse("ours:0.5:2:2")), learning_rate=1e-4)
    first = _Run(engine, inputs, base)
    cases = {
        "the same run again": _Run(engine, inputs, base),
        "4 probes in a pass instead of 2": _Run(engine, inputs, replace(base, probes_per_pass=4)),
        f"resumed at step {_RESUMED_AT}": _Run(engine, inputs, base, first.records[:_RESUMED_AT]),
        "replayed from its records": _Run(engine, inputs, base, first.records),
    }
    rows = []
    for name, run in cases.items():
        same_losses, same_weights = run.records == first.records, run.digest == first.digest
        found = f"losses {_same(same_losses)}, weights {_same(same_weights)}"
        rows.append(Row("engine", f"{setting.dtype}, {name}", found, same_losses and same_weights))
    return rows


class _Run:
    """A run of `_NUM_STEPS` steps from the same weights, of which the first may be replayed.

    Attributes:
        records: of all steps.
        digest: of the weights after them.
    """

    def __init__(
        self,
        engine: LezoEngine,
        inputs: RandomInputs,
        config: ZoConfig,
        replayed: tuple[StepRecord, ...] = (),
    ) -> None:
        run = engine.with_config(config)
        fill_with_random_weights(run)
        run.load_checkpoint(Path("no snapshots"), replayed)
        steps = range(len(replayed), _NUM_STEPS)
        self.records = (*replayed, *(run.train_batch(inputs.batches(step), inputs.loss) for step in steps))
        self.digest = run.weights.digest()


def _same(is_same: bool) -> str:
    return "equal" if is_same else "NOT EQUAL"
