"""Rotary frequencies that depend on the length of a text: each row is read as it is alone."""

from functools import partial

import pytest
import torch
from ranks import run_ranks
from test_generation import passes_of_rank, prompts_of
from tiny_models import VOCABULARY, greedy, random_model
from tiny_runs import write_model
from transformers import LlamaConfig, Phi3Config, PhimoeConfig

from lezo_ds.checkpoints.checkpoint import build_on_meta
from lezo_ds.data.batches import all_candidates, token_batch
from lezo_ds.data.examples import EncodedExample
from lezo_ds.data.generation import generate, prompt_batch
from lezo_ds.data.packing import can_pack
from lezo_ds.forward.batch import GenerationSettings
from lezo_ds.forward.perturbed_forward import PerturbedForward
from lezo_ds.forward.probes import AT_THETA
from lezo_ds.forward.rope import rope_limit, rotate_each_row

LIMIT = 16
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
SHAPE |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 61}
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4}
LONGROPE |= {"long_factor": [8.0] * 4, "original_max_position_embeddings": LIMIT}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
SCALES = {"short_mscale": 1.0, "long_mscale": 1.5}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, rope_parameters=LONGROPE),
    "phi3": Phi3Config(**SHAPE, rope_parameters=LONGROPE, original_max_position_embeddings=LIMIT),
    "phimoe": PhimoeConfig(**SHAPE, **EXPERTS, rope_parameters=LONGROPE | SCALES),
    "dynamic": LlamaConfig(**SHAPE, rope_parameters=DYNAMIC),
}
# On both sides of the limit, next to each other, and as long as the model's positions.
LENGTHS = (5, 40, 15, 16, 17, 61, 3)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_text_has_the_logits_that_it_has_alone(family):
    model = random_model(CONFIGS[family])
    examples = []
    for ids in prompts_of(LENGTHS):
        mask = (False,) * (len(ids) - 1) + (True,) * 2
        examples.append(EncodedExample(((*ids, 7),), (mask,), 0))
    batch = token_batch(all_candidates(examples), 1).with_logits()
    expected = []
    for example in examples:
        plain = random_model(CONFIGS[family])  # a new one, because frequencies stay for a while
        with torch.no_grad():
            expected.append(plain(torch.tensor([example.sequences[0][:-1]])).logits[0, -2:])
    rotate_each_row(model)
    with torch.no_grad():
        (logits,) = PerturbedForward(model, ())(batch, AT_THETA, model)
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_an_answer_that_passes_the_limit_is_that_of_whole_passes(family):
    model = random_model(CONFIGS[family])
    prompts = prompts_of((5, 15, 9, 30))
    settings = GenerationSettings(max_new_tokens=12, stop_ids=(2,), pad_id=1, stops=())
    plain = random_model(CONFIGS[family])
    expected = [greedy(plain, prompt, 12, stop_ids=(2,)) for prompt in prompts]
    rotate_each_row(model)
    batch = prompt_batch(prompts, settings)
    (found,) = PerturbedForward(model, ())(batch, AT_THETA, partial(generate, model, batch))
    answers = [[token for token in row if token != 1] for row in found.tolist()]
    assert answers == expected


@pytest.mark.distributed
def test_ranks_read_what_prompts_share_apart_only_if_no_answer_passes_the_limit(tmp_path):
    write_model(CONFIGS["llama"], tmp_path)
    settings = (None, (2, 2), (6, LIMIT - 1), 4)
    assert run_ranks(passes_of_rank, 2, tmp_path, *settings, timeout=60.0) == [(2, 2), (2, 2)]


def test_short_texts_share_rows_and_the_model_that_a_run_builds_turns_each_row_by_its_length():
    config = CONFIGS["phi3"]
    assert rope_limit(config) == LIMIT
    assert can_pack(config, LIMIT) and not can_pack(config, LIMIT + 1)
    assert rope_limit(LlamaConfig(**SHAPE)) is None
    rotary = build_on_meta(config, torch.float32).model.rotary_emb
    positions = torch.arange(40).expand(2, 40).clone()
    positions[0] = positions[0].clamp(max=LIMIT - 1)
    x = torch.zeros(2, 40, 32)
    both = rotary(x, positions)
    for row in range(2):
        for table, alone in zip(both, rotary(x, positions[row : row + 1]), strict=True):
            assert torch.equal(table[row], alone[0])
