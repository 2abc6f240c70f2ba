"""Noise as a pure function of (key, parameter, element), and the operations that use it.

>>> import torch
>>> device = torch.device("cpu")
>>> noise = noise_backend(device)
>>> z = noise.draw(key=7, parameter_id=3, start=0, count=100, device=device)
>>> torch.equal(z[33:50], noise.draw(key=7, parameter_id=3, start=33, count=17, device=device))
True
"""

from lezo_ds.noise.backend import NOISE_VERSION, NoiseBackend, Shard, Weight, noise_backend, stacked
from lezo_ds.noise.precision import join_master, split_master
from lezo_ds.zo.updates import Distribution, Update, UpdatePrecision

__all__ = [
    "NOISE_VERSION",
    "Distribution",
    "NoiseBackend",
    "Shard",
    "Update",
    "UpdatePrecision",
    "Weight",
    "join_master",
    "noise_backend",
    "split_master",
    "stacked",
]
