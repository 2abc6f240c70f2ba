"""The LayerNorm of GPUs, on a GPU (pytest -m gpu) or in Triton's interpreter (see
test_noise_triton.py)."""

from __future__ import annotations

import os

import pytest
import torch
from tiny_models import tiny_model, tunable
from torch import nn

from lezo_ds.forward import module_calls
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.forward.perturbed_forward import PerturbedForward
from lezo_ds.forward.probes import KeyedProbe, Perturbation
from lezo_ds.noise import noise_backend
from lezo_ds.noise.gpu import Launch
from lezo_ds.zo.laws import DenseLaw

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = (4, 3)


@pytest.fixture(params=[pytest.param("triton", marks=() if IS_INTERPRETED else pytest.mark.gpu)])
def norm_at_probes():
    if not (IS_INTERPRETED or torch.cuda.is_available()):
        pytest.skip("no GPU")
    return pytest.importorskip("lezo_ds.forward.norm_kernel").norm_at_probes


def layer_norm(width, dtype=torch.bfloat16, **options):
    torch.manual_seed(width)
    module = nn.LayerNorm(width, **options).to(DEVICE, dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1)
    return module


def batch_of(width, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(width + 1)
    return (torch.randn(*SHAPE, width, generator=generator) * 2 + 0.5).to(DEVICE, dtype)


def copies_of(module, names, num_copies):
    """Copies as they come from the noise: in one piece of memory."""
    found = {}
    for name, parameter in module.named_parameters():
        if name in names:
            noise = torch.arange(num_copies, device=DEVICE)[:, None] * 0.01 - 0.005
            found[name] = list((parameter.float() + noise).unbind())
    return found


@pytest.mark.parametrize("names", [("weight", "bias"), ("weight",), ("bias",)], ids=" ".join)
@pytest.mark.parametrize("width", [16, 100, 768])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_norms_at_each_probe_are_those_of_float64_rounded_once(
    dtype, width, names, norm_at_probes
):
    module, batch = layer_norm(width, dtype), batch_of(width, dtype)
    copies = copies_of(module, names, 2)
    found = norm_at_probes(module, copies, batch, 2)
    assert found.shape == batch.shape and found.dtype == dtype
    for probe, (result, share) in enumerate(zip(found.chunk(2), batch.chunk(2), strict=True)):
        vectors = [
            (copies[name][probe] if name in copies else parameter).double()
            for name, parameter in module.named_parameters()
        ]
        expected = nn.functional.layer_norm(share.double(), (width,), *vectors, module.eps)
        # The next float of 16 bits may be the nearest after rounding in float32: half a unit and a
        # little.
        unit = torch.finfo(dtype).eps * expected.abs()
        assert ((result.double() - expected).abs() <= 0.51 * unit + 1e-6).all()
        assert (result == expected.to(dtype)).float().mean() > 0.99


def test_triton_norms_have_the_bits_of_one_row_and_one_probe_at_a_time(norm_at_probes):
    module, batch = layer_norm(100, bias=False), batch_of(100)
    copies = copies_of(module, ("weight",), 2)
    together = norm_at_probes(module, copies, batch, 2)
    for row in range(len(batch)):
        own = {"weight": [copies["weight"][row // 2]]}
        assert torch.equal(norm_at_probes(module, own, batch[row : row + 1], 1)[0], together[row])


def test_a_triton_model_of_16_bits_loses_as_much_as_one_with_norms_of_torch(
    monkeypatch, norm_at_probes
):
    model = tiny_model("opt").to(DEVICE, torch.bfloat16)
    perturbed = PerturbedForward(model, tunable(model))
    tokens = torch.arange(3, 33, device=DEVICE).view(3, 10)
    batch = MicroBatch({"input_ids": tokens}, 3)
    probes = (KeyedProbe(1, 0.01), KeyedProbe(1, -0.01))
    change = Perturbation(probes, frozenset(), noise_backend(DEVICE, DenseLaw()))
    launched = []
    run = Launch.run

    def count(launch, *arguments):
        launched.append(launch)
        run(launch, *arguments)

    monkeypatch.setattr(Launch, "run", count)
    found = []
    for is_on_gpu in (False, True):
        monkeypatch.setattr(module_calls, "is_on_gpu", lambda _, answer=is_on_gpu: answer)
        launched.clear()
        with torch.no_grad():
            found.append((perturbed(batch, change, model), len(launched)))
    (plain, num_plain), (fused, num_fused) = found
    num_norms = sum(isinstance(module, nn.LayerNorm) for module in model.modules())
    assert num_fused - num_plain == num_norms
    for expected, logits in zip(plain, fused, strict=True):
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=0.02 * float(expected.abs().max())
        )


def test_only_calls_that_the_kernel_serves_are_fused(monkeypatch):
    def is_fused(module, *args, **kwargs):
        runner = module_calls.runner_at_probes(module, module.forward, args, kwargs, rows=4)
        return runner is not None and runner.__name__ == "norm_at_probes"

    module, batch = layer_norm(16), batch_of(16)
    assert is_fused(module, batch) == batch.is_cuda
    monkeypatch.setattr(module_calls, "is_on_gpu", lambda _: True)
    assert is_fused(module, batch)
    assert not is_fused(module, input=batch)
    for other in (batch[:3], batch.float(), batch.transpose(0, 1)):
        assert not is_fused(module, other)
    assert not is_fused(layer_norm(16, torch.float32), batch.float())
    assert not is_fused(nn.LayerNorm((3, 16)).bfloat16(), batch)
    assert not is_fused(nn.RMSNorm(16).bfloat16(), batch)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize(("width", "bias"), [(16, None), (5120, "*fp32"), (12288, "*bf16")])
def test_the_kernel_compiles_for_a_gpu(width, bias):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lezo_ds.forward.norm_kernel import layer_norm_kernel

    types = {
        **{"out_ptr": "*bf16", "in_ptr": "*bf16", "weight_ptr": "*fp32"},
        **({"bias_ptr": bias} if bias else {}),
        **{"rows_of_copy": "i32", "weight_distance": "i64", "bias_distance": "i64", "eps": "fp32"},
    }
    constants = {"width": width, "width_power": 1 << (width - 1).bit_length()}
    constants |= {} if bias else {"bias_ptr": None}
    names = layer_norm_kernel.arg_names
    source = ASTSource(
        fn=layer_norm_kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {"enable_fp_fusion": False, "num_warps": 8}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    assert "sqrt.rn.f32" in compiled["ptx"] and "div.rn.f32" in compiled["ptx"]
    assert ".approx" not in compiled["ptx"]
