"""The reward and the tasks of launch/recipes/countdown.py."""

from __future__ import annotations

import importlib.util
import itertools
import operator
import random
from fractions import Fraction

import pytest

from lezo_ds.config.paths import ROOT

FILE = ROOT / "launch" / "recipes" / "countdown.py"


@pytest.fixture(scope="module")
def countdown():
    spec = importlib.util.spec_from_file_location("countdown", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<think>8 / (3 - 8 / 3)</think> <answer>8 / (3 - 8 / 3)</answer>", 1.0),  # no float is 24
        ("<answer>1</answer> no: <answer> 8 /(3- 8/3)\n</answer>", 1.0),  # the last one counts
        ("<answer>8 * 3</answer>", 0.1),  # 24, but not with all numbers
        ("<answer>24</answer>", 0.1),
        ("<answer>3 + 8 + 8 + 3</answer>", 0.1),
        ("<answer>8 / (3 - 3) + 8</answer>", 0.1),
        ("<answer>8 ** 8 ** 8 ** 8</answer>", 0.1),
        ("<answer>__import__('os').abort()</answer>", 0.1),
        ("<answer>" + "(" * 5000 + "</answer>", 0.1),
        ("<answer>24 = 8 / (3 - 8 / 3)</answer>", 0.1),
        ("8 / (3 - 8 / 3)", 0.0),
        ("", 0.0),
    ],
)
def test_a_right_expression_has_the_target_and_each_number_once(countdown, answer, expected):
    record = {"numbers": "8, 3, 8, 3", "target": 24}
    assert countdown.solves([answer], [record]) == [expected]


def can_make(values, target):
    """Search all orders of all operations."""
    if len(values) == 1:
        return values[0] == target
    for i, j in itertools.permutations(range(len(values)), 2):
        others = [value for k, value in enumerate(values) if k not in (i, j)]
        for operation in (operator.add, operator.sub, operator.mul, operator.truediv):
            if operation is operator.truediv and values[j] == 0:
                continue
            if can_make([*others, operation(values[i], values[j])], target):
                return True
    return False


def test_the_tasks_can_be_solved_and_depend_on_the_seed_only(countdown, tmp_path):
    for folder in ("first", "second"):
        countdown.main(tmp_path / folder)
    texts = [(tmp_path / name / "train.jsonl").read_text() for name in ("first", "second")]
    assert texts[0] == texts[1] and len(texts[0].splitlines()) == 200
    source = random.Random(1)
    for _ in range(4):
        task = countdown.draw_task(source)
        numbers = [Fraction(number) for number in task["numbers"].split(", ")]
        assert len(numbers) == 4 and 0 < task["target"] <= 999
        assert can_make(numbers, task["target"])
