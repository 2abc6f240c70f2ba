"""The noise backend of a device, and the version of its noise."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import subprocess

import torch

from lezo_ds.errors import UserError
from lezo_ds.noise.backend import NoiseBackend, NoiseMode
from lezo_ds.noise.cpu import BuildError, CpuNoise
from lezo_ds.noise.eager import EagerNoise

NOISE_VERSION = 1
"""Of the function z(seed, parameter, element) and its use; raised when any bit of them changes."""

logger = logging.getLogger(__name__)


def noise_backend(device: torch.device, mode: NoiseMode = "exact") -> NoiseBackend:
    """Return the fastest backend for `device`; all that are exact give the same bits.

    On a CPU without a working C++ compiler: `EagerNoise`, and a warning once per process.

    Raises:
        UserError: fast noise on a device that is no GPU, or a GPU without what Triton needs.
    """
    if mode == "fast" and device.type != "cuda":
        raise UserError(
            "zo.noise=fast needs a GPU: it is made of its approximate instructions",
            got=f"device {device}",
            expected="cuda",
            fix="set zo.noise=exact",
        )
    return _backend_of(device.type, mode)


def noise_version(device: torch.device, mode: NoiseMode = "exact") -> int | str:
    """Return what the bits of the noise depend on: `NOISE_VERSION`, and the GPU and Triton if it is fast."""
    if mode == "exact":
        return NOISE_VERSION
    if device.type != "cuda":
        return f"{NOISE_VERSION} fast, no GPU"
    gpu, triton = torch.cuda.get_device_name(device), importlib.metadata.version("triton")
    return f"{NOISE_VERSION} fast, {gpu}, Triton {triton}"


@functools.cache
def _backend_of(device_type: str, mode: NoiseMode) -> NoiseBackend:
    if device_type == "cuda":
        return _triton_noise(mode)
    if device_type == "cpu":
        try:
            return CpuNoise()
        except BuildError as error:
            logger.warning(
                "the noise kernels for CPUs cannot be built, so slower PyTorch code gives the same results; "
                "install a C++ compiler (apt-get install g++, or conda install gxx): %s",
                error,
            )
    return EagerNoise()


def _triton_noise(mode: NoiseMode) -> NoiseBackend:
    try:
        from lezo_ds.noise.gpu import TritonNoise  # Triton is not needed, and often not there, on CPUs

        noise = TritonNoise(mode)
        noise.normal(0, 0, 0, 1, torch.device("cuda"))  # Triton builds what starts kernels now, not in a step
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise UserError(
            "Triton cannot run its kernels here",
            got=f"{type(error).__name__}: {error}",
            expected="Triton, a C compiler and Python's headers",
            fix="pip install triton; apt-get install gcc python3-dev, or conda install gcc",
        ) from error
    return noise
