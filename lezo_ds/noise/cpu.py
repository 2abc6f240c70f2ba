"""The noise operations for CPUs: C++ that is compiled once per machine and called through ctypes.

The library lies in the user's cache under a name that is a hash of its source, its flags, and what
the compiler says of itself and of this processor. A new version of any of them is another file.

A call passes the address of one structure, whose fields are read from cpu_kernels.cpp.
Memory belongs to PyTorch, and the kernels never keep an address.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lezo_ds.errors import UserError
from lezo_ds.noise import (
    Copies,
    Elements,
    Kernels,
    Region,
    UpdateTarget,
    Weight,
    aligned,
    bytes_of_copies,
    checked_terms,
    pack_updates,
)
from lezo_ds.zo.laws import Distribution
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
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}


def _structure(name: str) -> Any:
    """Return a structure of cpu_kernels.cpp, whose fields are its keyword arguments."""
    pattern = rf"struct {name} (?:: (\w+) )?{{(.*?)}};"
    ((base, body),) = re.findall(pattern, SOURCE.read_text(), re.DOTALL)
    fields = []
    for type_name, field in re.findall(r"^ +([^;/]*[ *])(\w+);", body, re.MULTILINE):
        is_pointer = "*" in type_name
        c_type = "c_void_p" if is_pointer else f"c_{type_name.strip().removesuffix('_t')}"
        fields.append((field, getattr(ctypes, c_type)))
    bases = (_structure(base) if base else ctypes.Structure,)
    return type(name, bases, {"_fields_": fields})


PerturbCall = _structure("PerturbCall")
UpdateCall = _structure("UpdateCall")
EntriesCall = _structure("EntriesCall")
SubtractCall = _structure("SubtractCall")


class CpuKernels(Kernels):
    """Works on `torch.get_num_threads()` threads; their number changes no bit.

    Raises:
        UserError: the kernels cannot be built or loaded here.
    """

    def __init__(self) -> None:
        self._library = _library()

    def perturb(
        self,
        entries: Distribution,
        weights: Sequence[Weight],
        key: int,
        scale: float,
        num_signs: int,
        memory: Tensor | None = None,
    ) -> Copies:
        copies = []
        num_bytes = bytes_of_copies(weights)
        offset = 0
        for theta, elements, out_dtype, rows in weights:
            theta = theta.contiguous()
            shape = theta.shape
            of_weight = []
            if rows is None and memory is not None:
                size = theta.numel() * out_dtype.itemsize
                for sign in range(num_signs):
                    first = offset + sign * num_bytes
                    of_weight.append(memory[first : first + size].view(out_dtype).view(shape))
                offset += aligned(size)
            if rows is not None:
                rows = rows.contiguous()
                if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < len(theta)):
                    raise ValueError(f"rows must lie in [0, {len(theta)})")
                shape = torch.Size((len(rows), theta.shape[1]))
                region = Region(elements.region.start, len(rows), shape[1], shape[1])
                elements = elements._replace(region=region)
            if not of_weight:
                of_weight = [torch.empty(shape, dtype=out_dtype) for _ in range(num_signs)]
            call = PerturbCall(
                *_fields_of(elements, theta.dtype, entries),
                theta=theta.data_ptr(),
                rows=_address(rows),
                plus=of_weight[0].data_ptr(),
                minus=of_weight[1].data_ptr() if num_signs == 2 else None,
                key=key,
                scale=scale,
                out_format=FORMATS[out_dtype],
            )
            self._library.lezo_perturb(ctypes.byref(call))
            copies.append(of_weight)
        return copies

    def update(
        self,
        entries: Distribution,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        packed = pack_updates(updates)
        for target in targets:
            _change(
                target,
                entries,
                precision,
                self._library.lezo_update,
                UpdateCall,
                updates=packed.ctypes.data,
                num_updates=len(packed),
            )

    def draw(
        self,
        entries: Distribution,
        parameter_id: int,
        keys: Sequence[int],
        region: Region,
    ) -> Tensor:
        out = torch.empty(len(keys) * region.num_rows, region.width)
        packed_keys = np.array(keys, dtype=np.uint64)
        call = EntriesCall(
            *_fields_of(Elements(parameter_id, (), region), out.dtype, entries),
            out=out.data_ptr(),
            keys=packed_keys.ctypes.data,
            num_keys=len(keys),
        )
        self._library.lezo_entries(ctypes.byref(call))
        return out

    def subtract(
        self,
        target: UpdateTarget,
        u: Tensor,
        b: Tensor,
        update: Update,
        precision: UpdatePrecision,
    ) -> None:
        u, b = checked_terms(target, u, b)
        elements = target.elements
        rows, columns = elements.rows_and_columns()
        _change(
            target,
            "normal",  # it draws only the dither, which is the same for all distributions
            precision,
            self._library.lezo_subtract,
            SubtractCall,
            rows=u.data_ptr(),
            columns=b.data_ptr(),
            num_terms=len(u),
            num_matrix_rows=len(rows),
            num_matrix_columns=len(columns),
            first_row=rows.start,
            first_column=columns.start,
            parameter_width=elements.shape[1],
            dither_key=update.key,
            factor=update.factor,
        )


def _change(
    target: UpdateTarget,
    entries: Distribution,
    precision: UpdatePrecision,
    function: Any,
    structure: Any,
    **fields: Any,
) -> None:
    """Call a function that changes a target in place, with a structure that has more fields."""
    values, elements, low, grid = target
    wide = None if grid is None else grid.float()  # here until the call ends
    call = structure(
        *_fields_of(elements, values.dtype, entries),
        theta=values.data_ptr(),
        low=_address(low),
        grid=_address(wide),
        num_groups=0 if grid is None else grid.shape[1],
        precision=PRECISIONS[precision],
        **fields,
    )
    function(ctypes.byref(call))


def _address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def _fields_of(elements: Elements, dtype: torch.dtype, entries: Distribution) -> tuple[int, ...]:
    """Return the fields of `Call`."""
    start, *shape_of_region = elements.region
    return (
        *shape_of_region,
        start,
        elements.parameter_id,
        FORMATS[dtype],
        DISTRIBUTIONS[entries],
        torch.get_num_threads(),
    )


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(_built_library()))
    except OSError as error:
        raise UserError(
            f"the noise kernels for CPUs cannot be written or loaded: {error}",
            fix="set XDG_CACHE_HOME to a folder for programs that you may write to",
        ) from error


def _built_library() -> Path:
    """Return the path of the shared library in the user's cache; build it if it is missing."""
    install = "install a C++ compiler: apt-get install g++, or conda install gxx"
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise UserError(
            "the noise kernels for CPUs cannot be built without g++ or c++ on the PATH",
            fix=install,
        )
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
            raise UserError(
                f"the noise kernels for CPUs cannot be built: {compiler} says "
                f"{result.stderr.strip()[-500:]}",
                fix=install,
            )
        output.replace(library)
    return library
