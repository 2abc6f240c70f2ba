"""A user's metric: tried before weights are loaded, guarded later, returned as a float."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lezo_ds.data.evaluation import evaluate
from lezo_ds.tasks.metrics import macro_f1
from tiny_tasks import task_config, write_tasks, write_writer
from transformers import OPTConfig

from lezo_ds import distributed
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError


def count_right(predicted, examples):
    return np.float32(sum(p == e.label for p, e in zip(predicted, examples, strict=True)))


def fails(predicted, examples):
    return predicted[0].no_such_attribute


def fails_on_wrong_answers(predicted, examples):
    if any(p != e.label for p, e in zip(predicted, examples, strict=True)):
        raise KeyError("wrong")
    return 1.0


def not_a_number(predicted, examples):
    return float("nan")


def counts(predicted, examples):
    return {"right": 1}


def too_large(predicted, examples):
    return 10**400


def leaves(predicted, examples):
    sys.exit(0)


def changes_records(predicted, examples):
    """The number of records that it has not judged before."""
    return float(sum(example.record.pop("sentence", None) is not None for example in examples))


def correlation(predicted, examples):
    return statistics.correlation(predicted, [example.label for example in examples])


def mean_words(predicted, examples):
    """The mean length of the words of each answer, which an empty answer does not have."""
    return sum(len(answer) / len(answer.split()) for answer in predicted) / len(predicted)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    write_writer(root / "writer")
    write_tasks(root / "data")
    return root


def load(assets, metric, task="sst2"):
    """Load a task's own data, as the recipe of a user does who has a metric of their own."""
    changes = {"data__num_test": 20}
    if task == "sst2":
        changes |= {
            "data__task": "custom",
            "data__prompt": "{sentence}\n",
            "data__label_field": "label",
            "data__labels": {"0": "x", "1": "y"},
        }
    else:
        changes |= {
            "data__task": "custom",
            "data__prompt": "{question}",
            "data__completion": "{title}",
            "generation__max_new_tokens": 8,
        }
    changes["data__metric"] = f"test_metrics:{metric}"
    return load_task_data(task_config(assets / "writer", assets / "data", task, **changes))


class Guesses:
    """A model with random logits."""

    tensor_parallel = 1
    module = SimpleNamespace(config=OPTConfig())

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, batch):
        return torch.rand(len(batch.selection.rows), 200, generator=self.generator)


@pytest.fixture
def score(monkeypatch):
    """The function data -> result of an evaluation by one process without a process group."""
    monkeypatch.setattr(distributed, "sum_vector", torch.Tensor.tolist)
    return lambda data: evaluate(Guesses(), data.reader, data.test, batch_size=4)


@pytest.mark.parametrize(
    ("metric", "task", "message"),
    [
        ("fails", "sst2", r"failed: AttributeError: .*\(.*test_metrics.py line \d+\)"),
        ("not_a_number", "sst2", "returned nan, not a finite number"),
        ("counts", "sst2", "returned {'right': 1}, not a finite number"),
        ("mean_words", "squad", "failed: ZeroDivisionError"),
        ("too_large", "sst2", "returned 10{79}..., not a finite number"),
        ("leaves", "sst2", r"failed: SystemExit: 0 \(.*test_metrics.py line \d+\)"),
    ],
)
def test_a_metric_that_fails_is_refused_before_weights_are_loaded(metric, task, message, assets):
    with pytest.raises(UserError, match=f"data.metric=test_metrics:{metric} {message}") as error:
        load(assets, metric, task)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_a_metric_that_changes_its_records_judges_the_same_ones_again(assets, score):
    data = load(assets, "changes_records")
    assert [score(data).score for _ in range(2)] == [20.0, 20.0]


def test_a_metric_that_fails_on_predictions_later_is_one_line(assets, score):
    data = load(assets, "fails_on_wrong_answers")
    with pytest.raises(UserError, match=r"fails_on_wrong_answers failed: KeyError: 'wrong' \("):
        score(data)


def test_the_score_of_a_metric_is_a_float_of_python(assets, score):
    result = score(load(assets, "count_right"))
    assert type(result.score) is float
    assert type(result.majority_class) is float


def test_a_classification_has_the_scores_of_each_label_beside_any_metric(assets, score):
    data = load(assets, "count_right")
    result = score(data)
    assert set(result.by_label) <= {"0", "1"}  # as the records hold them
    assert sum(row.examples for row in result.by_label.values()) == 20
    assert sum(row.predicted for row in result.by_label.values()) == 20
    assert result.macro_f1 == macro_f1(result.predicted, data.test.examples)


def test_a_metric_without_a_score_of_constant_predictions_has_no_majority_class(assets, score):
    data = load(assets, "correlation")
    assert -1 <= score(data).score <= 1
    assert score(data).majority_class is None
    reader = replace(data.reader, task=replace(data.task, metric="accuracy"))
    accuracy = replace(data, reader=reader)
    assert score(accuracy).majority_class > 0
