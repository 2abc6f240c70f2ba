import pytest
import torch
import transformers
from family_checks import CONTEXT_LENGTHS, PAD, examples_of, with_start
from family_models import small_config
from tiny_models import FAMILIES, tiny_model

from lezo_ds.data.batches import candidate_batch, teacher_forcing_batch
from lezo_ds.data.packing import can_pack, pack

PACKING = sorted(set(FAMILIES) - {"mistral", "gemma2"})  # the windows of these two are shorter


def logits_of(model, batch):
    logits = model(**batch.inputs).logits
    return logits[batch.selection.rows, batch.selection.positions]


@pytest.mark.parametrize("start", [(), tuple(range(3, 15))], ids=["alone", "with one start"])
@pytest.mark.parametrize("family", PACKING)
@torch.no_grad()
def test_logits_are_those_of_rows_of_their_own(family, start):
    """What all sequences begin with is once in a row."""
    assert can_pack(FAMILIES[family][0], 32)
    model = tiny_model(family)
    lengths = range(1, 9) if start else CONTEXT_LENGTHS
    examples = with_start(examples_of(2, lengths), start)
    batch = candidate_batch(examples, PAD)
    packed = pack(batch, len(start))
    assert 2 * len(packed.inputs["input_ids"]) < len(batch.inputs["input_ids"]) == 16
    if start:
        # Contexts have 1 to 8 tokens of their own. Of each of two answers, one token is read.
        assert packed.inputs["input_ids"].shape == (1, 12 + 36 + 8 * 2)
    together, alone = (logits_of(model, each) for each in (packed, batch))
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "dtype"), [("opt", torch.bfloat16), ("llama", torch.float32)])
def test_no_bit_of_a_sequence_depends_on_its_neighbours(family, dtype):
    model = tiny_model(family, dtype)
    examples = examples_of(1)
    others = examples_of(1, seed=1)
    mixed = [(examples if n % 2 else others)[n] for n in range(len(examples))]
    batches = [pack(teacher_forcing_batch(these, PAD)) for these in (examples, mixed)]
    assert torch.equal(batches[0].inputs["attention_mask"], batches[1].inputs["attention_mask"])
    with torch.no_grad():
        logits = [logits_of(model, batch) for batch in batches]
    assert torch.equal(logits[0][1::2], logits[1][1::2])
    assert not torch.equal(logits[0][::2], logits[1][::2])


@pytest.mark.parametrize(
    "config",
    [
        *map(small_config, ("bloom", "jamba", "falcon_h1", "mamba", "mistral", "gemma2")),
        transformers.FalconConfig(alibi=True),
        transformers.RobertaConfig(is_decoder=True),
        # Published configs, whose text model is a section of them.
        transformers.Qwen3_5Config(),
        transformers.Gemma3Config(text_config={"sliding_window": 8}),
        transformers.Llama4Config(text_config={"attention_chunk_size": 8}),
        transformers.Llama4Config(text_config={"floor_scale": 8}),
        # Layers that choose some of the tokens, or keep a state besides keys and values.
        *map(small_config, ("deepseek_v32", "zaya")),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_mix_tokens_otherwise_or_see_few_of_them_are_not_packed(config):
    assert not can_pack(config, 64)


def test_a_window_that_no_sequence_fills_does_not_hinder_but_another_attention_does():
    assert can_pack(FAMILIES["mistral"][0], 8)
    assert not can_pack(FAMILIES["mistral"][0], 9)
    assert can_pack(transformers.Gemma3Config(text_config={"sliding_window": 8}), 8)
    config = transformers.OPTConfig()
    config._attn_implementation = "eager"
    assert not can_pack(config, 64)
