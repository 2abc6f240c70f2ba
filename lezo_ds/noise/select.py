"""The noise backend of a device, and the version of its noise."""

from __future__ import annotations

import functools
import logging
import subprocess

import torch

from lezo_ds.errors import UserError
from lezo_ds.noise.backend import NoiseBackend
from lezo_ds.noise.cpu import BuildError, CpuNoise
from lezo_ds.noise.eager import EagerNoise

NOISE_VERSION = 1
"""Version of z(key, parameter, element) and of its use; it changes when any bit of either changes."""

logger = logging.getLogger(__name__)


def noise_backend(device: torch.device) -> NoiseBackend:
    """Return the fastest backend for a device; all backends give the same bits.

    On a CPU without a working C++ compiler this is `EagerNoise`, with one warning per process.

    Raises:
        UserError: a GPU on which Triton does not run.
    """
    return _backend_of(device.type)


@functools.cache
def _backend_of(device_type: str) -> NoiseBackend:
    if device_type == "cuda":
        return _triton_noise()
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


def _triton_noise() -> NoiseBackend:
    try:
        from lezo_ds.noise.gpu import TritonNoise  # CPUs do not need Triton and often do not have it

        noise = TritonNoise()
        # The first launch builds Triton's launcher; a missing compiler must show now, not in a training step.
        noise.draw(key=0, parameter_id=0, start=0, count=1, device=torch.device("cuda"))
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise UserError(
            "Triton cannot run its kernels here",
            got=f"{type(error).__name__}: {error}",
            expected="Triton, a C compiler and Python's headers",
            fix="pip install triton; apt-get install gcc python3-dev, or conda install gcc",
        ) from error
    return noise
