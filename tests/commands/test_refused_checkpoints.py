"""Checkpoints that are not the weights of a decoder: refused in training and in a dry run, before loading.

Each of them was trained on as garbage, with exit code 0.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from commands import assert_one_error, run_forked
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, DeepseekV3Config

from lezo_ds.config import load_config
from lezo_ds.errors import UserError
from lezo_ds.model.checkpoint import build_checked
from lezo_ds.sharding.checkpoint_files import WeightFiles
from lezo_ds.tools.dry_run import dry_run

FC1 = "model.decoder.layers.0.fc1"
UNQUANTIZED = "before it was quantized"


def quantization(method):
    return lambda config, tensors: config.update(quantization_config={"quant_method": method})


def fp8_with_scales(config, tensors):
    tensors[f"{FC1}.weight"] = tensors[f"{FC1}.weight"].to(torch.float8_e4m3fn)
    tensors[f"{FC1}.weight_scale_inv"] = torch.ones(1)


def int8(config, tensors):
    tensors[f"{FC1}.weight"] = tensors[f"{FC1}.weight"].to(torch.int8)


def gptq(config, tensors):
    del tensors[f"{FC1}.weight"]
    for name, dtype in (("qweight", torch.int32), ("qzeros", torch.int32), ("scales", torch.float16)):
        tensors[f"{FC1}.{name}"] = torch.ones(4, 4, dtype=dtype)


def nf4(config, tensors):
    tensors[f"{FC1}.weight"] = torch.zeros(12, 1, dtype=torch.uint8)
    tensors[f"{FC1}.weight.absmax"] = torch.ones(12)


def scales_only(config, tensors):
    tensors[f"{FC1}.weight_scale"] = torch.ones(1)


CASES = {
    "fp8_config": (quantization("fp8"), ["quantization_config in config.json, with quant_method fp8"]),
    "gptq_config": (quantization("gptq"), ["with quant_method gptq"]),
    "awq_config": (quantization("awq"), ["with quant_method awq"]),
    "bitsandbytes_config": (quantization("bitsandbytes"), ["with quant_method bitsandbytes"]),
    "fp8": (fp8_with_scales, [f"tensor {FC1}.weight of the checkpoint does not hold plain", "F8_E4M3"]),
    "int8": (int8, [f"tensor {FC1}.weight of the checkpoint does not hold plain", "type I8"]),
    "gptq": (gptq, [f"the checkpoint holds {FC1}.qweight", "type I32, shape (4, 4)"]),
    "nf4": (nf4, [f"tensor {FC1}.weight of the checkpoint does not hold plain weights", "type U8"]),
    "scales": (scales_only, [f"the checkpoint holds {FC1}.weight_scale", "type F32, shape (1,)"]),
}


@pytest.fixture
def damaged(recipe, tmp_path):
    """Return a function that copies the recipe's model and changes its config and its tensors."""

    def make(change):
        model = shutil.copytree(recipe.parent / "model", tmp_path / "model")
        config = json.loads((model / "config.json").read_text())
        tensors = load_file(model / "model.safetensors")
        change(config, tensors)
        (model / "config.json").write_text(json.dumps(config))
        save_file(tensors, model / "model.safetensors")
        return model

    return make


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_checkpoint_is_refused_in_a_dry_run(case, damaged, recipe, tmp_path):
    change, fragments = CASES[case]
    config = load_config(recipe, [f"model.path={damaged(change)}", f"run_dir={tmp_path / 'run'}"])
    with pytest.raises(UserError) as refused:
        dry_run(config)
    assert refused.value.exit_code == 2
    assert all(fragment in str(refused.value) for fragment in [*fragments, UNQUANTIZED])


@pytest.mark.parametrize("case", ["fp8_config", "int8", "scales"])
def test_a_quantized_checkpoint_is_refused_before_a_run_directory_is_made(case, damaged, recipe, tmp_path):
    change, fragments = CASES[case]
    arguments = ["--config", recipe, f"model.path={damaged(change)}", f"run_dir={tmp_path / 'run'}"]
    assert_one_error(run_forked(arguments), 2, *fragments, UNQUANTIZED)
    assert not (tmp_path / "run").exists()


def test_bin_files_of_another_type_are_refused_when_the_run_starts(damaged, recipe, tmp_path):
    model = damaged(int8)
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    arguments = ["--config", recipe, f"model.path={model}", f"run_dir={tmp_path / 'run'}"]
    result = run_forked(arguments, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert_one_error(result, 2, *CASES["int8"][1], UNQUANTIZED)


def test_tensors_of_modules_that_the_model_lacks_are_no_reason_to_refuse_it(damaged):
    def add(config, tensors):
        tensors["score.weight"] = torch.zeros(2, 2)
        tensors["model.decoder.version"] = torch.zeros(1)
        tensors["model.decoder.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    model, _ = build_checked(damaged(add), "fp32")
    assert type(model).__name__ == "OPTForCausalLM"


def test_an_encoder_is_refused_because_its_tokens_see_the_answer(tmp_path):
    sizes = {"vocab_size": 40, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    BertConfig(**sizes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is an encoder.*got: model_type bert, with is_decoder false"):
        build_checked(tmp_path, "fp32")
    BertConfig(**sizes, is_decoder=True).save_pretrained(tmp_path)
    assert build_checked(tmp_path, "fp32")[1].num_blocks == 2


def test_a_model_that_learned_more_than_its_parameters_is_refused(tmp_path):
    """The router of DeepSeek-V3 corrects its scores by a buffer, which is neither loaded nor saved."""
    config = DeepseekV3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=1,
        first_k_dense_replace=1,
        kv_lora_rank=4,
        q_lora_rank=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        qk_nope_head_dim=4,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert name in WeightFiles(tmp_path)
    build_checked(tmp_path, "fp32")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] += 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"holds values for {name}, which is not a parameter"):
        build_checked(tmp_path, "fp32")
