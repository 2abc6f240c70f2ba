"""The reward and the tasks of launch/recipes/countdown.py."""

import runpy

import pytest

from lezo_ds.config.paths import ROOT

COUNTDOWN = runpy.run_path(str(ROOT / "launch" / "recipes" / "countdown.py"))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<think>8 / (3 - 8 / 3)</think> <answer>8 / (3 - 8 / 3)</answer>", 1.0),  # no float is 24
        ("<answer>1</answer> no: <answer> 8 /(3- 8/3)\n</answer>", 1.0),  # the last one counts
        ("<answer>8 * 3</answer>", 0.1),  # 24, but not with all numbers
        ("<answer>3 + 8 + 8 + 3</answer>", 0.1),
        ("<answer>8 ** 8 ** 8 ** 8</answer>", 0.1),
        ("<answer>__import__('os').abort()</answer>", 0.1),
        ("<answer>" + "(" * 5000 + "</answer>", 0.1),
        ("8 / (3 - 8 / 3)", 0.0),
    ],
)
def test_a_right_expression_has_the_target_and_each_number_once(answer, expected):
    record = {"numbers": "8, 3, 8, 3", "target": 24}
    assert COUNTDOWN["solves"]([answer], [record]) == [expected]
