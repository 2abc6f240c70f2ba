"""Perturbed weights meet the tokens of answers alone: each sequence as two plain models read it."""

from __future__ import annotations

import pytest
import torch
from reference import Reference
from tiny_models import FAMILIES
from tiny_runs import start_engine, write_model
from transformers import AutoModelForCausalLM

from lezo_ds.data.batches import candidate_batch, teacher_forcing_batch
from lezo_ds.data.packing import can_pack, pack
from lezo_ds.forward.probes import Perturbation
from lezo_ds.tasks.base import EncodedExample
from lezo_ds.zo.keys import direction_key
from lezo_ds.zo.passes import KeyedProbe

SCALE = 0.05
KEY = 77
CONTEXTS = ((3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14), (20, 21, 22), (30,), (40, 41, 42, 43, 44))
LOW_RANK = {"noise_rank": 1, "examples_per_direction": 1}
WHOLE_BATCH = {"only_blocks": True}


def example(context, *answers, spans=()):
    sequences = tuple((*context, *answer) for answer in answers)
    return EncodedExample(sequences, tuple(map(len, answers)), 0, False, spans)


def batches():
    one_token = [example(context, (15,), (16,)) for context in CONTEXTS]
    several = [example(context, (15, 17, 18), (16, 19), (17,)) for context in CONTEXTS]
    turns = [example((1, *context), (9, 8, 7, 6), spans=((2, 3), (4, 5))) for context in CONTEXTS]
    return {
        "labels of one token": candidate_batch(one_token, 1),
        "candidates": candidate_batch(several, 1),
        "texts": teacher_forcing_batch(several, 1),
        "turns": teacher_forcing_batch(turns, 1),
        "in shared rows": pack(teacher_forcing_batch(one_token, 1)),
    }


def model_at(model, probe, group, dropped, rank):
    """Return plain weights at one probe of a group."""
    reference = Reference(model, torch.float32, "stochastic", rank=rank)
    weights = dict(model.state_dict())
    for name, value in reference.values.items():
        block = int(name.partition("layers.")[2].partition(".")[0] or -1) if rank else None
        if rank and block not in dropped:
            key = probe.keys[group if len(probe.keys) > 1 else 0]
            weights[name] = value + probe.scale * reference._noise(name, key)
    return weights


@torch.no_grad()
def expected(directory, batch, probe, dropped):
    """Return the log-probabilities of the selected tokens, one sequence and one token at a time."""
    plain = AutoModelForCausalLM.from_pretrained(directory).eval()
    perturbed = AutoModelForCausalLM.from_pretrained(directory).eval()
    model = AutoModelForCausalLM.from_pretrained(directory)
    selection = batch.selection
    tokens = batch.inputs["input_ids"]
    found = torch.zeros(len(selection.rows), tokens.max() + 64)
    for row in range(len(tokens)):
        (own,) = torch.nonzero(selection.rows == row, as_tuple=True)
        positions = selection.positions[own]
        first = int(positions.min())
        group = int(batch.token_examples[row, 0]) if batch.token_examples is not None else row
        perturbed.load_state_dict(model_at(model, probe, group, dropped, rank=1))
        cache = None
        if first:
            cache = plain(tokens[row : row + 1, :first], use_cache=True).past_key_values
        for position in range(first, int(positions.max()) + 1):
            output = perturbed(
                tokens[row : row + 1, position : position + 1],
                past_key_values=cache,
                position_ids=torch.tensor([[position]]),
                use_cache=True,
            )
            cache = output.past_key_values
            for place in own[positions == position].tolist():
                logits = output.logits[0, -1]
                found[place, : len(logits)] = logits
    return found


CASES = [
    (family, kind)
    for family in ("gemma2", "llama", "mistral", "opt", "phi", "qwen3")
    for kind in batches()
    if kind != "in shared rows" or can_pack(FAMILIES[family][0], max_length=16)
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_an_answer_meets_perturbed_weights_after_a_context_at_theta(family, kind, tmp_path):
    directory = write_model(FAMILIES[family][0], tmp_path / family)
    engine = start_engine(directory, perturbed_tokens="answers", sparsity=0.0, **LOW_RANK)
    batch = batches()[kind]
    unpacked = batch
    if kind == "in shared rows":
        unpacked = teacher_forcing_batch(
            [example(context, (15,), (16,)) for context in CONTEXTS], 1
        )
        assert len(batch.inputs["input_ids"]) < len(CONTEXTS)
    keys = tuple(direction_key(KEY, group) for group in range(len(CONTEXTS)))
    probes = (KeyedProbe(keys, SCALE), KeyedProbe(keys, -SCALE), KeyedProbe(keys[::-1], SCALE))
    dropped = frozenset({0})
    outputs = engine.run(batch, Perturbation(probes, dropped))
    for probe, output in zip(probes, outputs, strict=True):
        logits = expected(directory, unpacked, probe, dropped)
        vocabulary = unpacked.selection.vocabulary
        if vocabulary is not None:
            ours = logits[:, vocabulary]
        else:
            size = FAMILIES[family][0].get_text_config().vocab_size
            log_probabilities = logits[:, :size].log_softmax(dim=1)
            ours = log_probabilities.gather(1, unpacked.selection.targets[:, None])[:, 0]
        torch.testing.assert_close(output, ours, atol=2e-5, rtol=1e-4)
    first, second, _ = outputs
    assert (first - second).abs().max() > 1e-3
