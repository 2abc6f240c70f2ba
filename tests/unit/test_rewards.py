"""Rewards of several functions, and functions that were written for TRL's GRPOTrainer."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Example, Message
from test_own_tasks import ANSWER, config_of

from lezo_ds.data.objectives import load_objective
from lezo_ds.data.rewards import Reward, Rewards, judges_answers, reward
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.runs.records import refuse_code

SQUAD = TASKS["squad"]
TEXTS = MicroBatch(
    {},
    2,
    examples=(
        Example("2 + 2 =", (), None, record={"prompt": "2 + 2 =", "solution": "4", "level": 1}),
        Example("3 + 4 =", (), None, record={"prompt": "3 + 4 =", "solution": "7", "level": 2}),
    ),
)


# As the documentation of TRL has them.
def accuracy_reward(completions, solution, **kwargs):
    return [
        1.0 if content == right else 0.0
        for content, right in zip(completions, solution, strict=False)
    ]


def format_reward_func(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def hard_ones_reward(prompts, completions, level, **kwargs):
    assert "prompt" not in kwargs
    lengths = [len(prompt) + len(text) for prompt, text in zip(prompts, completions, strict=False)]
    return [length if which > 1 else None for length, which in zip(lengths, level, strict=False)]


def by_name_reward(**fields):
    return np.array([None, len(fields["completions"][1])], dtype=object)


async def easy_ones_reward(completions, level, **kwargs):
    await asyncio.sleep(0)
    return tuple(None if which > 1 else 3 for which in level)


@reward
def brevity(answers, records):
    return [-len(answer) for answer in answers]


def halves(logits, batch):
    return logits[:1] / 2


def named(name):
    return f"test_rewards:{name}"


def test_a_reward_function_of_trl_gets_prompts_completions_and_fields_by_name():
    objective = load_objective(named("accuracy_reward"), SQUAD)
    assert objective.is_reward and objective.reads_answers
    assert objective.loss(["4", "8"], TEXTS).tolist() == [-1.0, 0.0]


def test_a_reward_of_trl_may_take_all_by_name_and_return_an_array_with_none():
    objective = load_objective(named("by_name_reward"), SQUAD)
    assert objective.is_reward
    assert objective.loss(["4", " 8\n"], TEXTS).tolist() == [0.0, -3.0]


def test_a_reward_may_be_async_and_return_a_tuple():
    objective = load_objective(named("easy_ones_reward"), SQUAD)
    assert objective.loss(["4", "8"], TEXTS).tolist() == [-3.0, 0.0]


def test_turns_of_a_chat_are_lists_as_in_trl():
    turns = (Message("user", "Hello"), Message("assistant", "gold"))
    chat = replace(TEXTS, examples=(replace(TEXTS.examples[0], messages=turns),) * 2)
    objective = load_objective(named("format_reward_func"), SQUAD)
    answers = ["<think>a</think><answer>b</answer>", "b"]
    assert objective.loss(answers, chat).tolist() == [-1.0, 0.0]


def turns_reward(prompts, completions, **kwargs):
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "7", "name": "f", "tool_call_id": "c1"}
    assert prompts == [[QUESTION, call, result], [QUESTION]]
    assert completions[0] == [{"role": "assistant", "content": "4"}]
    assert completions[1] == [{"role": "assistant", "content": "Well: <think>8"}]
    return [1, 2]


QUESTION = {"role": "user", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_turns_have_all_their_keys_and_an_answer_its_start_as_in_trl():
    question = Message("user", "Hello")
    called = Message("assistant", "", 0, {"tool_calls": [CALL]})
    result = Message("tool", "7", 1, {"name": "f", "tool_call_id": "c1"})
    begun = (question, Message("assistant", "Well: <think>", 0))
    examples = [
        replace(TEXTS.examples[0], messages=turns) for turns in ((question, called, result), begun)
    ]
    objective = load_objective(named("turns_reward"), SQUAD)
    chat = replace(TEXTS, examples=tuple(examples))
    assert objective.loss(["4", "8"], chat).tolist() == [-1.0, -2.0]


def test_several_rewards_are_a_weighted_sum_of_those_that_apply():
    weights = {named("accuracy_reward"): 2.0, named("hard_ones_reward"): 0.5, named("brevity"): 1}
    objective = load_objective(weights, SQUAD)
    assert objective.rewards.names == ("accuracy_reward", "hard_ones_reward", "brevity")
    # 2 * 1 - 1, without the second one; and 2 * 0 + 0.5 * (7 + 2) - 2
    assert objective.loss(["4", "10"], TEXTS).tolist() == [-1.0, -2.5]


@reward
def marked(completions, others):  # called by position, whatever its parameters are called
    return [len(text) + len(record) for text, record in zip(completions, others, strict=True)]


def test_rewards_of_trl_get_answers_as_written_and_others_tidy_ones():
    chosen = load_objective(named("brevity"), SQUAD)
    assert chosen.loss(["4", "\n\n  10 \n"], TEXTS).tolist() == [1.0, 4.0]


def test_the_decorator_decides_how_a_reward_is_called():
    objective = load_objective(named("marked"), SQUAD)
    assert objective.loss(["4", "10"], TEXTS).tolist() == [-4.0, -5.0]


def test_functions_of_one_name_in_two_modules_are_told_apart():
    other = Reward("elsewhere:brevity", brevity)
    rewards = Rewards((Reward(named("brevity"), brevity), other, Reward(named("marked"), marked)))
    assert rewards.names == (named("brevity"), "elsewhere:brevity", "marked")


def test_a_function_without_a_signature_is_no_reward():
    assert not judges_answers(max)


@pytest.mark.parametrize("name", ["task", "halves"])
def test_weights_are_for_rewards_alone(name):
    other = name if name == "task" else named(name)
    with pytest.raises(UserError, match=f"has weights, and {other} is no reward"):
        load_objective({named("brevity"): 1.0, other: 1.0}, SQUAD)


def test_a_recorded_map_of_rewards_is_code_that_the_command_must_name():
    config = config_of(ANSWER, train={"objective": {named("brevity"): 1.0}})
    recorded = {"train.objective": config.train.objective}
    with pytest.raises(UserError, match="imported only if the command names it"):
        refuse_code(recorded, [])
    refuse_code(recorded, [f"train.objective={{{named('brevity')}: 1.0}}"])
    recorded = {"data.task": "mine:Task", "data.metric": "mine:score", "train.objective": "task"}
    with pytest.raises(UserError, match=r"add data\.task=mine:Task data\.metric=mine:score$"):
        refuse_code(recorded, [])
