"""Checkpoints in block FP8: slices equal what is dequantized by hand, however they are split."""

import json
import math
import shutil

import pytest
import torch
from assets import change_json
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_adapters import SPLIT, peft_config, start_engine, train, whole_batch
from tiny_models import FAMILIES, VOCABULARY
from tiny_runs import write_model
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3Config

from lezo_ds.checkpoints.checkpoint import build_checked, load_model_config, open_weights
from lezo_ds.errors import UserError
from lezo_ds.noise import Region

pytestmark = pytest.mark.distributed

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
WIDE = Qwen3Config(**SIZES, bos_token_id=0, eos_token_id=2, pad_token_id=1)
WEIGHTS = "model.safetensors"
MATRIX = "model.layers.0.mlp.up_proj.weight"
SCALES = f"{MATRIX}_scale_inv"


def quantize(matrix, block, scale_dtype):
    """Return a matrix in FP8, its scales, and the float32 values that they stand for."""
    height, width = block
    shape = [math.ceil(size / side) for size, side in zip(matrix.shape, block, strict=True)]
    scales = torch.empty(shape, dtype=scale_dtype)
    codes = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    values = torch.empty_like(matrix, dtype=torch.float32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scales[i, j] = matrix[part].abs().max() / 448
            codes[part] = (matrix[part] / scales[i, j].float()).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scales[i, j].float()
    return codes, scales, values


def write_random(config, root, block, scale_dtype=torch.float32):
    """Write a model in block FP8, and a plain one with the values that it stands for."""
    plain, fp8 = write_model(config, root / "plain"), root / "fp8"
    shutil.copytree(plain, fp8)
    tensors = load_file(plain / WEIGHTS)
    quantized = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            codes, scales, tensors[name] = quantize(tensor, block, scale_dtype)
            quantized |= {name: codes, f"{name}_scale_inv": scales}
    save_file(tensors, plain / WEIGHTS, {"format": "pt"})
    save_file(quantized, fp8 / WEIGHTS, {"format": "pt"})
    published = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"}
    published |= {"activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    change_json(fp8 / "config.json", quantization_config=published)
    return plain, fp8


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The sizes of the matrices, and of two ranks' parts, are no multiples of the blocks."""
    return write_random(WIDE, tmp_path_factory.mktemp("wide"), (48, 80))


@pytest.mark.parametrize(
    ("family", "block", "scale_dtype"),
    [
        ("qwen3", (16, 16), torch.float32),
        ("qwen3", (128, 128), torch.float32),
        ("qwen3", (5, 7), torch.bfloat16),
        ("qwen3_moe", (5, 7), torch.float32),
    ],
)
def test_slices_equal_what_is_dequantized_by_hand(tmp_path, family, block, scale_dtype):
    plain, fp8 = write_random(FAMILIES[family][0], tmp_path, block, scale_dtype)
    model = AutoModelForCausalLM.from_pretrained(plain)
    built, _ = build_checked(fp8, "fp32")
    files = open_weights(built, fp8)
    assert not hasattr(built.config, "quantization_config")
    assert any(tensor.dtype == "F8_E4M3" for tensor in files.tensors.values())
    for name, parameter in model.named_parameters():
        tensors = files.stored_as(name)
        flat = parameter.detach().flatten()
        for first, last in ((0, len(flat)), (0, 1), (len(flat) // 3, 2 * len(flat) // 3)):
            part = files.read(tensors, Region.run(first, last - first))
            assert torch.equal(part, flat[first:last]), name
        if parameter.dim() == 2:
            rows, columns = parameter.shape
            region = Region(3 * columns + 2, rows - 4, columns - 5, columns)
            part = files.read(tensors, region)
            assert torch.equal(part, parameter[3:-1, 2:-3].flatten()), name


def test_transformers_dequantizes_to_the_same_logits(tmp_path):
    _, fp8 = write_random(WIDE, tmp_path, (16, 64))
    how = {"dtype": torch.float32, "quantization_config": FineGrainedFP8Config(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(fp8, **how)
    with torch.no_grad():
        logits = theirs.eval()(**whole_batch().inputs).logits
    assert torch.equal(start_engine(fp8, None).forward(whole_batch()), logits)


def load(directories, dtype, num_ranks, bits, ds_changes):
    """Return the digests of the weights that this rank and the others read, and logits."""
    settings = {"bits": bits, "ds_changes": ds_changes}
    engines = [
        start_engine(directory, peft_config("lora"), dtype, num_ranks, **settings)
        for directory in directories
    ]
    return [e.base.fingerprint for e in engines], [e.forward(whole_batch()) for e in engines]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("ds_changes", [(), SPLIT], ids=["zero3", "tensor_parallel"])
def test_two_ranks_read_what_one_rank_reads_of_the_plain_weights(wide, bits, ds_changes):
    dtype = "bf16" if bits else "fp32"
    (((plain,), _),) = run_ranks(load, 1, wide[:1], dtype, 1, bits, ())
    for prints, logits in run_ranks(load, 2, wide, dtype, 2, bits, ds_changes):
        assert prints == [plain, plain]
        assert torch.equal(logits[0], logits[1])


def train_and_export(directory, target, kind, bits):
    peft = peft_config(kind) if kind == "lora" else None
    engine = start_engine(directory, peft, bits=bits)
    train(engine, 2)
    engine.write_model(target, merge=kind == "lora")
    return engine.forward(whole_batch())


@pytest.mark.parametrize(("kind", "bits"), [("lora", None), ("none", None), ("lora", 4)])
def test_a_trained_model_is_exported_as_a_plain_one(wide, tmp_path, kind, bits):
    (trained,) = run_ranks(train_and_export, 1, wide[1], tmp_path / "out", kind, bits)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = exported(**whole_batch().inputs).logits
    torch.testing.assert_close(logits, trained, rtol=1e-4, atol=1e-4)
    assert load_model_config(tmp_path / "out").hidden_size == 128


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        (SCALES, lambda scales: scales.t().contiguous(), r"F8_E4M3 \(256, 128\) .* \(2, 6\)"),
        (SCALES, lambda scales: scales.to(torch.uint8), r"F8_E4M3 \(256, 128\) .* \(6, 2\)"),
        (MATRIX, lambda matrix: matrix.to(torch.int8), r"I8 \(256, 128\) .* \(6, 2\)"),
        (MATRIX, lambda matrix: matrix.to(torch.float8_e5m2), r"F8_E5M2 \(256, 128\) .*"),
    ],
)
def test_fp8_whose_scales_do_not_fit_is_refused_before_loading(wide, tmp_path, name, change, found):
    directory = shutil.copytree(wide[1], tmp_path / "model")
    tensors = load_file(directory / WEIGHTS)
    save_file(tensors | {name: change(tensors[name])}, directory / WEIGHTS)
    with pytest.raises(UserError, match=rf"_proj\.weight in .* is {found}; FP8"):
        build_checked(directory, "fp32")


def test_fp8_that_the_config_does_not_name_or_torch_has_saved_is_refused(wide, tmp_path):
    directory = shutil.copytree(wide[1], tmp_path / "model")
    change_json(directory / "config.json", quantization_config=None)
    with pytest.raises(UserError, match=r"is F8_E4M3 \(128, 128\) with scales \(3, 2\); FP8"):
        build_checked(directory, "fp32")
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    of_model = {name: tensor for name, tensor in tensors.items() if "_scale_inv" not in name}
    torch.save(of_model, directory / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"is float8_e4m3fn \(128, 128\) with scales None; FP8"):
        build_checked(directory, "fp32")
