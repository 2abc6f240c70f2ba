"""Models in GGUF become directories that can be trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lezo_ds.data.encoding import load_tokenizer
from lezo_ds.errors import UserError
from lezo_ds.sharding.checkpoint_files import WeightFiles, load_model_config, resolve_model
from lezo_ds.tools.gguf_models import convert_gguf

gguf = pytest.importorskip("gguf")

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "Ġ", "ab"]
TEMPLATE = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
SIZE, HEADS, INNER = 32, 4, 64


def write_gguf(path):
    """Write a random Llama of one block, quantized to eight bits; return its tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    shapes = {
        "token_embd": (len(TOKENS), SIZE),
        "output": (len(TOKENS), SIZE),
        "blk.0.attn_v": (SIZE, SIZE),
        "blk.0.attn_q": (SIZE, SIZE),
        "blk.0.attn_k": (SIZE, SIZE),
        "blk.0.attn_output": (SIZE, SIZE),
        "blk.0.ffn_gate": (INNER, SIZE),
        "blk.0.ffn_up": (INNER, SIZE),
        "blk.0.ffn_down": (SIZE, INNER),
    }
    rng, written = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        quantized = gguf.quants.quantize(
            rng.standard_normal(shape, dtype=np.float32), gguf.GGMLQuantizationType.Q8_0
        )
        writer.add_tensor(f"{name}.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        written[name] = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(SIZE, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def test_a_converted_model_has_the_weights_the_tokenizer_and_the_template(tmp_path):
    written = write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    config = load_model_config(resolve_model(str(tmp_path / "model")))
    assert isinstance(config, LlamaConfig)
    files = WeightFiles(tmp_path / "model")
    for name, stored in (("token_embd", "embed_tokens"), ("blk.0.ffn_down", "layers.0.mlp.down_proj")):
        assert torch.equal(files.read(f"model.{stored}.weight"), torch.from_numpy(written[name]))
    files.close()
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert tokenizer.backend.convert_ids_to_tokens(tokenizer.encode(["ab a"])[0])[-3:] == ["ab", "Ġ", "a"]
    assert tokenizer.backend.chat_template == TEMPLATE
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(torch.tensor([[1, 3, 4]])).logits
    assert logits.isfinite().all()


def test_a_file_that_is_no_gguf_is_refused_in_one_line(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"a.gguf cannot be read; .* fix: download the model in safetensors"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()
