"""Rewards: user functions that judge a model's answers (docs/rewards.md).

A function is marked by the decorator `reward`, or is one of TRL's GRPOTrainer, whose parameters are
`prompts`, `completions` and the fields of records by name:

    @reward
    def short(answers, records): ...                          texts, records -> numbers

    def short(completions, **fields): ...                     texts, or lists of turns of chats
    def right(prompts, completions, solution, **fields): ...  -> numbers, or None: does not apply

Several functions with weights make one reward: the weighted sum of those that apply. An answer that
no function judges has no reward (NaN). It counts in no mean, and gives no direction an advantage.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lezo_ds.data.examples import ASSISTANT, Example
from lezo_ds.data.generation import tidy
from lezo_ds.data.tasks import TRIED_ANSWERS
from lezo_ds.data.template import Record
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.user_code import call_of_user, shown

RewardFunction = Callable[[Sequence[str], Sequence[Record]], Any]
"""(answers, record of each with all its fields) -> a number for each. The samples of a record are
neighbors."""

LARGEST_REWARD = 1e100
"""The largest size of a reward. Sums of squares of larger ones would not be finite."""

_TRL_COLUMNS = {"prompt", "completion", "completion_ids"}
"""Fields that TRL does not pass on, as functions get what belongs to them in other parameters."""


def reward(function: RewardFunction) -> RewardFunction:
    """Mark a function that gives each generated answer a reward. Training maximizes the reward."""
    function.is_reward = True  # type: ignore[attr-defined]
    return function


def judges_answers(function: Any) -> bool:
    """Return whether a function is a reward, ours or of TRL's, and no loss of logits."""
    if _is_marked(function):
        return True
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions of C have no signature
        return False
    return "completions" in parameters


def _is_marked(function: Any) -> bool:
    return bool(getattr(function, "is_reward", False))


@dataclass(frozen=True)
class Reward:
    """One function.

    Attributes:
        name: package.module:function.
        function: the function, as `judges_answers` knows it.
        weight: of its numbers in the sum.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    def scores(self, answers: Sequence[str], examples: Sequence[Example]) -> Tensor:
        """Return the reward of each answer, float64 [answers], NaN where it does not apply.

        Answers are as the model wrote them. Functions of TRL's get these, and others `tidy` ones.
        """
        # Copies: what the function changes in a record must not reach its later calls. A rank that
        # judges other answers, or a run that starts again, would else see other records.
        records = [copy.deepcopy(example.record) for example in examples]
        key = f"train.objective={self.name}"
        if _is_marked(self.function):  # it gets answers and records, whatever it calls them
            values = call_of_user(key, self.function, [*map(tidy, answers)], records)
        else:
            arguments = _trl_arguments(answers, examples, records)
            values = call_of_user(key, self.function, **arguments)
        numbers = values.tolist() if hasattr(values, "tolist") else values
        if isinstance(numbers, list | tuple):
            numbers = [math.nan if value is None else value for value in numbers]
        try:
            rewards = torch.as_tensor(numbers, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError):
            rewards = torch.empty(())
        is_fine = (rewards.abs() <= LARGEST_REWARD) | rewards.isnan()
        if rewards.shape != (len(answers),) or not is_fine.all():
            raise UserError(
                f"{key} returned {shown(values)}, not one reward per answer",
                fix=f"return a list of {len(answers)} numbers, in the order of the answers, each "
                f"of a size of at most {LARGEST_REWARD:g}, or None where the reward does not apply",
            )
        return rewards


def _trl_arguments(
    answers: Sequence[str], examples: Sequence[Example], records: Sequence[Record]
) -> dict[str, Any]:
    """Return the arguments of a function of TRL's: turns of a chat are lists of dicts."""
    prompts: list[Any] = []
    completions: list[Any] = []
    for answer, example in zip(answers, examples, strict=True):
        if not example.messages:
            prompts.append(example.prompt)
            completions.append(answer)
            continue
        prompts.append(copy.deepcopy(list(example.asked)))
        completions.append([{"role": ASSISTANT, "content": answer}])
    names = dict.fromkeys(name for record in records for name in record)
    fields = {
        name: [record.get(name) for record in records] for name in names if name not in _TRL_COLUMNS
    }
    return {**fields, "prompts": prompts, "completions": completions}


@dataclass(frozen=True)
class Rewards:
    """The functions that judge an answer together."""

    functions: tuple[Reward, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What metrics call several: the function alone, unless two have this name; () for one."""
        short = [each.name.rpartition(":")[2] for each in self.functions]
        if len(short) == 1:
            return ()
        return tuple(
            name if short.count(name) == 1 else each.name
            for name, each in zip(short, self.functions, strict=True)
        )

    def scores(self, answers: Sequence[str], examples: Sequence[Example]) -> Tensor:
        """Return the numbers of each function, float64 [answers, functions]."""
        columns = [function.scores(answers, examples) for function in self.functions]
        return torch.stack(columns, dim=1)

    def loss(self, answers: Sequence[str], batch: MicroBatch) -> Tensor:
        """Return minus the weighted sum of the rewards of each answer, float64 [answers]."""
        return self.loss_of(self.scores(answers, batch.examples))

    def loss_of(self, scores: Tensor) -> Tensor:
        """Return minus the weighted sums of some `scores`, float64 [answers]; NaN without any."""
        of_functions = [each.weight for each in self.functions]
        weights = torch.tensor(of_functions, dtype=torch.float64)
        losses = -(scores * weights).nansum(dim=1)
        return losses.masked_fill(scores.isnan().all(dim=1), math.nan)

    def try_out(self, examples: Sequence[Example]) -> None:
        """Judge answers to a few examples, so that what fails does so before weights are loaded."""
        asked = [example for example in examples[:2] for _ in TRIED_ANSWERS]
        self.scores(list(TRIED_ANSWERS) * len(examples[:2]), asked)
