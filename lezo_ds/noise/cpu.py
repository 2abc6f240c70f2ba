"""The noise operations for CPUs: C++ that is compiled once per machine and called through ctypes.

The library lies in the user's cache under a name that is a hash of its source, its flags, and what
the compiler says of itself and of this processor. A new version of any of them is another file.

A call passes the address of one structure, which has the fields of its namesake in cpu_kernels.cpp.
Memory belongs to PyTorch, and the kernels never keep an address.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lezo_ds.noise import NoiseBackend, UpdateTarget, Weight, pack_updates
from lezo_ds.zo.laws import Distribution, PerturbationLaw
from lezo_ds.zo.updates import Update, UpdatePrecision

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-march=native",
    # A fused multiply-add rounds once where the other backends round twice.
    "-ffp-contract=off",
    "-fno-math-errno",
    # Lets GCC turn selections into SIMD code; unlike -ffast-math, it changes no result.
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
]

# The enumerations of cpu_kernels.cpp.
DISTRIBUTIONS: dict[Distribution, int] = {"normal": 0, "rademacher": 1}
PRECISIONS: dict[UpdatePrecision, int] = {"stochastic": 0, "fp32_master": 1}
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Call(ctypes.Structure):
    """The elements that a kernel works on; see cpu_kernels.cpp for the fields of all structures."""

    _fields_: ClassVar[Sequence[Any]] = (
        ("num_rows", c_int64),
        ("width", c_int64),
        ("stride", c_int64),
        ("start", c_int64),
        ("parameter_id", c_uint32),
        ("format", c_int32),
        ("distribution", c_int32),
        ("num_threads", c_int32),
    )


class PerturbCall(Call):
    """What `lezo_perturb` is called with."""

    _fields_ = (
        ("theta", c_void_p),
        ("rows", c_void_p),
        ("plus", c_void_p),
        ("minus", c_void_p),
        ("key", c_uint64),
        ("scale", c_float),
        ("out_format", c_int32),
    )


class UpdateCall(Call):
    """What `lezo_update` is called with."""

    _fields_ = (
        ("theta", c_void_p),
        ("low", c_void_p),
        ("updates", c_void_p),
        ("num_updates", c_int64),
        ("precision", c_int32),
    )


class CpuNoise(NoiseBackend):
    """Works on `torch.get_num_threads()` threads; their number changes no bit.

    Raises:
        OSError, RuntimeError: the kernels cannot be built or loaded here.
    """

    def __init__(self, law: PerturbationLaw) -> None:
        super().__init__(law)
        self._kernels = ctypes.CDLL(str(_built_library()))
        self._distribution = DISTRIBUTIONS[law.entries]

    def _perturb(
        self, weights: Sequence[Weight], key: int, scale: float, num_signs: int
    ) -> list[list[Tensor]]:
        return [self._perturb_weight(weight, key, scale, num_signs) for weight in weights]

    def _perturb_weight(
        self, weight: Weight, key: int, scale: float, num_signs: int
    ) -> list[Tensor]:
        theta = weight.theta.contiguous()
        num_rows, width, stride = weight.region.rows(theta.numel())
        shape = theta.shape
        rows = weight.rows
        if rows is not None:
            rows = rows.contiguous()
            num_rows = len(rows)
            width = stride = theta.shape[1]
            shape = torch.Size((num_rows, width))
            if num_rows and not (int(rows.min()) >= 0 and int(rows.max()) < len(theta)):
                raise ValueError(f"rows must lie in [0, {len(theta)})")
        copies = [torch.empty(shape, dtype=weight.out_dtype) for _ in range(num_signs)]
        call = PerturbCall(
            num_rows=num_rows,
            width=width,
            stride=stride,
            start=weight.region.start,
            parameter_id=weight.parameter_id,
            format=FORMATS[theta.dtype],
            distribution=self._distribution,
            num_threads=torch.get_num_threads(),
            theta=theta.data_ptr(),
            rows=None if rows is None else rows.data_ptr(),
            plus=copies[0].data_ptr(),
            minus=copies[1].data_ptr() if num_signs == 2 else None,
            key=key,
            scale=scale,
            out_format=FORMATS[weight.out_dtype],
        )
        self._kernels.lezo_perturb(ctypes.byref(call))
        return copies

    def update_(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        packed = pack_updates(updates)
        for target in targets:
            num_rows, width, stride = target.region.rows(target.values.numel())
            call = UpdateCall(
                num_rows=num_rows,
                width=width,
                stride=stride,
                start=target.region.start,
                parameter_id=target.parameter_id,
                format=FORMATS[target.values.dtype],
                distribution=self._distribution,
                num_threads=torch.get_num_threads(),
                theta=target.values.data_ptr(),
                low=None if target.low is None else target.low.data_ptr(),
                updates=packed.ctypes.data,
                num_updates=len(packed),
                precision=PRECISIONS[precision],
            )
            self._kernels.lezo_update(ctypes.byref(call))


def _built_library() -> Path:
    """Return the path of the shared library in the user's cache; build it if it is missing."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++ or c++) on the PATH")
    # With -v, the compiler names its version, and the processor that -march=native stands for.
    command = [compiler, *FLAGS, "-E", "-v", "-x", "c++", os.devnull]
    target = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    identity = "\0".join([SOURCE.read_text(), *FLAGS, target])
    digest = hashlib.sha256(identity.encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lezo_ds"
    library = cache / f"noise-{digest[:16]}.so"
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
