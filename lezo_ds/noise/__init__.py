"""Noise as a pure function of (seed, parameter, element), and the operations that use it.

>>> import torch
>>> device = torch.device("cpu")
>>> noise = noise_backend(device)
>>> whole = noise.normal(seed=7, parameter_id=3, start=0, count=100, device=device)
>>> torch.equal(whole[33:50], noise.normal(7, 3, 33, 17, device))
True
"""

from lezo_ds.noise.backend import NoiseBackend, NoiseMode, SeedAndCoefficient
from lezo_ds.noise.precision import UpdatePrecision, join_master, split_master
from lezo_ds.noise.select import NOISE_VERSION, noise_backend, noise_version

__all__ = [
    "NOISE_VERSION",
    "NoiseBackend",
    "NoiseMode",
    "SeedAndCoefficient",
    "UpdatePrecision",
    "join_master",
    "noise_backend",
    "noise_version",
    "split_master",
]
