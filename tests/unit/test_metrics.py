"""Metrics: SQuAD's own, scikit-learn's, and a user's, which is tried and guarded."""

import re
import statistics
import string
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_recall_fscore_support

from lezo_ds.data import metrics
from lezo_ds.data.examples import Example, TokenCounts
from lezo_ds.data.mezo import TASKS
from lezo_ds.errors import UserError


def normalize_answer(text):
    """As evaluate-v1.1.py of SQuAD."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def squad_f1(prediction, ground_truth):
    """As evaluate-v1.1.py of SQuAD: the harmonic mean of precision and recall."""
    predicted = normalize_answer(prediction).split()
    expected = normalize_answer(ground_truth).split()
    num_same = (Counter(predicted) & Counter(expected)).total()
    return 2 * num_same / (len(predicted) + len(expected) or 1)


WESTERN = ["the Denver Broncos.", "Denver", "U.S.", "US", "to be or not to be", "to to be", ""]
NUMBERS = ["1990-1995", "1990\u20131995", "19901995", "-5", "5", ".5", "(a)", "theatre an"]
CHINESE = ["\u5317\u4eac\u5e02\u3002", "\u5317\u4eac"]
TEXTS = [*WESTERN, *NUMBERS, *CHINESE, "\u201ctower\u201d", "L'\u00c9cole", "a\tdog\n"]


@pytest.mark.parametrize("answer", TEXTS)
def test_f1_and_exact_match_are_those_of_squads_script(answer):
    for reference in TEXTS:
        f1 = pytest.approx(squad_f1(answer, reference), abs=1e-12)
        assert metrics.best_f1(answer, [reference]) == f1
        alone = Example("", (f" {reference}\n",), 0)  # without references
        assert metrics.mean_f1([answer], [alone]) == f1
        example = Example("", (" x",), 0, references=(reference, "other"))
        is_equal = normalize_answer(answer) in (normalize_answer(reference), "other")
        assert metrics.METRICS["exact_match"]([answer], [example]) == is_equal


LABELS = [0, 0, 0, 1, 2, 2]
PREDICTED = [0, 0, 1, 1, 3, 2]
LABELED = [Example("", (" a", " b", " c", " d"), label) for label in LABELS]


def test_the_scores_of_labels_are_those_of_scikit_learn():
    macro = f1_score(LABELS, PREDICTED, average="macro")
    assert metrics.macro_f1(PREDICTED, LABELED) == pytest.approx(macro)
    scores = metrics.label_scores(LABELS, PREDICTED)
    assert list(scores) == [0, 2, 1, 3]  # the most frequent label first
    found = [(each.precision, each.recall, each.f1, each.examples) for each in scores.values()]
    theirs = precision_recall_fscore_support(LABELS, PREDICTED, labels=[*scores], zero_division=0)
    assert np.allclose(np.array(found).T, np.array(theirs))


def test_a_candidate_is_right_by_its_text():
    several = [Example("", (" a", " b", " c"), 0, references=(" a", " c"))] * 2
    assert metrics.accuracy([2, 1], several) == 0.5
    repeated = [Example("", (" a", " a", " b"), 1)] * 2
    assert metrics.accuracy([0, 2], repeated) == 0.5
    assert metrics.majority_score(metrics.accuracy, LABELED) == 3 / 6
    unlike = [Example("", (" a", " b", " c")[:size], size - 1) for size in (2, 3, 3)]
    assert metrics.majority_score(metrics.accuracy, unlike) == 2 / 3
    assert metrics.token_accuracy([TokenCounts(1, 2), TokenCounts(5, 6)], several) == 6 / 8


@pytest.mark.parametrize(("metric", "name"), [("f1", "cb"), ("accuracy", "squad")])
def test_a_metric_that_does_not_fit_the_kind_of_task_is_refused(metric, name):
    task = TASKS[name]
    expected = f"data.metric={metric} does not fit a task of the kind {task.kind}"
    with pytest.raises(UserError, match=expected):
        metrics.load_score(replace(task, metric=metric))


def count_right(predicted, examples):
    assert all(one is other for one, other in zip(examples, LABELED, strict=True))  # no copies
    number = sum(p == e.label for p, e in zip(predicted, examples, strict=True))
    predicted.clear()  # which is its own list
    return np.float32(number)


def fails(predicted, examples):
    return predicted[0].no_such_attribute


def not_a_number(predicted, examples):
    return float("nan")


def correlation(predicted, examples):
    return statistics.correlation(predicted, [example.label for example in examples])


def own(name):
    return replace(TASKS["cb"], metric=f"test_metrics:{name}")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("fails", r"failed: AttributeError: .*\(.*test_metrics.py line \d+\)"),
        ("not_a_number", "returned nan, not a finite number"),
    ],
)
def test_a_metric_that_fails_on_right_answers_is_refused(metric, message):
    examples = [Example("", (" a", " b"), 0, references=("x",))] * 2
    with pytest.raises(UserError, match=f"data.metric=test_metrics:{metric} {message}"):
        metrics.try_metric(own(metric), examples)


def test_the_score_of_a_metric_is_a_float_of_the_examples_themselves():
    found = metrics.load_score(own("count_right"))(PREDICTED, LABELED)
    assert (found, type(found)) == (4.0, float)


def test_a_metric_without_a_score_of_constant_predictions_has_no_majority_class():
    score = metrics.load_score(own("correlation"))
    assert -1 <= score(PREDICTED, LABELED) <= 1
    assert metrics.majority_score(score, LABELED) is None
