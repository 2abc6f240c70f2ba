"""Objectives: losses of logits, and rewards of the package's form and of TRL's."""

import asyncio
import math
import os
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from lezo_ds.data.examples import EncodedExample, Example
from lezo_ds.data.mezo import TASKS
from lezo_ds.data.objectives import LOSSES, load_objective, training_objective
from lezo_ds.data.rewards import Reward, Rewards, judges_answers, reward
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch

SQUAD = TASKS["squad"]
RECORDS = (
    {"prompt": "2 + 2?", "solution": "4", "level": 1},
    {"prompt": "3 + 5?", "solution": "9", "level": 2},
)
EXAMPLES = tuple(Example(record["prompt"], (), None, record=record) for record in RECORDS)
TEXTS = MicroBatch({}, 2, examples=EXAMPLES)
QUESTION = {"role": "user", "content": "Hello"}


# As the documentation of TRL has them.
def accuracy_reward(completions, solution, **kwargs):
    pairs = zip(completions, solution, strict=True)
    return [1.0 if content == right else 0.0 for content, right in pairs]


def format_reward_func(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def hard_ones_reward(prompts, completions, level, **kwargs):
    assert "prompt" not in kwargs
    lengths = [len(prompt) + len(text) for prompt, text in zip(prompts, completions, strict=False)]
    return [length if which > 1 else None for length, which in zip(lengths, level, strict=False)]


def by_name_reward(completions, **fields):
    return np.array([None, len(completions[1])], dtype=object)


async def easy_ones_reward(completions, level, **kwargs):
    await asyncio.sleep(0)
    return tuple(None if which > 1 else 3 for which in level)


def turns_reward(prompts, completions, **kwargs):
    assert prompts == [[QUESTION], [QUESTION]]
    assert completions[0] == [{"role": "assistant", "content": "4"}]
    prompts[0].clear()  # which must not reach a later call
    return [1, 2]


@reward
def brevity(answers, records):
    return [-len(answer) for answer in answers]


@reward
def marked(completions, others):  # called by position, whatever its parameters are called
    return [len(text) + len(record) for text, record in zip(completions, others, strict=True)]


@reward
def emptying(answers, records):
    return [len(record.pop("solution")) for record in records]


@reward
def leaving(answers, records):
    os.chdir("/")
    return [1, 1]


def half_each(logits, batch):
    return torch.full((len(batch.examples),), 0.5)


def named(name):
    return f"test_rewards:{name}"


def loss_of(name, answers, batch=TEXTS):
    return load_objective(named(name), SQUAD).loss(answers, batch).tolist()


@pytest.mark.parametrize(
    ("name", "answers", "losses"),
    [
        ("accuracy_reward", ["4", "8"], [-1.0, 0.0]),
        ("brevity", ["4", "\n\n  10 \n"], [1.0, 4.0]),  # tidy answers
        ("marked", ["4", "10"], [-4.0, -5.0]),
        ("hard_ones_reward", ["4", " 8\n"], [None, -9.0]),  # answers as written
        ("by_name_reward", ["4", " 8\n"], [None, -3.0]),
        ("easy_ones_reward", ["4", "8"], [-3.0, None]),
    ],
)
def test_a_reward_gets_what_its_form_asks_for(name, answers, losses):
    found = [None if math.isnan(loss) else loss for loss in loss_of(name, answers)]
    assert found == losses
    assert load_objective(named(name), SQUAD).reads_answers


def test_turns_of_a_chat_are_lists_as_in_trl():
    turns = (QUESTION, {"role": "assistant", "content": "gold"})
    asked = replace(EXAMPLES[0], messages=turns, learned=(1,))
    chat = replace(TEXTS, examples=(asked, replace(asked, messages=turns[:1], learned=())))
    answers = ["<think>a</think><answer>b</answer>", "b"]
    assert loss_of("format_reward_func", answers, chat) == [-1.0, 0.0]
    for _ in range(2):
        assert loss_of("turns_reward", ["4", "8"], chat) == [-1.0, -2.0]


def test_what_a_reward_changes_in_a_record_reaches_no_later_call():
    assert loss_of("emptying", ["", ""]) == loss_of("emptying", ["", ""]) == [-1.0, -1.0]


def test_code_that_changes_the_working_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaves.py").write_text(
        "import os\nos.chdir('/')\nfrom test_rewards import brevity\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in (named("leaving"), "leaves:brevity"):
        with pytest.raises(UserError, match=f"={name} changed the working directory to /, .*fix: "):
            load_objective(name, SQUAD).loss(["", ""], TEXTS)
        os.chdir(tmp_path)


def test_several_rewards_are_trls_weighted_sum_of_those_that_apply():
    names = {"hard_ones_reward": 2.0, "easy_ones_reward": 0.5, "by_name_reward": 1.0}
    objective = load_objective({named(name): w for name, w in names.items()}, SQUAD)
    assert objective.rewards.names == tuple(names)
    scores = objective.rewards.scores(["4", "10"], EXAMPLES)
    # GRPOTrainer: (rewards_per_func * weights).nansum(dim=1)
    expected = np.nansum(scores.numpy() * np.array(list(names.values())), axis=1)
    assert objective.loss(["4", "10"], TEXTS).tolist() == (-expected).tolist() == [-1.5, -18.0]
    nothing = torch.full((1, 3), math.nan)
    assert objective.rewards.loss_of(nothing).isnan().all()


def test_functions_of_one_name_in_two_modules_are_told_apart():
    other = Reward("elsewhere:brevity", brevity)
    rewards = Rewards((Reward(named("brevity"), brevity), other, Reward(named("marked"), marked)))
    assert rewards.names == (named("brevity"), "elsewhere:brevity", "marked")


def test_what_is_no_reward_has_no_weight():
    assert not judges_answers(max)  # which has no signature
    for other in ("task", named("half_each")):
        with pytest.raises(UserError, match=f"has weights, and {other} is not a reward"):
            load_objective({named("brevity"): 1.0, other: 1.0}, SQUAD)


NO_NUMBERS = [[1e308, 0.0], [10**400, 0], [10**5000, 0], [math.inf, 0.0], ["1", "2"], [1.0]]
NO_NUMBERS += [[[1.0], [2.0]], 1.0, None, [1j, 0], {"a": 1.0, "b": 2.0}]
NO_NUMBERS += [torch.zeros(2, dtype=torch.complex64)]


@pytest.mark.parametrize("values", NO_NUMBERS, ids=range(len(NO_NUMBERS)))
def test_what_is_no_number_for_each_answer_is_refused(values):
    judge = Reward("own:judge", reward(lambda answers, records: values))
    with pytest.raises(UserError, match=r"not one reward per answer.*a list of 2 numbers"):
        judge.scores(["a", "b"], EXAMPLES)


PAD = 1
ENCODED = [
    EncodedExample(((0, 5, 8), (0, 5, 9, 10)), ((0, 0, 1), (0, 0, 1, 1)), 0),
    EncodedExample(((0, 6, 11, 12),), ((0, 0, 1, 1),), 0),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_finite_gradients_are_computed_in_float32_whatever_the_logits(loss, dtype):
    objective = LOSSES[loss]
    batch = objective.build_batch(ENCODED, PAD)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(batch.selection.rows), 64, generator=generator)
    logits = logits.to(dtype).requires_grad_()
    losses = objective.loss(logits, batch)
    torch.testing.assert_close(losses, objective.loss(logits.float(), batch), rtol=0, atol=0)
    losses.sum().backward()
    assert logits.grad.isfinite().all()  # also of an example with fewer candidates than others


@reward
def as_long_as_asked(answers, records):
    pairs = zip(answers, records, strict=True)
    return [len(answer) == record["wanted"] for answer, record in pairs]


def interrupted(answers, records):
    raise KeyboardInterrupt


OWN = {
    "no losses": lambda logits, batch: torch.ones(len(batch.examples), dtype=torch.int64),
    "absent": reward(lambda answers, records: [record["absent"] for record in records]),
    "exit": reward(lambda answers, records: sys.exit(0)),
    "interrupt": reward(interrupted),
}


def answered(*records):
    examples = tuple(Example("", (), None, record=record) for record in records)
    return MicroBatch({}, len(records), examples=examples)


def test_objectives_are_those_of_the_task_or_named_in_a_module():
    for task in (TASKS["sst2"], TASKS["copa"], TASKS["squad"]):
        assert load_objective("task", task) == training_objective(task)
    assert load_objective("f1", TASKS["squad"]).reads_answers
    objective = load_objective("test_rewards:half_each", TASKS["copa"])
    batch = objective.build_batch(ENCODED, PAD)
    assert batch.weight == len(ENCODED)
    assert objective.loss(torch.zeros(3), answered({}, {})).tolist() == [0.5] * 2
    judged = load_objective("test_rewards:as_long_as_asked", TASKS["sst2"])
    assert (judged.reads_answers, judged.is_reward) == (True, True)
    assert judged.loss(["abc", ""], answered({"wanted": 3}, {"wanted": 3})).tolist() == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("no losses", UserError, r"own returned tensor\(\[1, 1\]\), not one loss per example"),
        ("absent", UserError, r"own failed: KeyError: 'absent' \(.*test_rewards.py line \d+\)"),
        ("exit", UserError, "own failed: SystemExit: 0 "),
        ("interrupt", KeyboardInterrupt, "^$"),
    ],
)
def test_a_function_that_fails_is_named_and_an_interrupt_is_one(name, error, message, monkeypatch):
    monkeypatch.setitem(globals(), "own", OWN[name])
    objective = load_objective("test_rewards:own", TASKS["sst2"])
    with pytest.raises(error, match=message):
        objective.loss(["a", "b"], answered({}, {}))


def test_an_objective_that_changes_its_batch_gets_the_same_one_again(monkeypatch):
    def spoils(logits, batch):
        batch.examples[0].record["wanted"].append(1)
        batch.labels["label"] += 1
        return batch.labels["label"].double()

    monkeypatch.setitem(globals(), "own", spoils)
    objective = load_objective("test_rewards:own", TASKS["sst2"])
    batch = replace(answered({"wanted": []}), labels={"label": torch.tensor([1])})
    assert [objective.loss(torch.zeros(1), batch).tolist() for _ in range(2)] == [[2.0], [2.0]]
    assert batch.examples[0].record == {"wanted": []}
