"""The eleven tasks against their protocol, and the metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
from golden_tasks import GOLDEN
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Example
from lezo_ds.tasks.metrics import (
    METRICS,
    LabelScore,
    accuracy,
    best_f1,
    find_score,
    label_scores,
    macro_f1,
    mean_f1,
)

from lezo_ds.data.metrics import majority_score
from lezo_ds.errors import UserError


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.task)
def test_a_record_becomes_the_text_of_the_protocol(golden):
    assert TASKS.find(golden.task.upper()).example(golden.record) == Example(
        prompt=golden.prompt,
        candidates=golden.candidates,
        label=golden.label,
        references=golden.references,
    )


def test_every_task_has_goldens():
    names = [golden.task for golden in GOLDEN]
    assert {name: names.count(name) >= 2 for name in names} == dict.fromkeys(TASKS, True)


def test_a_record_without_a_right_answer_has_no_label():
    record = {"passage": "", "query": "", "entities": ["Rome"], "answers": ["Oslo", "Rome"]}
    assert TASKS["record"].example(record).label is None
    record = {"passage": "", "question": "", "answers_spans": {"spans": []}}
    assert TASKS["drop"].example(record).label is None


# (answer, golds, F1 worked out by hand)
F1_CASES = [
    ("the Denver Broncos.", ("Denver Broncos", "Oslo"), 1.0),  # article and punctuation
    ("U.S.", ("US",), 1.0),
    ("twenty-one", ("twenty one",), 0.0),
    ("Denver", ("Denver Broncos",), 2 / 3),
    (
        "in the city of Paris",
        ("Paris", "Paris, France"),
        0.4,
    ),  # 4 words; 1 common: 2/(4+1), 2/(4+2)
    ("to be or not to be", ("to to be",), 2 * 3 / (6 + 3)),  # each word as often as it occurs
    ("", ("",), 0.0),  # no word in common, as SQuAD 1.1 counts
    ("theatre another an", ("theatre another",), 1.0),  # articles are whole words
    ("a\tdog\n barks", ("dog barks",), 1.0),
    # In scripts without spaces, characters are counted, and their punctuation is not.
    ("\u5317\u4eac\u5e02\u3002", ("\u5317\u4eac",), 0.8),  # Beijing City: 2 of 3, 2 of 2
    ("\u6771\u4eac\u30bf\u30ef\u30fc", ("\u6771\u4eac",), 2 * 2 / (5 + 2)),  # Tokyo Tower
    ("\u0e01\u0e23\u0e38\u0e07", ("\u0e01\u0e23",), 2 * 2 / (4 + 2)),  # Thai
    ("GPU \u5361", ("gpu\u5361",), 1.0),
    ("\u00abL\u2019E\u0301cole\u00bb \u2026", ("l'\u00e9cole",), 1.0),  # quotes, NFD, ellipsis
    (
        "\u0926\u093f\u0932\u094d\u0932\u0940\u0964",
        ("\u0926\u093f\u0932\u094d\u0932\u0940",),
        1.0,
    ),  # danda
    ("\uc11c\uc6b8 \uc2dc", ("\uc11c\uc6b8",), 2 / 3),  # Korean has spaces
    ("(a)", ("A",), 1.0),  # a letter that is an article
    ("the", ("A",), 0.0),
    ("+", ("-",), 0.0),
    ("-5.", ("-5",), 1.0),
    ("-5", ("5",), 0.0),
    ("3.5", ("35",), 0.0),
    (".5", ("5",), 0.0),
    ("...5.", ("5",), 1.0),
    ("\u20135", ("-5",), 1.0),  # an en dash as the minus
    ("1990\u20131995", ("19901995",), 1.0),  # and between years
]


@pytest.mark.parametrize(("answer", "golds", "expected"), F1_CASES)
def test_f1_is_what_was_worked_out_by_hand(answer, golds, expected):
    assert best_f1(answer, golds) == pytest.approx(expected, abs=1e-12)


def test_the_scores_of_each_label_are_what_was_worked_out_by_hand():
    scores = label_scores(["a", "b", "b", "c"], ["b", "b", "b", "d"])
    assert list(scores) == ["b", "a", "c", "d"]  # the most frequent label first
    assert scores["b"] == LabelScore(2, 3, precision=2 / 3, recall=1.0, f1=0.8)
    assert scores["a"] == LabelScore(1, 0, precision=0.0, recall=0.0, f1=0.0)
    assert scores["d"] == LabelScore(0, 1, precision=0.0, recall=0.0, f1=0.0)


def test_scores_of_several_examples():
    labeled = [Example("", (" a", " b", " c"), label, 0) for label in (0, 0, 0, 1, 2)]
    # F1 of class 0: precision 2/2, recall 2/3; class 1: 1/2, 1/1; class 2: 1/1, 1/1.
    assert macro_f1([0, 0, 1, 1, 2], labeled) == pytest.approx((0.8 + 2 / 3 + 1) / 3)
    several = [Example("", (" a", " b", " c"), 0, 0, references=(" a", " c"))] * 2
    assert accuracy([2, 1], several) == 0.5
    repeated = [Example("", (" a", " a", " b"), 1, 0)] * 2
    assert accuracy([0, 2], repeated) == 0.5
    answered = [Example("", (" x",), 0, 0, references=("The Tower", "Eiffel"))] * 2
    assert METRICS["exact_match"](["tower.", "Tower bridge"], answered) == 0.5
    assert mean_f1(["tower.", "Tower bridge"], answered) == pytest.approx((1 + 2 / 3) / 2)
    assert METRICS["exact_match"](["\u201ctower\u201d", "The tower\u3002"], answered) == 1.0
    assert majority_score(accuracy, several) is None
    assert majority_score(accuracy, labeled) == 3 / 5
    unlike = [Example("", (" a", " b", " c")[:size], size - 1, 0) for size in (2, 3, 3)]
    assert majority_score(accuracy, unlike) == 2 / 3


@pytest.mark.parametrize(("metric", "name"), [("f1", "cb"), ("accuracy", "squad")])
def test_a_metric_that_does_not_fit_the_kind_of_task_is_refused(metric, name):
    task = TASKS[name]
    expected = f"data.metric={metric} does not fit a task of the kind {task.kind}"
    with pytest.raises(UserError, match=expected):
        find_score(replace(task, metric=metric))
