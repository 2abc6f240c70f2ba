"""The noise backend of a device."""

from __future__ import annotations

import functools
import logging

import torch

from lezo_ds.noise.backend import NoiseBackend
from lezo_ds.noise.cpu import BuildError, CpuNoise
from lezo_ds.noise.eager import EagerNoise

logger = logging.getLogger(__name__)


def noise_backend(device: torch.device) -> NoiseBackend:
    """Return the fastest backend for `device`; all of them give the same bits.

    On a CPU without a working C++ compiler: `EagerNoise`, and a warning once per process.
    """
    return _backend_of(device.type)


@functools.cache
def _backend_of(device_type: str) -> NoiseBackend:
    if device_type == "cuda":
        from lezo_ds.noise.gpu import TritonNoise  # Triton is not needed, and often not there, on CPUs

        return TritonNoise()
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
