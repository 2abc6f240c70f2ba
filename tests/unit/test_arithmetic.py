"""What decides the last bits of a result is set before the first message, and recorded."""

from __future__ import annotations

import pytest
import torch

from lezo_ds.distributed.arithmetic import arithmetic_facts, fix_arithmetic

CPU = torch.device("cpu")
SWITCHES = [
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
]


@pytest.fixture
def fast_and_loose(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = [getattr(module, name) for module, name in SWITCHES]
    for module, name in SWITCHES:
        setattr(module, name, True)
    yield
    for (module, name), value in zip(SWITCHES, before, strict=True):
        setattr(module, name, value)


def test_what_trades_precision_for_speed_is_switched_off_and_recorded(fast_and_loose):
    before = arithmetic_facts(CPU)
    assert list(before.values())[1:] == ["on", "on", "not set"]
    fix_arithmetic()
    assert arithmetic_facts(CPU) == {
        "processor": before["processor"],
        "TF32": "off",
        "reduced-precision reductions": "off",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_users_workspace_is_kept_and_tf32_that_the_driver_forces_is_recorded(fast_and_loose, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    fix_arithmetic()
    facts = arithmetic_facts(CPU)
    assert facts["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert facts["TF32"] == "on"


def test_the_processor_is_named_with_its_instructions():
    assert arithmetic_facts(CPU)["processor"].endswith(f", {torch.backends.cpu.get_cpu_capability()}")
