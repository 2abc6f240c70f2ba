"""Countdown: make a target from four numbers. The tasks of countdown.yaml, and their reward.

    python launch/recipes/countdown.py runs/countdown/tasks

writes train.jsonl and test.jsonl to that folder, in which each task has a solution:

    {"numbers": "44, 19, 35, 3", "target": 98}
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from lezo_ds import reward
from lezo_ds.data.tasks import Example

NUM_NUMBERS = 4
LARGEST_NUMBER = 99
LARGEST_TARGET = 999
SIZES = {"train": 200, "test": 200}
LONGEST_EXPRESSION = 100  # characters; a longer one counts as wrong
REWARD_OF_FORM = 0.1

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value_of(node: ast.AST, numbers: list[int]) -> Fraction:
    """Return the exact value of an expression of integers, and append these to `numbers`.

    Raises:
        ValueError: it has something else than integers and the four operations.
        ZeroDivisionError: it divides by 0.
    """
    if isinstance(node, ast.Expression):
        return value_of(node.body, numbers)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left = value_of(node.left, numbers)
        return OPERATIONS[type(node.op)](left, value_of(node.right, numbers))
    raise ValueError(f"{type(node).__name__} is no arithmetic")


def expression_of(answer: str) -> str | None:
    """Return the text in the last <answer> tags, or None without them."""
    found = ANSWER.findall(answer)
    return found[-1].strip() if found else None


def is_right(expression: str, record: Mapping[str, Any]) -> bool:
    """Return whether an expression has the target's value, and each number exactly once."""
    if len(expression) > LONGEST_EXPRESSION:
        return False
    used: list[int] = []
    try:
        value = value_of(ast.parse(expression, mode="eval"), used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False
    given = [int(number) for number in record["numbers"].split(",")]
    return sorted(used) == sorted(given) and value == record["target"]


@reward
def solves(answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Give 1 to a right expression, 0.1 to a wrong one in answer tags, and 0 to all else."""
    rewards = []
    for answer, record in zip(answers, records, strict=True):
        expression = expression_of(answer)
        if expression is None:
            rewards.append(0.0)
        elif is_right(expression, record):
            rewards.append(1.0)
        else:
            rewards.append(REWARD_OF_FORM)
    return rewards


def share_solved(answers: Sequence[str], examples: Sequence[Example]) -> float:
    """Return the share of right answers, 0 to 1: a metric."""
    expressions = map(expression_of, answers)
    solved = [
        expression is not None and is_right(expression, example.record)
        for expression, example in zip(expressions, examples, strict=True)
    ]
    return sum(solved) / len(solved)


def draw_task(source: random.Random) -> dict[str, Any]:
    """Draw numbers, and a target that a random expression of all of them has."""
    while True:
        numbers = [source.randint(1, LARGEST_NUMBER) for _ in range(NUM_NUMBERS)]
        values = [Fraction(number) for number in numbers]
        try:
            while len(values) > 1:
                left = values.pop(source.randrange(len(values)))
                right = values.pop(source.randrange(len(values)))
                values.append(source.choice(list(OPERATIONS.values()))(left, right))
        except ZeroDivisionError:
            continue
        (target,) = values
        if target.denominator == 1 and 0 < target <= LARGEST_TARGET:
            return {"numbers": ", ".join(map(str, numbers)), "target": int(target)}


def main(folder: Path, seed: int = 0) -> None:
    """Write the tasks of each split."""
    source = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in SIZES.items():
        lines = [json.dumps(draw_task(source)) + "\n" for _ in range(size)]
        (folder / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
