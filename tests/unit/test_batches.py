"""The examples of a step, and the layout of batches: padded, deduplicated, packed, dealt."""

import hashlib
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lezo_ds.data.batches import all_candidates, batch_indices, candidate_batch, token_batch
from lezo_ds.data.examples import EncodedExample
from lezo_ds.data.packing import deal, pack

PAD = 1


def encoded(context, *candidates, label=0):
    """One example by hand: token ids of the context and of each candidate."""
    sequences = tuple((0, *context, *candidate) for candidate in candidates)
    masks = [(False,) * (1 + len(context)) + (True,) * len(candidate) for candidate in candidates]
    return EncodedExample(sequences, tuple(masks), label)


def layout(batch):
    """Return ids, rows, positions and labels as lists."""
    chosen = batch.selection
    found = batch.inputs["input_ids"], chosen.rows, chosen.positions
    labels = {name: tensor.tolist() for name, tensor in batch.labels.items()}
    return (*(tensor.tolist() for tensor in found), labels)


def test_the_first_thousand_batches_never_change():
    batches = [batch_indices(42, step, num_examples=1000, batch_size=16) for step in range(1000)]
    digest = hashlib.sha256(json.dumps(batches).encode()).hexdigest()
    assert digest == "c4a61d8b2c7e90e055acdd7b5d0f1dd11ff14673b0f4ae1209b3612d3e4a569d"


@given(st.integers(0, 2**64 - 1), st.integers(1, 40), st.integers(1, 60))
def test_batches_laid_end_to_end_are_one_permutation_after_another(seed, num_examples, batch_size):
    stream = [
        index for step in range(8) for index in batch_indices(seed, step, num_examples, batch_size)
    ]
    assert len(stream) == 8 * batch_size
    for start in range(0, len(stream) - num_examples + 1, num_examples):
        assert sorted(stream[start : start + num_examples]) == list(range(num_examples))


def test_one_token_candidates_share_one_row_that_ends_before_them():
    batch = candidate_batch([encoded((5, 6), (8,), (9,)), encoded((7,), (8,), (9,), label=1)], PAD)
    ids = [[0, 5, 6, 1, 1, 1, 1, 1], [0, 7, 1, 1, 1, 1, 1, 1]]
    assert layout(batch) == (ids, [0, 1], [2, 1], {"label": [0, 1]})
    assert (batch.selection.vocabulary.tolist(), batch.weight) == ([8, 9], 2)


def test_candidates_that_are_not_alike_are_not_merged():
    other_context = EncodedExample(((0, 5, 8), (0, 6, 9)), ((False, False, True),) * 2, 0)
    other_order = [encoded((5,), (8,), (9,)), encoded((5,), (9,), (8,))]
    for examples in ([other_context], other_order, [encoded((5,), (8,), (9, 10))]):
        batch = candidate_batch(examples, PAD)
        assert batch.selection.vocabulary is None
        assert len(batch.inputs["input_ids"]) == sum(len(e.sequences) for e in examples)


def test_sequences_to_score_share_a_row_where_they_differ_in_the_last_token_only():
    sequences = ((0, 5, 8), (0, 5, 9), (0, 5, 8, 7), (0, 6, 8))
    masks = ((0, 0, 1), (0, 1, 1), (0, 0, 1, 1), (0, 0, 1))
    example = EncodedExample(sequences, masks, None)
    batch = token_batch(all_candidates([example]), PAD, share_rows=True)
    ids = [[0, 5, 1, 1, 1, 1, 1, 1], [0, 5, 8, 1, 1, 1, 1, 1], [0, 6, 1, 1, 1, 1, 1, 1]]
    labels = {"target_ids": [8, 5, 9, 8, 7, 8], "token_slots": [[0, -1], [1, 2], [3, 4], [5, -1]]}
    assert layout(batch) == (ids, [0, 0, 0, 1, 1, 2], [1, 0, 1, 1, 2, 1], labels)
    assert batch.weight == 6


@given(st.lists(st.integers(1, 99), min_size=1, max_size=12), st.integers(1, 6))
def test_dealt_micro_batches_differ_by_at_most_one_example(lengths, num_micro_batches):
    repeated = np.repeat(lengths, num_micro_batches)
    lengths = np.sort(repeated + np.arange(len(repeated)))
    rows = deal(np.arange(len(lengths)), num_micro_batches)
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    tokens = lengths[rows].reshape(num_micro_batches, -1).sum(1)
    assert tokens.max() - tokens.min() <= lengths[-1] - lengths[0]


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


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 3), st.integers(0, 9))
def test_a_packed_batch_wants_the_same_logits_of_fewer_tokens(lengths, candidates, num_start):
    options = [(5 + number, 6) for number in range(candidates)]
    starts = [range(7, 7 + num_start + length) for length in lengths]
    batch = candidate_batch([encoded(start, *options) for start in starts], PAD)
    packed = pack(batch, num_start)
    assert tokens_seen(packed) == tokens_seen(batch)
    num_sequences, width_before = batch.inputs["input_ids"].shape
    num_rows, width = packed.inputs["input_ids"].shape
    if packed is not batch:
        assert num_rows * width <= 0.9 * num_sequences * width_before
        # Contexts are there once, and the last token of a candidate is not read.
        own_lengths = [1 + length + candidates for length in lengths]
        num_own = sum(own_lengths)
        assert num_rows == 1 and num_start + num_own <= width < num_start + num_own + 8
    assert (packed.weight, packed.labels.keys()) == (batch.weight, batch.labels.keys())


def test_an_example_that_a_batch_has_twice_is_two_examples_in_a_shared_row():
    twice = [encoded(range(7, 19), (5, 6), (4, 6))] * 2
    packed = pack(candidate_batch(twice, PAD))
    assert len(packed.inputs["input_ids"]) == 1
    assert packed.num_examples == 2
    # Each has its own context of 13 tokens, and one token of each candidate.
    assert packed.token_examples[0].tolist()[:30] == [0] * 15 + [1] * 15
