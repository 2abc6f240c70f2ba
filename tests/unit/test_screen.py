"""What a run shows on the screen."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from lezo_ds.journal import EvaluationRecord
from lezo_ds.runs import screen
from lezo_ds.runs.screen import PROGRESS_VARIABLE, Progress, evaluation_line, run_summary, scores_summary

RESULTS = {
    "metric": "accuracy",
    "finished": True,
    "zero_shot": 0.532,
    "test": 0.73266666,
    "majority_class": 0.502,
    "best_step": 150,
    "best_dev_loss": 0.512345678,
    "steps": 200,
    "early_stop_step": None,
    "skipped_steps": 0,
    "seconds": 457.3,
}
"""The members of results.json that a summary reads."""


def dev(step, loss, score):
    return EvaluationRecord(step=step, split="dev", loss=loss, metrics={"accuracy": score})


def steps(progress, losses, **evaluations):
    evaluations = {"last": None, "best": None} | evaluations
    with progress:
        for step, loss in enumerate(losses, 3):
            progress.update(step, loss, 0.5, **evaluations)


def test_without_a_terminal_a_line_tells_of_the_steps_since_the_last(monkeypatch, caplog):
    caplog.set_level("INFO")
    seconds = iter([0.0, 10.0, 21.0, 30.0, 42.0, 50.0])
    monkeypatch.setattr(screen, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    best, last = dev(20, 0.5, 0.81239), dev(30, 0.6, 0.7)
    progress = Progress(num_steps=300, num_done=2, metric="accuracy", is_shown=True)
    steps(progress, [1.0, 2.0, None, 0.123456, 0.2], best=best, last=last)
    scores = "validation accuracy 0.700 (0.812 at step 20)"
    assert caplog.messages == [
        # 21 seconds for 2 steps, and 296 are left.
        f"step 4/300: loss 1.5, {scores}, 2.0 steps/s, 51 min 48 s left",
        f"step 6/300: loss 0.1235, {scores}, 2.0 steps/s, 51 min 27 s left",
    ]


def test_a_line_needs_no_evaluation_and_no_finite_loss(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(screen, "SECONDS_BETWEEN_LINES", 0.0)
    steps(Progress(num_steps=4, num_done=2, metric="accuracy", is_shown=True), [None, 1.0])
    (line,) = caplog.messages  # the last step gets none: its evaluation follows at once
    assert re.fullmatch(r"step 3/4: loss not finite, 2\.0 steps/s, 0 s left", line)
    steps(Progress(num_steps=9, num_done=2, metric="accuracy", is_shown=False), [1.0, 1.0])
    assert len(caplog.messages) == 1


def test_a_bar_takes_the_place_of_the_lines(monkeypatch, caplog, capsys):
    caplog.set_level("INFO")
    monkeypatch.setenv(PROGRESS_VARIABLE, "1")
    monkeypatch.setattr(screen, "SECONDS_BETWEEN_LINES", 0.0)
    best = dev(2, 0.5, 0.81239)
    steps(
        Progress(num_steps=4, num_done=2, metric="accuracy", is_shown=True), [0.6931471], best=best, last=best
    )
    assert caplog.messages == []
    shown = capsys.readouterr().err
    assert shown.startswith("\rtraining: ")
    assert "3/4" in shown


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (dev(20, 0.123456789, 2 / 3), "step 20: validation loss 0.1235, accuracy 0.667"),
        (dev(20, None, 0.5), "step 20: validation loss not finite, accuracy 0.500"),
        (EvaluationRecord(0, "test", 1.5, {"accuracy": 1.0}), "step 0: test loss 1.5, accuracy 1.000"),
        (EvaluationRecord(0, "test", None, {"accuracy": 1.0}), "step 0: test accuracy 1.000"),
    ],
)
def test_the_line_of_an_evaluation_has_rounded_numbers(record, line):
    assert evaluation_line(record, "accuracy") == line


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {},
            [
                "Finished: 200 steps in 7 min 37 s.",
                "Test accuracy: 0.532 before, 0.733 after (majority class 0.502).",
                "Best step: 150 (validation loss 0.5123).",
            ],
        ),
        (
            {
                "early_stop_step": 180,
                "steps": 180,
                "skipped_steps": 2,
                "zero_shot": None,
                "majority_class": None,
            },
            [
                "Finished: 180 steps in 7 min 37 s.",
                "Stopped early, at step 180: train.patience ran out.",
                "Test accuracy: 0.733 after.",
                "Best step: 150 (validation loss 0.5123).",
                "Skipped steps: 2.",
            ],
        ),
        (
            {"best_step": None, "best_dev_loss": None, "steps": 0, "skipped_steps": None},
            ["Finished in 7 min 37 s.", "Test accuracy: 0.733 (majority class 0.502)."],
        ),
        (
            {"finished": False, "best_step": None, "test": None},
            ["Stopped after step 200 (7 min 37 s). The same command continues."],
        ),
    ],
    ids=["trained", "stopped early", "only scored", "stopped"],
)
def test_the_summary_of_a_run_is_short(changes, lines):
    assert run_summary("runs/x", RESULTS | changes).splitlines() == [*lines, "Run directory: runs/x"]


def test_the_summary_of_scores_is_a_line():
    scores = {"model": "m", "split": "test", "metric": "f1", "score": 0.61234, "num_examples": 50}
    scores |= {"majority_class": None, "loss": float("nan")}
    assert scores_summary(scores) == "m: f1 0.612 on 50 test examples"
    scores |= {"run": "r", "step": 3, "split": "dev", "majority_class": 0.5, "loss": 0.123456}
    assert scores_summary(scores) == (
        "step 3 of r: f1 0.612 on 50 validation examples, majority class 0.500, loss 0.1235"
    )
