from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Example
from lezo_ds.tasks.metrics import accuracy, best_f1, majority_class_score, mean_f1, token_f1

# (answer, golds, F1 worked out by hand)
MADE_CASES = [
    ("Denver Broncos", ("Denver Broncos", "The Broncos"), 1.0),
    ("the Denver Broncos.", ("Denver Broncos",), 1.0),  # article and punctuation
    ("A  dog!", ("the dog",), 1.0),
    ("U.S.", ("US",), 1.0),
    ("Bob's", ("bobs",), 1.0),
    ("twenty-one", ("twentyone",), 1.0),
    ("twenty-one", ("twenty one",), 0.0),
    ("Denver", ("Denver Broncos",), 2 / 3),
    ("in the city of Paris", ("Paris", "Paris, France"), 0.4),  # 4 words; 1 common: 2/(4+1), 2/(4+2)
    ("to be or not to be", ("to to be",), 2 * 3 / (6 + 3)),  # each word as often as it occurs
    ("be", ("to be or not to be",), 2 / 7),
    ("Oslo", ("Rome", "Paris"), 0.0),
    ("", ("Rome",), 0.0),
    ("Rome", ("",), 0.0),
    ("", ("",), 0.0),  # no word in common, as SQuAD 1.1 counts
    ("the", ("a",), 0.0),
    ("theatre another an", ("theatre another",), 1.0),  # articles are whole words
    ("THE END", ("end",), 1.0),
    ("1,000", ("1000",), 1.0),
    ("a\tdog\n barks", ("dog barks",), 1.0),
]


@pytest.mark.parametrize(("answer", "golds", "expected"), MADE_CASES)
def test_f1_is_what_was_worked_out_by_hand(answer, golds, expected):
    assert best_f1(answer, golds) == pytest.approx(expected, abs=1e-12)


@given(st.text(), st.text())
def test_f1_is_symmetric_and_between_0_and_1(one, other):
    assert 0 <= token_f1(one, other) == token_f1(other, one) <= 1


def test_the_mean_f1_of_squad_and_drop_takes_the_best_gold_of_each_example():
    squad = {"title": "", "context": "", "question": "", "answers": {"text": ["Rain", "The Heavy Rain"]}}
    drop = {"passage": "", "question": "", "answers_spans": {"spans": ["2", "two"]}}
    examples = [TASKS["squad"].build_example(squad, 0), TASKS["drop"].build_example(drop, 1)]
    assert mean_f1(["heavy rain", "Two."], examples) == 1.0
    assert mean_f1(["rain rain", "3"], examples) == pytest.approx((2 / 3) / 2)


def test_accuracy_counts_the_label_and_every_reference():
    examples = [
        Example("", ("Yes", "No"), 0, 0),
        Example("", ("Yes", "No"), 1, 1),
        Example("", (" Paris", " Rome", " Oslo"), 0, 2, references=(" Paris", " Oslo")),
        Example("", (" Paris", " Rome", " Oslo"), 0, 3, references=(" Paris", " Oslo")),
    ]
    assert accuracy([0, 0, 2, 1], examples) == 0.5


def test_the_majority_class_of_wsc_is_66_of_104():
    examples = [Example("", ("No", "Yes"), label, row) for row, label in enumerate([0] * 66 + [1] * 38)]
    assert majority_class_score(examples, accuracy) == 66 / 104


def test_examples_with_right_answers_of_their_own_have_no_majority_class():
    examples = [Example("", (" Paris", " Rome"), 0, 0, references=(" Paris",))]
    assert majority_class_score(examples, accuracy) is None
