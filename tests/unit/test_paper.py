"""The paper's numbers, against what its text says elsewhere and against what the models are."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from lezo_ds.config.paper import PAPER_MODELS, PAPER_SCORES, PAPER_TASKS, Experiment, Score, hyperparameters
from lezo_ds.tasks import TASKS

SHAPES = {"opt-1.3b": (2048, 24), "opt-13b": (5120, 40), "opt-30b": (7168, 48)}


def averages(model, method):
    scores = [
        score.mean for cell, score in PAPER_SCORES.items() if cell == Experiment(model, cell.task, method)
    ]
    return statistics.mean(scores)


def test_every_cell_of_the_tables_is_there():
    assert Counter((cell.model, cell.peft) for cell in PAPER_SCORES) == {
        ("opt-1.3b", "none"): 11 * 4,
        ("opt-13b", "none"): 8 * 5,
        ("opt-13b", "lora"): 5 * 2,
        ("opt-13b", "prefix"): 5 * 2,
        ("opt-30b", "none"): 2 * 4,
    }
    assert {cell.task for cell in PAPER_SCORES if cell.peft != "none"} == {
        "sst2",
        "cb",
        "boolq",
        "copa",
        "squad",
    }
    assert {cell.model for cell in PAPER_SCORES if cell.method == "adamw"} == {"opt-13b"}


@pytest.mark.parametrize(
    ("method", "printed"),
    [("zero_shot", 55.4), ("icl", 65.7), ("adamw", 77.7), ("mezo", 74.2), ("lezo", 75.4)],
)
def test_the_cells_have_the_average_that_the_paper_prints(method, printed):
    assert averages("opt-13b", method) == pytest.approx(printed, abs=0.0501)


@pytest.mark.parametrize(
    ("cell", "score"),
    [
        (Experiment("opt-13b", "sst2", "lezo"), Score(93.0, 0.3)),
        (Experiment("opt-13b", "boolq", "mezo"), Score(69.1, 0.6)),
        (Experiment("opt-13b", "squad", "lezo", "prefix"), Score(83.1, 0.4)),
        (Experiment("opt-13b", "cb", "mezo", "lora"), Score(70.4, 1.6)),
        (Experiment("opt-13b", "copa", "lezo", "lora"), Score(86.4, 1.5)),
        (Experiment("opt-13b", "wic", "adamw"), Score(70.1)),
        (Experiment("opt-1.3b", "drop", "lezo"), Score(24.1, 0.8)),
        (Experiment("opt-1.3b", "wsc", "mezo"), Score(63.5, 0.0)),
        (Experiment("opt-1.3b", "multirc", "zero_shot"), Score(45.4)),
        (Experiment("opt-30b", "boolq", "lezo"), Score(73.7, 0.9)),
        (Experiment("opt-30b", "sst2", "icl"), Score(81.9)),
    ],
)
def test_a_cell_holds_what_the_paper_has_there(cell, score):
    assert PAPER_SCORES[cell] == score


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_has_the_parameters_that_its_shape_gives(name):
    hidden, num_blocks = SHAPES[name]
    embeddings = (50_272 + 2_050) * hidden
    block = 12 * hidden**2 + 13 * hidden
    assert PAPER_MODELS[name].num_blocks == num_blocks
    assert PAPER_MODELS[name].num_parameters == embeddings + num_blocks * block + 2 * hidden


def test_the_tasks_are_those_that_are_implemented_in_the_tables_order():
    assert list(PAPER_TASKS) == list(TASKS)


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_the_sizes_of_a_task_are_at_most_what_mezos_protocol_asks_for(name):
    asked, task = TASKS[name].mezo_sizes, PAPER_TASKS[name]
    assert task.num_dev == asked.num_dev
    assert task.num_train <= asked.num_train
    assert task.num_test <= asked.num_test


@pytest.mark.parametrize(
    ("cell", "rates", "scale", "sparsity"),
    [
        (Experiment("opt-1.3b", "sst2", "lezo"), (3e-6, 1e-6), 1e-3, 0.75),
        (Experiment("opt-30b", "boolq", "lezo"), (1e-6, 7e-7), 1e-3, 0.75),
        (Experiment("opt-1.3b", "sst2", "mezo"), (1e-6, 1e-7), 1e-3, 0),
        (Experiment("opt-13b", "squad", "mezo"), (1e-6, 5e-7, 1e-7), 1e-3, 0),
        (Experiment("opt-13b", "rte", "mezo"), (1e-6, 5e-7, 1e-7), 1e-3, 0),
        (Experiment("opt-13b", "squad", "lezo", "prefix"), (3e-2, 1e-2), 1e-1, 0.75),
        (Experiment("opt-13b", "squad", "mezo", "prefix"), (5e-2, 1e-2, 5e-3), 1e-1, 0),
        (Experiment("opt-13b", "cb", "mezo", "prefix"), (1e-2, 1e-3), 1e-1, 0),
        (Experiment("opt-13b", "cb", "lezo", "lora"), (3e-5, 5e-5, 7e-5), 1e-2, 0.5),
        (Experiment("opt-13b", "squad", "mezo", "lora"), (1e-4, 5e-5, 1e-5), 1e-2, 0),
        (Experiment("opt-13b", "cb", "mezo", "lora"), (1e-4, 5e-5), 1e-2, 0),
    ],
)
def test_zeroth_order_hyperparameters_are_the_papers(cell, rates, scale, sparsity):
    found = hyperparameters(cell)
    assert found.learning_rates == rates
    assert (found.perturbation_scale, found.sparsity) == (scale, sparsity)
    assert (found.steps, found.batch_size, found.epochs) == (20_000, 16, None)


def test_adamw_runs_for_epochs():
    found = hyperparameters(Experiment("opt-13b", "cb", "adamw"))
    assert found.learning_rates == (1e-5, 5e-5, 8e-5)
    assert (found.epochs, found.batch_size, found.steps) == (5, 8, None)
