"""Tables of runs: means and deviations over seeds, the paper's numbers, and what does not count."""

from __future__ import annotations

import json
import math
import sys

import pandas as pd
import pytest
from assets import REPOSITORY, write_recipe
from commands import assert_refused, python, run_well
from report_runs import write_run

from lezo_ds.errors import UserError
from lezo_ds.tools.reports.report import make_table
from lezo_ds.tools.reports.results_table import best_setting, find_runs, over_seeds, read_runs

COMMAND = [sys.executable, str(REPOSITORY / "launch" / "report.py")]

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
"""Aliases of aliases: a few lines that stand for many millions of values."""


def markdown_rows(*paths):
    """Return the cells of each line of the tables by their first: Markdown, read independently."""
    lines = [line for line in make_table(list(map(str, paths))).splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_a_row_has_the_configuration_and_the_results_of_a_run(tmp_path):
    write_run(tmp_path / "a", "zo.sparsity=0.5", "seed=3", peak_memory_bytes=7)
    (row,) = read_runs([tmp_path / "a"]).to_dict("records")
    expected = {"model": "facebook/opt-13b", "task": "sst2", "method": "lezo", "peft": "none", "seed": 3}
    expected |= {"sparsity": 0.5, "learning_rate": 1e-6, "zo.perturbation_scale": 1e-3, "world_size": 2}
    expected |= {"test": 0.9, "zero_shot": 0.5, "best_dev_loss": 0.4, "peak_memory_bytes": 7, "problem": ""}
    assert expected.items() <= row.items()
    assert row["finished"]


@pytest.mark.parametrize(
    ("overrides", "method", "rate"),
    [
        (["zo.sparsity=0"], "mezo", 1e-6),
        (["method=mezo", "zo.sparsity=null"], "mezo", 1e-6),
        (["zo.sparsity=null", "zo.num_dropped_layers=2"], "lezo", 1e-6),
        (["method=adamw", "adamw.learning_rate=1e-4"], "adamw", 1e-4),
        (["method=zero_shot"], "zero_shot", math.nan),
    ],
)
def test_methods_are_compared_by_what_they_do(overrides, method, rate, tmp_path):
    (row,) = read_runs([write_run(tmp_path / "a", *overrides)]).to_dict("records")
    assert row["method"] == method
    assert row["learning_rate"] == pytest.approx(rate, nan_ok=True)


@pytest.mark.parametrize(
    ("overrides", "task"),
    [
        (["data.path=/data/SST-2"], "sst2"),
        (["data.path=/data/my_sst2_copy"], "sst2"),
        (["data.path=runs/demo/assets/reviews"], "reviews"),
        (
            [
                "data.task=custom",
                "data.train=data/tickets.csv",
                "data.prompt=Ticket {text}",
                "data.completion=x",
            ],
            "tickets",
        ),
    ],
)
def test_other_data_in_the_schema_of_a_task_has_its_own_name(overrides, task, tmp_path):
    (row,) = read_runs([write_run(tmp_path / "a", *overrides)]).to_dict("records")
    assert row["task"] == task


def test_a_run_that_did_not_score_the_model_before_takes_the_score_of_a_zero_shot_run(tmp_path):
    write_run(tmp_path / "a", zero_shot=None)
    write_run(tmp_path / "b", "method=zero_shot", test=0.57)
    write_run(tmp_path / "c", "data.task=RTE", zero_shot=None)
    scores = read_runs([tmp_path / name for name in "abc"])["zero_shot"]
    assert scores.tolist() == pytest.approx([0.57, 0.5, math.nan], nan_ok=True)


def test_means_and_deviations_are_over_the_finished_runs_of_a_group(tmp_path):
    for seed, test in enumerate([0.90, 0.92, 0.94]):
        write_run(tmp_path / f"a{seed}", f"seed={seed}", test=test)
    write_run(tmp_path / "b0", "zo.learning_rate=7e-7", test=0.8, best_dev_loss=0.3)
    write_run(tmp_path / "b1", "zo.learning_rate=7e-7", "seed=1", finished=False, test=0.1)
    summary = over_seeds(read_runs(sorted(tmp_path.iterdir())), ["zo.learning_rate", "zo.num_dropped_layers"])
    assert summary["zo.learning_rate"].tolist() == [1e-6, 7e-7]
    assert summary["runs"].tolist() == [3, 2]
    assert summary["finished"].tolist() == [3, 1]
    # The deviations from 0.92 are -0.02, 0 and 0.02: a variance of 0.0008 / 2, a deviation of 0.02.
    assert summary["test"].tolist() == pytest.approx([0.92, 0.8])
    assert summary["test_deviation"][0] == pytest.approx(0.02)
    assert pd.isna(summary["test_deviation"][1])
    # The second has the lower validation loss, but not all of its runs are finished.
    assert best_setting(summary) == 0
    assert best_setting(summary[1:]) is None
    diverged = write_run(tmp_path / "diverged", "seed=9", best_dev_loss=None)
    summary = over_seeds(read_runs([tmp_path / "a0", diverged]), [])
    assert summary["runs"].tolist() == [2]
    assert summary["best_dev_loss"].isna().all()
    assert best_setting(summary) is None


def test_rows_and_columns_are_in_the_papers_order_and_averages_need_every_task(tmp_path):
    for name, overrides in {
        "a": ["data.task=SQuAD", "peft.kind=prefix"],
        "b": ["data.task=SST2"],
        "c": ["data.task=CB", "method=mezo", "zo.sparsity=0"],
        "d": ["data.task=SST2", "method=zero_shot"],
        "e": ["data.task=CB"],
        "f": ["data.task=squad"],
    }.items():
        write_run(tmp_path / name, *overrides, test=0.6 if name == "e" else 0.9)
    rows = markdown_rows(tmp_path / "*")
    assert rows["method"] == ["SST-2", "CB", "SQuAD", "average"]
    measured = ["majority class", "zero-shot", "MeZO", "LeZO", "LeZO prefix"]
    assert [label for label in rows if "paper" not in label and label[0] not in "-m"] == measured[1:]
    assert [label for label in rows if "paper" in label] == [f"{label} (paper)" for label in measured[1:]]
    assert rows["LeZO"] == ["90.0 (1)", "60.0 (1)", "90.0 (1)", "80.0"]
    assert rows["MeZO"] == ["-", "90.0 (1)", "-", "-"]
    assert rows["LeZO (paper)"][3] == "82.2"  # (93.0 + 69.2 + 84.3) / 3


def test_models_have_tables_of_their_own_and_only_the_papers_have_its_numbers(tmp_path):
    write_run(tmp_path / "a", "model.path=models/mine")
    write_run(tmp_path / "b", "model.path=somewhere/OPT-1.3b")
    mine, paper = make_table([str(tmp_path / "*")]).split("## ")[1:]
    assert mine.startswith("mine\n")
    assert "(paper)" not in mine
    assert paper.startswith("opt-1.3b\n")
    assert "| LeZO           | 90.0 (1)   |\n| LeZO (paper)   | 91.9 ± 0.3 |" in paper


def test_a_task_that_is_not_registered_has_its_column_and_metric_with_bars_escaped(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", task="Reviews|new", metric="f1", test=0.5)
    text = make_table([str(tmp_path / "*")])
    assert "| method         | SST-2      | reviews\\|new | average |" in text
    assert "| LeZO           | 90.0 (1)   | 50.0 (1)     | 70.0    |" in text
    assert "Percent: accuracy of SST-2; f1 of reviews|new." in text


def test_runs_that_are_scored_by_other_metrics_have_columns_of_their_own(tmp_path):
    write_run(tmp_path / "a", task="tickets", metric="accuracy", test=0.8)
    write_run(tmp_path / "b", task="tickets", metric="macro_f1", test=0.6)
    write_run(tmp_path / "c", "seed=1", task="tickets", metric="macro_f1", test=0.4)
    rows = markdown_rows(*sorted(tmp_path.iterdir()))
    assert rows["method"] == ["tickets (accuracy)", "tickets (macro_f1)", "average"]
    assert rows["LeZO"] == ["80.0 (1)", "50.0 ± 14.1 (2)", "65.0"]


def test_experiments_that_differ_in_more_than_seeds_and_paths_have_rows_of_their_own(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", f"seed={seed}", f"train.micro_batch_size={2 * seed + 2}")
    write_run(tmp_path / "b", "zo.learning_rate=7e-7", "train.eval_batch_size=2", test=0.8)
    # Another task has only one learning rate: that is no difference within a task.
    write_run(tmp_path / "c", "zo.learning_rate=7e-7", "data.task=RTE", test=0.7)
    rows = markdown_rows(tmp_path / "*")
    assert rows["LeZO, learning_rate=1e-06"] == ["90.0 ± 0.0 (2)", "-", "-"]
    assert rows["LeZO, learning_rate=7e-07"] == ["80.0 (1)", "70.0 (1)", "75.0"]
    assert "LeZO" not in rows


def test_what_does_not_count_is_left_out_with_a_warning_of_one_line(tmp_path, caplog):
    write_run(tmp_path / "0-good")
    write_run(tmp_path / "again")
    write_run(tmp_path / "stopped", finished=False, steps=8000)
    write_run(tmp_path / "killed")
    (tmp_path / "killed" / "results.json").unlink()
    for file, text in (("config.yaml", "a: [\n"), ("results.json", "[]"), ("metrics.jsonl", "{")):
        (write_run(tmp_path / f"broken-{file}", "seed=1") / file).write_text(text)
    (write_run(tmp_path / "bomb") / "config.yaml").write_text(BOMB)
    (write_run(tmp_path / "deep") / "results.json").write_text("[" * 100_000)
    (write_run(tmp_path / "broken-score") / "results.json").write_text('{"finished": true}')
    (tmp_path / "assets").mkdir()
    (tmp_path / "run.log").touch()
    rows = markdown_rows(tmp_path / "*", tmp_path / "run.log")
    assert rows["LeZO"] == ["90.0 ± 0.0 (2)"]  # the table does not need metrics.jsonl
    reasons = {
        "again": "it has the settings and seeds of another run",
        "assets": "not a run directory (it has no config.yaml)",
        "bomb": "damaged config.yaml (YAMLError: more than 10000 values",
        "broken-config.yaml": "damaged config.yaml (ParserError: ",
        "broken-results.json": "damaged results.json (AttributeError: ",
        "broken-score": "damaged results.json (KeyError: 'test')",
        "deep": "damaged results.json (RecursionError: ",
        "killed": "no results yet (the run was killed, or is still going)",
        "run.log": "not a run directory (it has no config.yaml)",
        "stopped": "unfinished, at step 8000",
    }
    for name, reason in reasons.items():
        (message,) = [m for m in caplog.messages if f"left out: {tmp_path / name}: " in m]
        assert reason in message
        assert "\n" not in message
    assert len(caplog.messages) == len(reasons)


def test_runs_are_found_by_name_and_pattern_and_each_once(tmp_path, monkeypatch):
    for name in ("b", "a"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / f"{name}.log").touch()
    monkeypatch.chdir(tmp_path)
    found = find_runs(["runs/b", "runs/*", str(tmp_path / "runs" / "a")])
    assert list(map(str, found)) == ["runs/b", "runs/a"]
    for wrong in ("runs/c", "runs/c*", "runs/*.log", str(tmp_path / "none")):
        with pytest.raises(UserError, match="there is no such run"):
            find_runs([wrong])


@pytest.mark.distributed
def test_the_command_prints_the_table_of_a_run_that_was_really_made(tmp_path):
    recipe, path = write_recipe(tmp_path), tmp_path / "run"
    run_well(python("--config", recipe, f"run_dir={path}", "train.steps=2", "train.eval_every=2"))
    score = 100 * json.loads((path / "results.json").read_text())["test"]
    printed = run_well([*COMMAND, str(path), str(tmp_path / "data")])
    assert f"| LeZO           | {score:.1f} (1) |" in printed.out
    assert f"warning: left out: {tmp_path / 'data'}: not a run directory" in printed.err
    assert_refused([*COMMAND, str(tmp_path / "none")], "there is no such run")
    assert_refused(
        [*COMMAND, str(tmp_path / "data")], "there is no finished run to show", "not a run directory"
    )
