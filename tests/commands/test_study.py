"""Studies: the search of each method's rate, the table, and a study that really runs."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pandas as pd
import pytest
import yaml
from assets import REPOSITORY, write_recipe
from commands import run, run_well

from lezo_ds.config import config_to_dict
from lezo_ds.errors import LezoError, UserError
from lezo_ds.tools.study import Method, Study, changes_to_recipe, read_study, run_study
from lezo_ds.tools.sweep import plan_sweep

GRID = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
LEZO = Method("LeZO 0.75", ("zo.sparsity=0.75",), "zo.learning_rate", start=1e-5, num_seeds=2, tasks=None)
STUDY = Study(
    recipe="opt-13b-sst2-lezo",
    changes=("train.steps=100",),
    seeds=(0, 1),
    grid=GRID,
    tasks={"sst2": ("data.num_test=500",)},
    methods=(LEZO,),
)


def finish(directory, losses, seeds=(0, 1), method=LEZO):
    """Write what the runs of a method leave at the rates that have a loss. The test score is 1 - loss."""
    for rate, loss in losses.items():
        for seed in seeds:
            grid = [f"zo.learning_rate={rate:g}", f"seed={seed}"]
            overrides = [*STUDY.changes, *STUDY.tasks["sst2"], *method.changes]
            (planned,) = plan_sweep(STUDY.recipe, grid, directory / "sst2" / "LeZO-0.75", overrides)
            results = {"finished": True, "metric": "accuracy", "test": 1 - loss + seed / 10, "zero_shot": 0.5}
            results |= {"majority_class": 0.5, "best_dev_loss": loss, "best_step": 100, "steps": 100}
            results |= {"seconds": 60.0, "peak_memory_bytes": 2**30}
            planned.directory.mkdir(parents=True)
            (planned.directory / "config.yaml").write_text(yaml.safe_dump(config_to_dict(planned.config)))
            (planned.directory / "results.json").write_text(json.dumps(results))


def test_the_search_goes_on_until_the_best_rate_has_worse_neighbors(tmp_path):
    finish(tmp_path, {1e-6: 0.9, 1e-5: 0.7, 1e-4: 0.5, 1e-3: 0.6})
    text = run_study(STUDY, tmp_path, ["no such program"])
    (row,) = pd.read_csv(tmp_path / "study.csv").to_dict("records")
    assert (row["rate"], row["rates_tried"], row["runs"]) == (1e-4, 4, 2)
    assert row["test"] == pytest.approx(0.55)
    assert row["test_deviation"] == pytest.approx(0.1 / math.sqrt(2))
    assert row["forward_passes"] == 2 * 100
    assert "LeZO 0.75" in text
    assert "55.0 ± 7.1" in text


def test_the_search_ends_at_the_end_of_the_grid_and_a_lost_run_is_worse_than_any(tmp_path):
    finish(tmp_path, {1e-6: 0.4, 1e-5: math.nan})
    finish(tmp_path, {1e-4: 0.5}, seeds=(0,))
    run_study(STUDY, tmp_path, ["no such program"])
    (row,) = pd.read_csv(tmp_path / "study.csv").to_dict("records")
    assert (row["rate"], row["rates_tried"]) == (1e-6, 3)


def test_a_run_that_is_not_done_is_started(tmp_path):
    finish(tmp_path, {1e-6: 0.9, 1e-5: 0.7})
    with pytest.raises(LezoError, match=r"1 of 1 runs failed: zo\.learning_rate=0\.0001,seed=0"):
        run_study(STUDY, tmp_path, ["false"])
    assert not (tmp_path / "study.csv").exists()


@pytest.mark.parametrize(("change", "kept"), [((), "0"), (("train.keep_snapshots=1",), "1")])
def test_the_runs_of_a_study_keep_no_weights_unless_it_says_so(change, kept, tmp_path):
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "started"}\n')
    program.chmod(0o755)
    method = replace(LEZO, changes=("method=adamw",), rate="adamw.learning_rate")
    with pytest.raises(LezoError, match="runs failed"):
        run_study(replace(STUDY, changes=change, methods=(method,)), tmp_path / "out", [str(program)])
    assert (tmp_path / "started").read_text().split().count(f"train.keep_snapshots={kept}") == 1


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "launch" / "studies").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_study_of_the_repository_plans_valid_runs(path, tmp_path):
    study = read_study(path)
    assert len(study.methods) >= 12
    for task in study.tasks:
        for method in study.methods:
            rate = [] if method.rate is None else [f"{method.rate}={method.start}"]
            changes = changes_to_recipe(study, task, method)
            (planned,) = plan_sweep(str(REPOSITORY / study.recipe), ["seed=0", *rate], tmp_path, changes)
            assert planned.config.train.keep_snapshots == 0


def test_the_last_change_of_a_key_counts():
    method = replace(LEZO, changes=("zo.directions=3", "zo.sparsity=0.5", "zo.directions=4"))
    changes = changes_to_recipe(replace(STUDY, changes=("train.keep_snapshots=1",)), "sst2", method)
    assert changes == [
        *("train.keep_snapshots=1", "data.num_test=500", "zo.directions=4", "zo.sparsity=0.5"),
    ]


def test_a_method_takes_the_changes_of_the_one_it_is_like_and_then_its_own():
    study = read_study(REPOSITORY / "launch" / "studies" / "estimators.yaml")
    by_name = {method.name: method.changes for method in study.methods}
    assert by_name["SPSA 8, last 10"] == (
        *by_name["FZOO 15, last 10"],
        "zo.estimator=spsa",
        "zo.directions=8",
    )


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"seeds": None}, "TypeError"),
        ({"tasks": []}, "AttributeError"),
        ({"methods": [{"changes": []}]}, "KeyError: 'name'"),
        (
            {"methods": [{"name": "a", "changes": [], "rate": "b", "start": 2}]},
            "a: start 2.0 is not in the grid",
        ),
        ({"methods": [{"name": "a", "changes": [], "rate": "b"}]}, "a: start nan is not in the grid"),
        ({"methods": [{"name": "a", "like": "b", "changes": []}]}, "no method above it has the name b"),
        ({"methods": [{"name": "a", "changes": []}] * 2}, "two methods have the name a"),
    ],
    ids=str,
)
def test_a_file_that_is_no_study_is_refused(change, got, tmp_path):
    values = {"recipe": "a", "changes": [], "seeds": [0], "grid": [1], "tasks": {}, "methods": []}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(values | change))
    with pytest.raises(UserError, match="is not a study") as caught:
        read_study(tmp_path / "study.yaml")
    assert got in str(caught.value)


@pytest.mark.long
@pytest.mark.distributed
def test_a_study_that_is_started_twice_runs_once(tmp_path):
    recipe = write_recipe(tmp_path)
    methods = [
        {"name": "zero-shot", "changes": ["method=zero_shot"]},
        {"name": "LeZO", "changes": [], "rate": "zo.learning_rate", "start": 1e-3, "num_seeds": 2},
    ]
    values = {"recipe": str(recipe), "changes": ["train.steps=4"], "seeds": [0, 1], "grid": [1e-3, 1e-2]}
    values |= {"tasks": {"reviews": ["data.num_test=7"]}, "methods": methods}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, str(REPOSITORY / "launch" / "study.py"), str(tmp_path / "study.yaml")]
    first = run_well([*command, "--out", str(tmp_path / "out")])
    rows = pd.read_csv(tmp_path / "out" / "study.csv")
    assert list(rows["method"]) == ["zero-shot", "LeZO"]
    assert list(rows["runs"]) == [1, 2]
    assert list(rows["forward_passes"]) == [0, 8]
    again = run([*command, "--out", str(tmp_path / "out")])
    assert again.out == first.out
    assert again.err.count("done before") == 5


def test_methods_may_run_on_some_tasks_only(tmp_path):
    finish(tmp_path, {1e-6: 0.9, 1e-5: 0.7, 1e-4: 0.8})
    elsewhere = replace(LEZO, name="elsewhere", tasks=("boolq",))
    run_study(replace(STUDY, methods=(elsewhere, LEZO)), tmp_path, ["no such program"])
    assert list(pd.read_csv(tmp_path / "study.csv")["method"]) == ["LeZO 0.75"]
