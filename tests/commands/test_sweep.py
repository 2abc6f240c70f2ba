"""Sweeps: the runs of a grid, their states, their tables, and a sweep that really runs."""

from __future__ import annotations

import csv
import json
import math
import signal
import sys

import pytest
import yaml
from assets import write_recipe
from commands import TIMEOUT_SECONDS, run, run_well, start

from lezo_ds.config import config_to_dict
from lezo_ds.errors import UserError
from lezo_ds.tools.sweep import (
    listing,
    plan_sweep,
    results_frame,
    select_run,
    summary_frame,
    write_tables,
)

RECIPE = "opt-13b-sst2-lezo"
RATES = "zo.learning_rate=1e-6,7e-7"
SEEDS = "seed,data.seed=0,1,2"


@pytest.fixture
def plan(tmp_path):
    """Plan a sweep of a recipe of the paper."""

    def planned(*grid, overrides=()):
        return plan_sweep(RECIPE, grid, tmp_path / "sweep", overrides)

    return planned


def finish(run, test, dev_loss=0.5, **changes):
    """Write what a run leaves when it is done."""
    results = {"finished": True, "metric": "accuracy", "test": test, "zero_shot": 0.5, "majority_class": 0.5}
    results |= {"best_dev_loss": dev_loss, "best_step": 100, "steps": 200, "seconds": 10.0} | changes
    run.directory.mkdir(parents=True)
    (run.directory / "config.yaml").write_text(yaml.safe_dump(config_to_dict(run.config)))
    (run.directory / "results.json").write_text(json.dumps(results))


def test_a_grid_is_every_combination_of_its_values_the_last_key_changing_fastest(plan, tmp_path):
    runs = plan(RATES, "zo.sparsity=0.5,0.75", SEEDS, overrides=["train.steps=100"])
    assert [run.index for run in runs] == list(range(12))
    assert [(r.config.zo.learning_rate, r.config.zo.sparsity, r.config.seed) for r in runs] == [
        (rate, sparsity, seed) for rate in (1e-6, 7e-7) for sparsity in (0.5, 0.75) for seed in (0, 1, 2)
    ]
    assert {run.config.train.steps for run in runs} == {100}
    assert len({run.directory for run in runs}) == 12
    assert {run.directory.parent for run in runs} == {tmp_path / "sweep"}


def test_keys_with_a_comma_between_them_change_together(plan):
    runs = plan(SEEDS)
    assert [(run.config.seed, run.config.data.seed) for run in runs] == [(0, 0), (1, 1), (2, 2)]
    assert runs[1].settings == {"seed": 1, "data.seed": 1}


def test_the_name_of_a_run_does_not_depend_on_how_a_value_is_written(plan):
    (by_exponent,), (by_zeros,) = plan("zo.learning_rate=1e-6"), plan("zo.learning_rate=0.000001")
    assert by_exponent.directory == by_zeros.directory
    assert by_exponent.directory.name == "zo.learning_rate=1e-06"


def test_a_value_with_slashes_names_a_directory_right_below_the_sweeps(plan, tmp_path):
    (run,) = plan("model.path=/models/opt-125m")
    assert run.directory.parent == tmp_path / "sweep"


@pytest.mark.parametrize(
    ("grid", "overrides", "what"),
    [
        (["zo.sparsity"], [], "not a key and its values"),
        (["zo.sparsity=0.5,,0.75"], [], "not a key and its values"),
        (["=0.5"], [], "not a key and its values"),
        (["seed=0", "seed=1"], [], "a sweep cannot set seed like this"),
        (["seed=0"], ["seed=1"], "a sweep cannot set seed like this"),
        (["run_dir=a,b"], [], "a sweep cannot set run_dir like this"),
        (["seed=0"], ["run_dir=a"], "a sweep cannot set run_dir like this"),
        (["zo.learning_rate=1e-6,0.000001"], [], "two runs of the grid are the same"),
        (["zo.sparsity=0.5,1.5"], [], "zo.sparsity"),
        (["zo.sparsty=0.5"], [], "zo.sparsty"),
    ],
)
def test_a_grid_that_cannot_be_run_is_refused_whole(grid, overrides, what, plan):
    with pytest.raises(UserError, match=what):
        plan(*grid, overrides=overrides)


def test_a_run_is_selected_by_its_index(plan):
    runs = plan(SEEDS)
    assert select_run(runs, 2) is runs[2]
    for index in (-1, 3):
        with pytest.raises(UserError, match="0 to 2"):
            select_run(runs, index)


def test_a_run_is_new_then_begun_then_done(plan):
    (run,) = plan("seed=0")
    assert run.state() == "new"
    finish(run, test=None, finished=False)
    assert run.state() == "begun"
    for damaged in ("", "[", "[" * 100_000, "[]"):
        (run.directory / "results.json").write_text(damaged)
        assert run.state() == "begun"
    (run.directory / "results.json").write_text('{"finished": true}')
    assert run.state() == "done"
    assert listing([run]).split() == ["0", "done", str(run.directory)]


def test_a_run_that_was_done_with_other_settings_is_not_done(plan):
    (run,) = plan("seed=0")
    finish(run, test=0.9)
    (longer,) = plan("seed=0", overrides=["train.steps=30000"])
    assert longer.directory == run.directory
    assert (run.state(), longer.state()) == ("done", "begun")


def test_finished_runs_keep_no_weights_that_a_journal_gives_back(plan):
    lezo, adamw = plan("method=lezo,adamw")
    assert (lezo.config.train.keep_snapshots, adamw.config.train.keep_snapshots) == (0, 2)
    (asked,) = plan("seed=0", overrides=["train.keep_snapshots=3"])
    assert asked.config.train.keep_snapshots == 3
    finish(asked, test=0.9)
    (not_asked,) = plan("seed=0")
    assert (not_asked.directory, not_asked.state()) == (asked.directory, "done")


def summary_of(runs):
    return summary_frame(results_frame(runs), list(runs[0].settings))


def test_a_setting_is_summed_up_over_its_seeds(plan):
    runs = plan(RATES, SEEDS)
    for done, test, dev_loss in zip(runs[:3], (0.90, 0.92, 0.94), (0.1, 0.2, 0.6), strict=True):
        finish(done, test, dev_loss)
    finish(runs[3], 0.8)
    first, second = summary_of(runs).to_dict("records")
    assert (first["zo.learning_rate"], first["runs"], first["finished"]) == (1e-6, 3, 3)
    # The deviations from 0.92 are -0.02, 0 and 0.02: a variance of 0.0008 / 2, a deviation of 0.02.
    assert (first["test"], first["test_deviation"]) == (pytest.approx(0.92), pytest.approx(0.02))
    assert (first["best_dev_loss"], first["seconds"]) == (pytest.approx(0.3), pytest.approx(10.0))
    assert (second["finished"], second["test"]) == (1, 0.8)
    assert math.isnan(second["test_deviation"])


def test_a_run_that_was_done_with_other_settings_is_in_no_mean(plan):
    finish(plan("seed=0")[0], test=0.9)
    (row,) = results_frame(plan("seed=0", overrides=["train.steps=30000"])).to_dict("records")
    assert (row["state"], row["finished"]) == ("begun", False)
    assert math.isnan(row["test"])


def test_the_best_setting_has_the_lowest_validation_loss_of_those_that_are_done(plan, tmp_path):
    runs = plan("zo.learning_rate=1e-6,7e-7,1e-7", "seed=0,1")
    for done, dev_loss in zip(runs, (0.4, 0.6, 0.3, 0.4, 0.1), strict=False):
        finish(done, test=0.5 + dev_loss, dev_loss=dev_loss)
    assert list(summary_of(runs)["best"]) == [False, True, False]  # the third is at 0.1 but lacks a seed
    lines = write_tables(runs, tmp_path).splitlines()
    (marked,) = (line for line in lines if line.endswith("lowest validation loss"))
    assert float(marked.split()[0]) == 7e-7


def test_no_setting_is_the_best_before_one_is_done_or_without_validation_losses(plan, tmp_path):
    runs = plan(RATES, overrides=["method=zero_shot"])
    assert not summary_of(runs)["best"].any()
    for done in runs:
        finish(done, test=0.6, dev_loss=None)
    assert not summary_of(runs)["best"].any()
    assert "lowest" not in write_tables(runs, tmp_path)


def read_rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_tables_have_a_row_for_each_run_and_one_for_each_setting(plan, tmp_path):
    runs = plan(RATES, "seed=0,1")
    finish(runs[0], 0.75, dev_loss=0.25)
    finish(runs[1], 0.25, dev_loss=0.75)
    write_tables(runs, tmp_path / "tables")
    results = read_rows(tmp_path / "tables" / "results.csv")
    assert [row["run"] for row in results] == [run.directory.name for run in runs]
    assert [(row["seed"], row["state"], row["test"]) for row in results] == [
        ("0", "done", "0.75"),
        ("1", "done", "0.25"),
        ("0", "new", ""),
        ("1", "new", ""),
    ]
    summary = read_rows(tmp_path / "tables" / "summary.csv")
    columns = ("zo.learning_rate", "runs", "finished", "test", "best")
    assert [tuple(row[column] for column in columns) for row in summary] == [
        ("1e-06", "2", "2", "0.5", "True"),
        ("7e-07", "2", "0", "", "False"),
    ]


def sweep(directory, *arguments):
    """Return the command of a sweep of small runs, of which those on more data than there is fail."""
    command = [sys.executable, "launch/sweep.py", "--out", directory / "sweep"]
    recipe = directory / "recipe.yaml"
    return [*command, "--config", recipe if recipe.exists() else write_recipe(directory), *arguments]


@pytest.mark.distributed
def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path):
    directory = tmp_path / "sweep"
    command = sweep(tmp_path, "--grid", "data.num_train=3000,30")
    finished = run(command)
    assert finished.code == 1
    (error,) = (line for line in finished.err.splitlines() if line.startswith("error: "))
    assert "1 of 2 runs failed: data.num_train=3000 (exit code 2, see " in error
    assert "error: " in (directory / "data.num_train=3000.log").read_text()
    assert [row["state"] for row in read_rows(directory / "results.csv")] == ["new", "done"]
    assert finished.out.count("lowest validation loss") == 1
    done = list((directory / "data.num_train=30").iterdir())
    before = {path: path.stat().st_mtime_ns for path in [*done, directory / "data.num_train=30.log"]}
    again = run(command)
    assert again.code == 1
    assert again.err.count("data.num_train=30: done before") == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.distributed
def test_a_sweep_that_is_stopped_goes_on_and_a_run_by_its_index_is_part_of_it(tmp_path):
    arguments = ("train.steps=40", "train.eval_every=20", "--grid", "seed=0,1")
    directory = tmp_path / "sweep"
    with start(sweep(tmp_path, *arguments)) as process:
        for line in process.stderr:
            if "step 0: " in line:  # the first run has begun
                break
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 1
    assert "error: stopped by SIGTERM; fix: run the same command again" in err
    assert json.loads((directory / "seed=0" / "results.json").read_text())["finished"] is False
    assert not (directory / "seed=1").exists()
    run_well(sweep(tmp_path, "--index", "1", *arguments))
    states = run_well(sweep(tmp_path, "--list", *arguments)).out
    assert [line.split()[1] for line in states.splitlines()[:2]] == ["begun", "done"]
    last = run_well(sweep(tmp_path, *arguments))
    assert "seed=0: continues" in last.err
    assert "seed=1: done before" in last.err
    assert [row["state"] for row in read_rows(directory / "results.csv")] == ["done", "done"]
