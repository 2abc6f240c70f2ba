"""Perturbed weights meet the tokens of answers alone: each sequence as two plain models read it."""

from __future__ import annotations

import pytest
import torch
from lezo_ds.tasks.base import EncodedExample
from reference import Reference
from tiny_models import FAMILIES, random_model
from tiny_runs import start_engine, write_model
from transformers import AutoModelForCausalLM, CamembertConfig, Lfm2Config, Phi3Config

from lezo_ds.config import PeftConfig
from lezo_ds.data.batches import candidate_batch, teacher_forcing_batch
from lezo_ds.data.packing import can_pack, pack
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.forward.probes import Perturbation
from lezo_ds.zo.keys import direction_key
from lezo_ds.zo.passes import KeyedProbe

SCALE = 0.05
DROPPED = frozenset({0})
CONTEXTS = ((3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14), (20, 21, 22), (30,), (40, 41, 42, 43, 44))
KEYS = tuple(direction_key(77, group) for group in range(len(CONTEXTS)))
BY_EXAMPLE = {"noise_rank": 1, "examples_per_direction": 1, "perturbed_tokens": "answers"}


def example(context, *answers, spans=()):
    sequences = tuple((*context, *answer) for answer in answers)
    return EncodedExample(sequences, tuple(map(len, answers)), 0, False, spans)


TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": [2.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 64,
    },
}
ONE_TOKEN = [example(context, (15,), (16,)) for context in CONTEXTS]
START = (21, 22, 23, 24, 25, 26, 27, 28, 29)
INSTRUCTED = [example((*START, *context), (15, 17, 18)) for context in CONTEXTS]
SEVERAL = [example(context, (15, 17, 18), (16, 19), (17,)) for context in CONTEXTS]
# The model learns two turns of a conversation. The first begins at its third token.
TURNS = [example((1, *context), (9, 8, 7, 6), spans=((2, 3), (4, 5))) for context in CONTEXTS]
BATCHES: dict[str, MicroBatch] = {
    "labels of one token": candidate_batch(ONE_TOKEN, 1),
    "candidates": candidate_batch(SEVERAL, 1),
    "texts": teacher_forcing_batch(SEVERAL, 1),
    "turns": teacher_forcing_batch(TURNS, 1),
    "in shared rows": teacher_forcing_batch(ONE_TOKEN, 1),
    "after a common start": teacher_forcing_batch(INSTRUCTED, 1),
}
IN_SHARED_ROWS = {"in shared rows": 0, "after a common start": len(START)}
CASES = [
    (family, kind)
    for family in ("gemma2", "llama", "mistral", "opt")
    for kind in BATCHES
    if kind not in IN_SHARED_ROWS or can_pack(FAMILIES[family][0], max_length=32)
]


class Plain:
    """Two models of transformers, of which the second one reads answers at perturbed weights."""

    def __init__(self, directory):
        self.theta = AutoModelForCausalLM.from_pretrained(directory).eval()
        self.perturbed = AutoModelForCausalLM.from_pretrained(directory).eval()
        model = AutoModelForCausalLM.from_pretrained(directory)
        self.directions = Reference(model, torch.float32, "stochastic", rank=1)

    def move(self, key, scale):
        """Set the perturbed weights to theta + scale z of a key."""
        weights = dict(self.theta.state_dict())
        for name, value in self.directions.values.items():
            if int(name.partition("layers.")[2].partition(".")[0]) not in DROPPED:
                weights[name] = value + scale * self.directions._noise(name, key)
        self.perturbed.load_state_dict(weights)

    @torch.no_grad()
    def outputs(self, batch, probe):
        """Return what a batch selects, of one sequence and one token at a time."""
        selection = batch.selection
        tokens = batch.inputs["input_ids"]
        found = [torch.empty(0)] * len(selection.rows)
        for row in range(len(tokens)):
            group = row if batch.token_examples is None else int(batch.token_examples[row, 0])
            self.move(probe.keys[group], probe.scale)
            own = {}
            for place in torch.nonzero(selection.rows == row)[:, 0].tolist():
                own[int(selection.positions[place])] = place
            first = min(own)
            cache = None
            if first:
                cache = self.theta(tokens[row : row + 1, :first], use_cache=True).past_key_values
            for position in range(first, max(own) + 1):
                token = tokens[row : row + 1, position : position + 1]
                place_ids = torch.tensor([[position]])
                output = self.perturbed(
                    token, past_key_values=cache, position_ids=place_ids, use_cache=True
                )
                cache = output.past_key_values
                if position in own:
                    found[own[position]] = output.logits[0, -1]
        logits = torch.stack(found)
        if selection.vocabulary is not None:
            return logits[:, selection.vocabulary]
        return logits.log_softmax(dim=1).gather(1, selection.targets[:, None])[:, 0]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return (family) -> its directory and plain models."""
    root = tmp_path_factory.mktemp("models")
    made = {}

    def find(family):
        if family not in made:
            directory = write_model(FAMILIES[family][0], root / family)
            made[family] = (directory, Plain(directory))
        return made[family]

    return find


@pytest.mark.parametrize(("family", "kind"), CASES)
@torch.no_grad()
def test_an_answer_meets_perturbed_weights_after_a_context_at_theta(family, kind, models):
    directory, plain = models(family)
    engine = start_engine(directory, sparsity=0.0, **BY_EXAMPLE)
    batch = BATCHES[kind]
    if kind in IN_SHARED_ROWS:
        batch = pack(batch, IN_SHARED_ROWS[kind])
        assert len(batch.inputs["input_ids"]) < len(CONTEXTS)
    probes = (KeyedProbe(KEYS, SCALE), KeyedProbe(KEYS, -SCALE), KeyedProbe(KEYS[::-1], SCALE))
    outputs = engine.run(batch, Perturbation(probes, DROPPED))
    for probe, output in zip(probes, outputs, strict=True):
        expected = plain.outputs(BATCHES[kind], probe)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


@torch.no_grad()
def test_dense_directions_meet_them_likewise(models):
    directory, plain = models("llama")
    engine = start_engine(directory, sparsity=0.0, perturbed_tokens="answers")
    batch = BATCHES["candidates"]
    # At theta itself, all directions are the same point.
    probes = (KeyedProbe(KEYS[:1], 0.0), KeyedProbe(KEYS[:1], SCALE), KeyedProbe(KEYS[:1], -SCALE))
    at_theta, plus, minus = engine.run(batch, Perturbation(probes))
    expected = plain.outputs(batch, KeyedProbe(KEYS, 0.0))
    torch.testing.assert_close(at_theta, expected, atol=2e-5, rtol=1e-4)
    assert (plus - minus).abs().max() > 1e-3


def test_a_context_is_read_once_and_a_probe_runs_the_tokens_of_its_answer(models):
    engine = start_engine(models("llama")[0], sparsity=0.0, **BY_EXAMPLE)
    shapes = []
    block = engine.module.get_submodule(engine.layout.path)[1]
    block.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape[:2])))
    probes = (KeyedProbe(KEYS, SCALE), KeyedProbe(KEYS, -SCALE), KeyedProbe(KEYS, 2 * SCALE))
    engine.run(BATCHES["candidates"], Perturbation(probes))
    # Three candidates of each of four examples have one context. The longest answer is read up to
    # its second token but one: before each of its three tokens, there are logits.
    assert shapes == [(4, 11), (3 * 12, 3)]


@pytest.mark.parametrize(
    ("config", "peft", "text"),
    [
        (
            Lfm2Config(**TINY, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
            None,
            "keeps nothing of them but keys and values, and Lfm2ForCausalLM does not",
        ),
        (Phi3Config(**TINY, **LONGROPE, pad_token_id=1), None, "Phi3ForCausalLM does not"),
        (CamembertConfig(**TINY, is_decoder=True), None, "CamembertForCausalLM does not"),
        (FAMILIES["llama"][0], PeftConfig(kind="prefix"), "without the prefix that is trained"),
    ],
)
def test_models_whose_contexts_cannot_stay_are_refused(config, peft, text, tmp_path):
    random_model(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=text):
        start_engine(tmp_path, peft=peft, perturbed_tokens="answers")
