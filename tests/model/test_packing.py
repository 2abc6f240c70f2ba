from __future__ import annotations

import numpy as np
import pytest
import torch
from assets import write_records
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from tiny_models import FAMILIES, tiny_model
from tiny_runs import VOCABULARY, start_engine, write_model
from tiny_tasks import task_config, write_writer
from transformers import BloomConfig, FalconConfig, FalconH1Config, JambaConfig, MambaConfig, OPTConfig

from lezo_ds.data.batches import candidate_batch, teacher_forcing_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.objectives import classification_loss, teacher_forcing_loss
from lezo_ds.data.packing import DEALING, can_pack, deal, pack
from lezo_ds.data.task_data import load_task_data
from lezo_ds.forward.batch import LogitSelection, MicroBatch

PAD = 1
LENGTHS = (5, 21, 3, 9, 11, 2, 7, 14)
PACKING = sorted(set(FAMILIES) - {"mistral", "gemma2"})  # the windows of these two are shorter


def examples_of(lengths, num_candidates=2, vocabulary=48, option_length=1, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def tokens(count):
        return tuple(torch.randint(3, vocabulary, (count,), generator=generator).tolist())

    shared = [tokens(option_length) for _ in range(num_candidates)]
    contexts = [tokens(length) for length in lengths]
    return [
        EncodedExample(tuple((*c, *o) for o in shared), (option_length,) * num_candidates, 0, False)
        for c in contexts
    ]


def tokens_seen(batch):
    """Return what each wanted logit may depend on: the tokens up to it, and their positions."""
    seen = []
    for row, position in zip(batch.selection.rows, batch.selection.positions, strict=True):
        ids = batch.inputs["input_ids"][row]
        if "attention_mask" not in batch.inputs:
            seen.append((ids[: position + 1].tolist(), list(range(position + 1))))
            continue
        visible = batch.inputs["attention_mask"][row, 0, position].nonzero().flatten()
        seen.append((ids[visible].tolist(), batch.inputs["position_ids"][row, visible].tolist()))
    return seen


@given(lengths=st.lists(st.integers(1, 99), min_size=1, max_size=12), num_micro_batches=st.integers(1, 6))
def test_dealt_micro_batches_differ_by_at_most_one_example(lengths, num_micro_batches):
    lengths = np.sort(np.repeat(lengths, num_micro_batches) + np.arange(len(lengths) * num_micro_batches))
    rows = deal(np.arange(len(lengths)), num_micro_batches)
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    tokens = lengths[rows].reshape(num_micro_batches, -1).sum(1)
    assert tokens.max() - tokens.min() <= lengths[-1] - lengths[0]


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), candidates=st.integers(1, 3))
def test_a_packed_batch_wants_the_same_logits_of_the_same_tokens_in_no_more_rows(lengths, candidates):
    batch = candidate_batch(examples_of(lengths, candidates, option_length=2), PAD)
    packed = pack(batch)
    assert tokens_seen(packed) == tokens_seen(batch)
    num_rows, width = packed.inputs["input_ids"].shape
    assert width == batch.inputs["input_ids"].shape[1]
    needed = candidates * sum(length + 1 for length in lengths)
    if packed is not batch:
        assert num_rows <= 0.75 * len(batch.inputs["input_ids"])
        assert num_rows <= 2 * -(-needed // width)  # first fit leaves no two rows half empty
    assert (packed.weight, packed.labels.keys()) == (batch.weight, batch.labels.keys())


def test_a_batch_without_room_stays_as_it_is():
    batch = candidate_batch(examples_of([9, 9, 9]), PAD)
    assert pack(batch) is batch


def test_a_batch_of_all_logits_stays_as_it_is():
    batch = MicroBatch({"input_ids": torch.zeros(2, 8, dtype=torch.int64)}, 2)
    assert pack(batch) is batch


def test_tokens_behind_the_last_wanted_logit_are_left_out():
    selection = LogitSelection(torch.tensor([0, 1, 1]), torch.tensor([2, 0, 3]))
    tokens = torch.arange(3, 19).view(2, 8)
    packed = pack(MicroBatch({"input_ids": tokens}, 2, selection=selection))
    assert packed.inputs["input_ids"].tolist() == [[11, 12, 13, 14, 3, 4, 5, 0]]
    assert packed.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert (packed.selection.rows.tolist(), packed.selection.positions.tolist()) == ([0, 0, 0], [6, 0, 3])


def logits_of(model, batch):
    logits = model(**batch.inputs).logits
    return logits[batch.selection.rows, batch.selection.positions]


@pytest.mark.parametrize("family", PACKING)
def test_logits_and_gradients_are_those_of_rows_of_their_own(family):
    assert can_pack(FAMILIES[family][0], 32)
    model = tiny_model(family)
    batch = candidate_batch(examples_of(LENGTHS, option_length=2), PAD)
    packed = pack(batch)
    assert 2 * len(packed.inputs["input_ids"]) < len(batch.inputs["input_ids"])
    logits, gradients = [], []
    for each in (batch, packed):
        model.zero_grad()
        found = logits_of(model, each)
        classification_loss(found, each).sum().backward()
        logits.append(found.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(*logits, rtol=1e-5, atol=1e-5)
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", PACKING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_a_sequence_depends_on_its_neighbours(family, dtype):
    model = tiny_model(family, dtype)
    examples = examples_of(LENGTHS)
    others = examples_of(LENGTHS, seed=1)
    mixed = [
        own if index % 2 else other for index, (own, other) in enumerate(zip(examples, others, strict=True))
    ]
    batches = [pack(teacher_forcing_batch(these, PAD)) for these in (examples, mixed)]
    assert torch.equal(batches[0].inputs["attention_mask"], batches[1].inputs["attention_mask"])
    with torch.no_grad():
        logits = [logits_of(model, batch) for batch in batches]
    assert torch.equal(logits[0][1::2], logits[1][1::2])
    assert not torch.equal(logits[0][::2], logits[1][::2])


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(),
        FalconConfig(alibi=True),
        JambaConfig(),
        FalconH1Config(),
        MambaConfig(),
        FAMILIES["mistral"][0],
        FAMILIES["gemma2"][0],
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_mix_tokens_otherwise_or_see_few_of_them_are_not_packed(config):
    assert not can_pack(config, 64)


def test_a_window_that_no_sequence_fills_does_not_hinder():
    assert can_pack(FAMILIES["mistral"][0], 8)
    assert not can_pack(FAMILIES["mistral"][0], 9)


def test_attention_that_takes_no_mask_of_booleans_is_not_packed():
    config = OPTConfig()
    config._attn_implementation = "eager"
    assert not can_pack(config, 64)


def _steps(directory, forward, packed):
    engine = start_engine(directory, num_ranks=2, probes_per_pass=forward, sparsity=0.25)
    found = []
    for step in range(3):
        examples = examples_of(LENGTHS, vocabulary=VOCABULARY, seed=step)
        batch = [teacher_forcing_batch(part, PAD) for part in (examples[:4], examples[4:])]
        if packed:
            batch = [pack(part) for part in batch]
            assert all(len(part.inputs["input_ids"]) < 4 for part in batch)
        record = engine.train_batch(batch, teacher_forcing_loss)
        found += [record.loss, *record.projected_grads]
    return found


@pytest.mark.distributed
def test_a_step_on_packed_rows_is_that_on_padded_ones_on_sharded_ranks(tmp_path):
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = OPTConfig(vocab_size=VOCABULARY, word_embed_proj_dim=16, max_position_embeddings=64, **sizes)
    directory = write_model(config, tmp_path / "model")
    padded = run_ranks(_steps, 2, directory, 2, False)
    packed = run_ranks(_steps, 2, directory, 2, True)
    assert packed[0] == packed[1] == run_ranks(_steps, 2, directory, 1, True)[0]
    assert packed[0] == pytest.approx(padded[0], rel=1e-3)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    write_writer(root / "writer")
    records = [{"sentence": "so " * (1 + number % 4 * 4), "label": number % 2} for number in range(24)]
    for split in ("train", "validation"):
        write_records(root / "data" / "sst2" / f"{split}.jsonl", records)
    return root


def test_training_is_packed_unless_it_is_switched_off_or_there_is_a_prefix(assets):
    def rows(**changes):
        sizes = {"train__micro_batch_size": 12, "train__batch_size": 12}
        config = task_config(assets / "writer", assets / "data", "sst2", **sizes, **changes)
        return [len(batch.inputs["input_ids"]) for batch in load_task_data(config).batch(config, 0)]

    assert rows()[0] < 18
    assert rows(train__packed=False) == [24]
    assert rows(peft__kind="prefix") == [24]


def test_micro_batches_on_packed_rows_get_long_and_short_examples(assets):
    def laid_out(**changes):
        sizes = {"train__micro_batch_size": 6, "train__batch_size": 24} | changes
        config = task_config(assets / "writer", assets / "data", "sst2", **sizes)
        data = load_task_data(config)
        lengths = [[len(example.prompt) for example in batch.examples] for batch in data.batch(config, 0)]
        return [sum(part) for part in lengths], data.layout_facts(config)

    dealt, facts = laid_out()
    assert max(dealt) < 1.2 * min(dealt)
    assert facts == DEALING
    for changes in ({"train__packed": False}, {"train__micro_batch_size": 3}):
        by_length, facts = laid_out(**changes)
        assert max(by_length) > 3 * min(by_length)
        assert facts == {}
    assert laid_out(train__micro_batch_size=24)[1] == {}
