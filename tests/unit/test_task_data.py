from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from assets import write_reader
from lezo_ds.data.sampling import batch_indices
from ranks import run_ranks
from tiny_runs import start_engine
from tiny_tasks import NUM_POSITIONS, task_config, write_tasks, write_writer

from lezo_ds.config import GenerationConfig
from lezo_ds.data.objectives import reads_answers
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError


@reads_answers
def num_words(answers, batch):
    return torch.tensor([float(len(answer.split())) for answer in answers])


def first_logit(logits, batch):
    slots = batch.labels["token_slots"][:, 0]
    return logits[slots, 0].float()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    write_writer(root / "writer")
    write_reader(root / "reader")
    write_tasks(root / "data")
    return root


def load(assets, task, model="writer", **changes):
    return load_task_data(task_config(assets / model, assets / "data", task, **changes))


def text(data, ids):
    """Return the text of token ids; the first is the BOS."""
    assert ids[0] == 0
    return data.tokenizer.decode(ids[1:])


def test_the_micro_batches_of_a_step_are_a_pure_function_of_the_seed_and_the_step(assets):
    config = task_config(assets / "writer", assets / "data", "copa")
    data = load_task_data(config)
    batch, again, other = data.batch(config, 3), data.batch(config, 3), data.batch(config, 4)
    assert len(batch) == 2
    shown = [[example.index for example in micro_batch.examples] for micro_batch in batch]
    assert [len(rows) for rows in shown] == [2, 2]
    assert (
        shown
        == [[e.index for e in m.examples] for m in again]
        != [[e.index for e in m.examples] for m in other]
    )
    assert torch.equal(batch[1].inputs["input_ids"], again[1].inputs["input_ids"])


@pytest.mark.parametrize(("task", "changes"), [("cb", {}), ("squad", {"train__objective": "f1"})])
def test_the_examples_of_a_step_are_sorted_by_length_before_they_are_cut(assets, task, changes):
    config = task_config(assets / "writer", assets / "data", task, **changes)
    data = load_task_data(config)
    train = data.train
    lengths_of = [len(ids) for ids in train.prompts] or [max(map(len, e.sequences)) for e in train.encoded]
    spared = 0
    for step in range(20):
        batch = data.batch(config, step)
        rows = [train.examples.index(example) for part in batch for example in part.examples]
        assert sorted(rows) == sorted(batch_indices(config.seed, step, len(train.examples), 4))
        lengths = [lengths_of[row] for row in rows]
        assert lengths == sorted(lengths)
        narrow, wide = (part.inputs["input_ids"].shape[1] for part in batch)
        assert lengths[1] - 1 <= narrow < lengths[1] + 8  # widths are multiples of 8
        assert lengths[3] - 1 <= wide < lengths[3] + 8
        spared += wide - narrow
    assert spared > 0


def _examples_of_my_passes(model, data, num_steps):
    """Return the ids of the examples in each of this rank's forward passes, by step."""
    config = task_config(model, data, "copa", train__batch_size=8)
    task_data = load_task_data(config)
    engine = start_engine(model)
    batches = [task_data.batch(config, step) for step in range(num_steps)]
    return [[[e.index for e in batch[i].examples] for i in engine._my_share(len(batch))] for batch in batches]


@pytest.mark.distributed
def test_the_examples_of_the_first_thousand_batches_never_change_on_1_2_or_4_ranks(assets):
    for num_ranks in (1, 2, 4):
        by_rank = run_ranks(_examples_of_my_passes, num_ranks, assets / "writer", assets / "data", 1000)
        # Pass i is rank i % num_ranks's.
        batches = [
            [ids for passes in zip(*ranks, strict=True) for ids in passes]
            for ranks in zip(*by_rank, strict=True)
        ]
        digest = hashlib.sha256(json.dumps(batches).encode()).hexdigest()
        assert digest == "599df1c2279b2699cf94acd100663b5583956d621c6b94521c364cd7d4d146d2", num_ranks


def test_prompts_to_continue_are_made_for_the_splits_that_are_answered_only(assets):
    squad = load(assets, "squad")
    assert [len(split.prompts) for split in (squad.train, squad.dev, squad.test)] == [0, 5, 7]
    f1 = load(assets, "squad", train__objective="f1")
    assert [len(split.prompts) for split in (f1.train, f1.dev, f1.test)] == [12, 5, 7]
    copa = load(assets, "copa")
    assert copa.generation is None
    assert copa.test.prompts == ()
    for example, prompt in zip(squad.test.examples, squad.test.prompts, strict=True):
        assert text(squad, prompt) == example.prompt


def test_prompts_leave_room_for_the_answer(assets, caplog):
    data = load(assets, "squad", data__max_length=80)
    assert max(map(len, data.test.prompts)) == 80 - GenerationConfig().max_new_tokens
    assert all(prompt[0] == 0 for prompt in data.test.prompts)
    assert "7 of 7 examples are longer than max_length 30 tokens and were cut on the left" in caplog.text


def test_the_first_training_examples_are_shown_before_every_question(assets):
    plain = load(assets, "copa")
    data = load(assets, "copa", method="icl", data__num_demonstrations=2, data__max_length=250)
    shown = [e.prompt + e.candidates[e.label] for e in plain.train.examples[:2]]
    for asked, without in zip(data.test.examples, plain.test.examples, strict=True):
        assert asked.demonstrations == "".join(f"{text}\n\n" for text in shown)
        assert replace(asked, demonstrations="") == without
    encoded = data.dev.encoded[0]
    first = data.dev.examples[0]
    whole = first.demonstrations + first.prompt + first.candidates[0]
    assert whole.endswith(text(data, encoded.sequences[0]))
    assert data.train.examples == plain.train.examples


def test_a_generating_task_has_demonstrations_too(assets):
    data = load(assets, "squad", method="icl", data__num_demonstrations=1)
    first = data.train.examples[0]
    assert text(data, data.test.prompts[0]).startswith((first.prompt + first.candidates[0]).strip() + "\n\n")


def test_more_demonstrations_than_training_examples_are_refused(assets):
    message = r"fewer training examples than data.num_demonstrations; got: 13 of 12; .* fix: set data.num_dem"
    with pytest.raises(UserError, match=message):
        load(assets, "copa", method="icl", data__num_demonstrations=13)


def test_null_prompts_are_encoded_where_scores_are_calibrated(assets):
    data = load(assets, "record", method="zero_shot_sfc")
    for example, null in zip(data.test.examples, data.test.null_encoded, strict=True):
        assert [text(data, ids) for ids in null.sequences] == [f"-{c}" for c in example.candidates]
        assert list(null.option_lengths) == list(map(len, example.candidates))
    assert data.train.null_encoded == ()
    assert load(assets, "record").test.null_encoded == ()


def test_a_task_without_a_null_prompt_cannot_be_calibrated(assets):
    with pytest.raises(UserError, match=r"need a task with a null prompt; .* fix: set method=zero_shot"):
        load(assets, "squad", method="zero_shot_sfc")


def test_an_objective_of_answers_gets_prompts_and_texts_for_any_task(assets):
    objective = "test_task_data:num_words"
    config = task_config(assets / "writer", assets / "data", "cb", train__objective=objective)
    data = load_task_data(config)
    (batch, _) = data.batch(config, 0)
    assert batch.generation == data.generation
    rows = zip(batch.inputs["input_ids"], batch.inputs["attention_mask"].bool(), strict=True)
    assert [text(data, ids[mask].tolist()) for ids, mask in rows] == [e.prompt for e in batch.examples]
    letter, space, end, newline = (data.tokenizer.encode([c])[0][-1] for c in "a b\n")
    tokens = torch.tensor([[letter, space, end, newline], [newline, letter, space, letter]])
    assert data.answers(tokens) == ["a b", ""]
    assert data.loss(tokens, batch).tolist() == [2.0, 0.0]


def test_an_objective_of_logits_is_a_mean_over_examples_not_tokens(assets):
    config = task_config(
        assets / "writer", assets / "data", "copa", train__objective="test_task_data:first_logit"
    )
    data = load_task_data(config)
    (batch, _) = data.batch(config, 0)
    assert batch.weight == 2
    assert load(assets, "copa").batch(config, 0)[0].weight == len(batch.labels["target_ids"]) > 2
    logits = torch.arange(float(len(batch.labels["target_ids"]))).unsqueeze(1)
    assert data.loss(logits, batch).tolist() == batch.labels["token_slots"][:, 0].tolist()


def test_adamw_needs_a_gradient(assets):
    with pytest.raises(UserError, match=r"adamw needs a loss with a gradient; got: train.objective=f1"):
        load(assets, "squad", method="adamw", train__objective="f1")


def test_a_model_that_writes_no_newline_cannot_answer(assets):
    with pytest.raises(UserError, match="no token for a newline"):
        load(assets, "squad", "reader", data__max_length=64)


@pytest.mark.parametrize(("task", "length"), [("copa", NUM_POSITIONS + 200), ("squad", NUM_POSITIONS + 200)])
def test_inputs_longer_than_the_models_positions_are_refused(assets, task, length):
    changes = {"method": "icl", "data__num_demonstrations": 12, "data__max_length": length}
    with pytest.raises(UserError, match=rf"longer than the model's positions; .*max_length={NUM_POSITIONS}"):
        load(assets, task, **changes)
    assert load(assets, task, **{**changes, "data__max_length": NUM_POSITIONS}).test.encoded[0].truncated


def test_a_generating_task_of_ones_own_cannot_be_calibrated(assets):
    own = {"data__prompt": "{question}", "data__completion": "{title}", "method": "zero_shot_sfc"}
    with pytest.raises(UserError, match=r"need a task with a null prompt"):
        load(assets, "squad", data__task="custom", **own)
