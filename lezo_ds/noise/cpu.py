"""The noise operations for CPUs: C++ that is compiled once per machine and called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from lezo_ds.noise import NoiseBackend, UpdateTarget, Weight, pack_updates
from lezo_ds.zo.laws import Distribution, PerturbationLaw
from lezo_ds.zo.updates import Update, UpdatePrecision

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
# -ffp-contract=off: a fused multiply-add rounds once where the other backends round twice.
# -fno-trapping-math: lets GCC turn selections into SIMD code; unlike -ffast-math it changes no result.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]
FLAGS += ["-shared", "-fPIC", "-pthread"]

# In the order of the enumerations and of the C functions' parameters in cpu_kernels.cpp.
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)
_DISTRIBUTIONS = get_args(Distribution)
_PRECISIONS = get_args(UpdatePrecision)
_PTR, _I32, _I64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_U32, _U64, _F32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float
_ROWS = (_I64, _I64, _I64, _I64)
_PERTURB = (_PTR, _I32, _PTR, _PTR, _I32, _PTR, *_ROWS, _U64, _U32, _F32, _I32, _I32)
_UPDATE = (_PTR, _I32, _PTR, _I32, _I32, *_ROWS, _U32, _PTR, _I64, _I32)


class CpuNoise(NoiseBackend):
    """Works on `torch.get_num_threads()` threads; their number changes no bit."""

    def __init__(self, law: PerturbationLaw) -> None:
        """Raise OSError or RuntimeError if the kernels cannot be built or loaded here."""
        super().__init__(law)
        self._distribution = _DISTRIBUTIONS.index(law.entries)
        self._kernels = ctypes.CDLL(str(_built_library()))
        self._kernels.lezo_perturb.argtypes = _PERTURB
        self._kernels.lezo_update.argtypes = _UPDATE

    def _perturb(
        self,
        weights: Sequence[Weight],
        key: int,
        scale: float,
        num_signs: int,
    ) -> list[list[Tensor]]:
        copies = []
        for theta, parameter_id, out_dtype, rows, region in weights:
            theta, shape, row_pointer = theta.contiguous(), theta.shape, None
            num_rows, width, stride = region.rows(theta.numel())
            if rows is not None:
                rows, num_rows, width = rows.contiguous(), len(rows), theta.shape[1]
                shape, row_pointer, stride = torch.Size((num_rows, width)), rows.data_ptr(), width
                if num_rows and not (int(rows.min()) >= 0 and int(rows.max()) < len(theta)):
                    raise ValueError(f"rows must lie in [0, {len(theta)})")
            outs = [torch.empty(shape, dtype=out_dtype) for _ in range(num_signs)]
            source = theta.data_ptr(), _FORMATS.index(theta.dtype)
            minus = outs[1].data_ptr() if num_signs == 2 else None
            target = outs[0].data_ptr(), minus, _FORMATS.index(out_dtype)
            elements = row_pointer, num_rows, width, stride, region.start
            noise = key, parameter_id, scale, self._distribution
            self._kernels.lezo_perturb(*source, *target, *elements, *noise, torch.get_num_threads())
            copies.append(outs)
        return copies

    def update_(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        packed = pack_updates(updates)
        codes = _PRECISIONS.index(precision), self._distribution
        for values, region, parameter_id, low in targets:
            low_pointer = None if low is None else low.data_ptr()
            stored = values.data_ptr(), _FORMATS.index(values.dtype), low_pointer
            elements = *region.rows(values.numel()), region.start, parameter_id
            changes = packed.ctypes.data, len(packed)
            self._kernels.lezo_update(*stored, *codes, *elements, *changes, torch.get_num_threads())


def _built_library() -> Path:
    """Return the path of the shared library in the user's cache; build it first if it is missing."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++ or c++) on the PATH")
    # What the compiler says of itself and of this processor, for which it compiles.
    command = [compiler, *FLAGS, "-E", "-v", "-x", "c++", os.devnull]
    target = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    identity = hashlib.sha256("\0".join([SOURCE.read_text(), *FLAGS, target]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lezo_ds"
    library = cache / f"noise-{identity[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    logging.getLogger(__name__).info(
        "compiling the noise kernels (a few seconds, once): %s", library
    )
    # Several ranks may build at once, so each builds in its own folder; the last rename wins.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        output = Path(folder) / library.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
        output.replace(library)
    return library
