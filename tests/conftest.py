"""What all tests share: the environment of a CPU rank, and tiny models on disk."""

from __future__ import annotations

import os

# Before anything imports torch or deepspeed: they look at these once.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import signal

import hypothesis
import pytest
import torch
from assets import write_recipe
from tiny_runs import TINY_OPT, write_model

# A shell starts its background jobs with SIGINT ignored, and every program that a job starts
# inherits that: tests of Ctrl-C would wait for an interrupt that cannot arrive.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is not a failure: no example has a deadline. pytest's timeout ends a test that
# hangs.
hypothesis.settings.register_profile("any load", deadline=None)
hypothesis.settings.load_profile("any load")


@pytest.fixture(scope="session")
def opt_directory(tmp_path_factory):
    """A tiny random OPT with a tied head, in fp32."""
    return write_model(TINY_OPT, tmp_path_factory.mktemp("opt_fp32"), torch.float32)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    """A recipe of 8 steps, with its model and data in the same directory."""
    return write_recipe(tmp_path_factory.mktemp("assets"))
