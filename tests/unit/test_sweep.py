"""A sweep: the runs of a grid, their states, means over seeds, and the search; a report of them."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from dataclasses import asdict, replace

import pandas as pd
import pytest
import yaml

from lezo_ds.config import with_steps
from lezo_ds.errors import DivergenceError, LezoError, UserError
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.results import RunResults
from lezo_ds.tasks.metrics import label_scores
from lezo_ds.tools import report, sweep
from lezo_ds.tools.charts import Chart, svg
from lezo_ds.tools.page import page, sections
from lezo_ds.tools.report import find_runs
from lezo_ds.tools.sweep import (
    plan_sweep,
    results_frame,
    run_sweep,
    values_around,
    write_tables,
)
from lezo_ds.tools.tables import (
    each_seed_once,
    harness_table,
    name_experiments,
    read_runs,
    score_table,
)

RECIPE = "demo"
RATES = "zo.learning_rate=1e-6,7e-7"
SEEDS = "seed,data.seed=0,1,2"


@pytest.fixture
def plan(tmp_path):
    return lambda *grid, overrides=(): plan_sweep(grid, RECIPE, tmp_path / "sweep", overrides)


def finish(run, test=0.9, dev_loss=0.5, **changes):
    """Write what a run leaves when it is done."""
    results = RunResults(
        task=run.config.data.task,
        method=run.config.method,
        peft=run.config.peft.kind,
        metric="accuracy",
        protocol=run.config.data.protocol,
        finished=True,
        zero_shot=0.5,
        test=test,
        majority_class=0.6,
        best_step=100,
        best_dev_loss=dev_loss,
        trained_dev_loss=dev_loss,
        steps=200,
        early_stop_step=None,
        seed=run.config.seed,
        seconds=10.0,
        peak_memory_bytes=1 << 30,
        skipped_steps=0,
        model_fingerprint="f",
        weights_digest="d",
        world_size=1,
    )
    results = replace(results, **changes)
    run.directory.mkdir(parents=True)
    (run.directory / "config.yaml").write_text(yaml.safe_dump(run.config.model_dump()))
    (run.directory / "results.json").write_text(json.dumps(asdict(results)))
    scores = {f"dev_{results.metric}": 0.9, "dev_loss": dev_loss or 0.0}
    metrics = run.directory / "metrics.jsonl"
    write_lines(metrics, [{"step": step, "seconds": step, **scores} for step in (100, 200)])
    metrics.write_text(metrics.read_text() + '{"step": 2')  # cut by a crash


def answer_test(run, answers):
    """Write what a finished run has answered to its test examples: (prompt, answer)."""
    (run.directory / "predictions").mkdir()
    rows = [{"prompt": prompt, "right": ["good"], "predicted": text} for prompt, text in answers]
    write_lines(run.directory / "predictions" / "step-00000100.jsonl", rows)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def named(*runs):
    """Return the table of runs with the names of their experiments."""
    return name_experiments(read_runs([run.directory for run in runs]))


def test_a_grid_is_every_combination_and_keys_with_a_comma_change_together(plan, tmp_path):
    runs = plan(RATES, SEEDS, overrides=["train.steps=100"])
    assert [(r.config.zo.learning_rate, r.config.seed, r.config.data.seed) for r in runs] == [
        (rate, seed, seed) for rate in (1e-6, 7e-7) for seed in (0, 1, 2)
    ]
    assert {(run.config.train.steps, run.config.train.keep_snapshots) for run in runs} == {(100, 0)}
    assert {run.directory.parent for run in runs} == {tmp_path / "sweep"}
    assert runs[1].directory.name == "zo.learning_rate=1e-06,seed=1"
    assert runs[1].directory == plan("zo.learning_rate=0.000001", "seed,data.seed=1")[0].directory
    assert plan("zo.learning_rate=[1e-6, 7e-7]", SEEDS) == plan(RATES, SEEDS)
    paths = ("/a b", "/a/b", "/" + 99 * "\u6f22\u5b57")
    names = [run.directory.name for run in plan("data.path=" + ",".join(paths))]
    assert len(set(names)) == 3
    assert max(len(name.encode()) for name in names) < 250


@pytest.mark.parametrize(
    ("axis", "index", "message"),
    [
        ("zo.sparsity=0.5,,0.75", None, "is not KEY=VALUE"),
        ("zo.learning_rate=1e-6,0.000001", None, "are the same"),
        ("seed=0,1", -1, "the grid has 2 runs; fix: give 0 to 1"),
        ("seed=0,1", 2, "the grid has 2 runs; fix: give 0 to 1"),
    ],
)
def test_a_grid_that_cannot_be_run_and_a_run_that_it_lacks_are_refused(
    axis, index, message, tmp_path
):
    arguments = {"config": RECIPE, "out": tmp_path, "grid": [axis], "overrides": []}
    arguments |= {"launcher": "python", "tune": None, "list": False, "index": index}
    with pytest.raises(UserError, match=message):
        sweep.main(Namespace(**arguments))


def test_a_file_in_place_of_the_directory_is_named_in_one_line(plan, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LezoError, match=r"file cannot be written: .*File exists.*; fix: "):
        write_tables(plan("seed=0"), tmp_path / "file")


def test_a_run_is_done_when_it_is_finished_with_its_own_settings(plan):
    (run,) = plan("seed=0")
    assert not run.is_done()
    finish(run)
    assert run.is_done()
    (longer,) = plan("seed=0", overrides=["train.steps=30000"])
    assert longer.directory == run.directory and not longer.is_done()
    assert math.isnan(results_frame([longer])["test"][0])
    (run.directory / "results.json").write_text('{"finished": false}')
    assert not run.is_done()


def test_a_run_in_a_chat_or_of_epochs_is_done_though_its_start_decides_its_day_and_steps(plan):
    """A start records the day, and counts the steps of train.epochs."""
    (run,) = plan("seed=0", overrides=["train.steps=null", "train.epochs=2"])
    finish(run)
    counted = with_steps(run.config, num_examples=100)
    started = counted.model_copy(
        update={"data": counted.data.model_copy(update={"date": "2026-01-31"})}
    )
    RunDirectory(str(run.directory)).write_config(started)
    assert run.is_done()
    other_day = run.config.model_copy(
        update={"data": run.config.data.model_copy(update={"date": "2026-02-01"})}
    )
    longer = run.config.model_copy(
        update={"train": run.config.train.model_copy(update={"epochs": 3})}
    )
    for config in (other_day, longer):
        assert not replace(run, config=config).is_done()


def test_the_best_setting_has_the_lowest_mean_validation_loss_of_those_that_are_done(
    plan, tmp_path
):
    runs = plan("zo.learning_rate=1e-6,7e-7,1e-7", "seed=0,1")
    for run, dev_loss in zip(
        runs, (0.4, 0.6, 0.3, 0.4, 0.1), strict=False
    ):  # the last lacks a seed
        finish(run, test=0.5 + dev_loss, dev_loss=dev_loss)
    lines = write_tables(runs, tmp_path).splitlines()
    (marked,) = (line for line in lines if line.endswith("lowest validation loss"))
    # The tests 0.8 and 0.9 have a mean of 0.85 and a sample deviation of 0.0707.
    assert marked.split()[:6] == ["7e-07", "2", "2", "0.35", "0.85", "0.07071"]
    assert list(pd.read_csv(tmp_path / "results.csv")["finished"]) == [*5 * [True], False]


def test_tune_tries_values_on_both_sides_of_the_recipes_and_some_may_diverge(tmp_path, monkeypatch):
    """The runs are not started: what they leave is written, and rates of 1e-5 and more diverge."""
    axis = values_around("zo.learning_rate", RECIPE, tmp_path, ["zo.learning_rate=1e-6"])
    assert axis == "zo.learning_rate=1e-07,3e-07,1e-06,3e-06,1e-05"
    with pytest.raises(UserError, match="needs a number above 0 to start from"):
        values_around("model.path", RECIPE, tmp_path)

    def launch(command, log):
        settings = dict(word.split("=", 1) for word in command if "=" in word)
        rate = float(settings["zo.learning_rate"])
        if rate >= 1e-5:
            return DivergenceError.exit_code
        (run,) = plan_sweep([f"zo.learning_rate={rate}"], RECIPE, tmp_path)
        # None beats the base model.
        finish(run, dev_loss=0.1, trained_dev_loss=abs(math.log10(rate / 3e-6)), best_step=0)
        return 0

    monkeypatch.setattr(sweep, "_launch", launch)
    run_sweep(plan_sweep([axis], RECIPE, tmp_path), ["train"], may_diverge=True)
    lines = write_tables(plan_sweep([axis], RECIPE, tmp_path), tmp_path).splitlines()
    (marked,) = (line for line in lines if line.endswith("lowest validation loss"))
    assert marked.split()[0] == "3e-06"


def test_runs_that_fail_stop_no_others_and_those_that_are_done_are_not_started(plan, caplog):
    done, *others = runs = plan("seed=0,1,2")
    finish(done)
    caplog.set_level("INFO")
    program = "import sys; print(sys.argv[-1]); sys.exit(7)"
    with pytest.raises(LezoError, match=r"2 of 3 runs failed: seed=1 \(exit code 7, see .*\.log"):
        run_sweep(runs, [sys.executable, "-c", program])
    assert caplog.messages[0] == "1 of 3: seed=0: done"
    for run in others:
        assert run.directory.with_suffix(".log").read_text() == f"run_dir={run.directory}\n"


def test_a_run_that_repeats_the_seeds_of_another_one_counts_once(plan, caplog):
    """As of two sweeps that have a run in common."""
    (first,) = plan("train.snapshot_every=0")
    second, other = plan("seed=0,1")
    for run, test in ((first, 0.6), (second, 0.6), (other, 0.9)):
        finish(run, test)
    table = score_table(each_seed_once(named(first, second, other)))
    assert list(table["test"]) == ["75.0 ± 21.2 (2)"]
    assert f"{second.directory} is left out" in caplog.text


def test_a_report_has_a_row_for_each_experiment_and_names_what_differs(plan, tmp_path):
    for run, test in zip(plan(RATES, "seed=0,1"), (0.8, 0.9, 0.7), strict=False):
        finish(run, test)
    finish(
        plan(
            "data.task=boolq", overrides=["zo.sparsity=0", "peft.kind=lora", "model.path=x/OPT-13b"]
        )[0]
    )
    finish(plan("method=zero_shot")[0], test=0.55, dev_loss=None)
    runs = name_experiments(read_runs(find_runs([str(tmp_path / "sweep" / "*")])))
    table = score_table(runs).set_index(["task", "method"])
    assert table.loc[("sst2", "LeZO, learning_rate=1e-06"), "test"] == "85.0 ± 7.1 (2)"
    assert table.loc[("sst2", "LeZO, learning_rate=7e-07"), "test"] == "70.0 (1)"
    assert list(table.loc[("boolq", "MeZO lora"), ["before", "paper"]]) == ["50.0", "71.8"]
    assert list(table.loc[("sst2", "zero-shot"), ["validation loss", "learning rate"]]) == [
        "-",
        "-",
    ]
    file = tmp_path / "page.html"
    report.main(Namespace(runs=[str(tmp_path / "sweep" / "*")], html=file))
    text = file.read_text()
    assert "<td>85.0 ± 7.1 (2)</td>" in text and "Validation loss" in text
    assert not any(loads in text for loads in ('src="', "<script", "<link", "<?xml", "@import"))


OWN_FILES = (
    *("data.path=null", "data.train=t.csv", "data.task=custom", "data.num_test=null"),
    *("data.prompt=Say {x}", "data.label_field=y", "data.labels=good,bad"),
)


SAME = ["", ""]
OTHER_DATA = ["", ", other test data"]
BOTH_SEEDS = "seed,data.seed=0,1"


@pytest.mark.parametrize(
    ("grid", "overrides", "prompts", "changes", "experiments"),
    [
        ("seed=0,1", (), ("ab", "ba"), {}, SAME),
        ("seed=0,1", (), ("ab", "ac"), {}, OTHER_DATA),
        ("seed=0,1", (), ("ab", ""), {}, SAME),  # an older run, or its answers are gone
        (BOTH_SEEDS, (), ("ab", "cd"), {}, SAME),  # drawn by the seed
        (BOTH_SEEDS, OWN_FILES, ("ab", "c"), {}, SAME),  # without a repeated text
        (BOTH_SEEDS, (*OWN_FILES, "data.test=new.csv"), ("ab", "ac"), {}, OTHER_DATA),
        ("data.test=u.csv,v.csv", OWN_FILES, ("ab", "ab"), {}, [", test=u.csv", ", test=v.csv"]),
        (
            "zo.sparsity=.66666,.66667",
            (),
            ("", ""),
            {},
            [", sparsity=0.66666", ", sparsity=0.66667"],
        ),
        ("train.patience=1,2", (), ("ab", "ab"), {}, [", patience=1", ", patience=2"]),
        ("seed=0,1", (), ("ab", "ab"), {"model_fingerprint": "g"}, ["", ", another base model"]),
        ("train.eval_batch_size=1,2", (), ("ab", "ab"), {}, SAME),
        (
            "data.date=2026-01-31,2026-02-01",
            (),
            (("31 Jan: a", "31 Jan: b"), ("1 Feb: a", "1 Feb: b")),  # a chat template's
            {},
            SAME,
        ),
        (
            "train.epochs=1,2",
            ("train.steps=null",),
            ("ab", "ab"),
            {},
            [", epochs=1", ", epochs=2"],
        ),
    ],
)
def test_only_runs_that_differ_in_their_seeds_are_averaged(
    grid, overrides, prompts, changes, experiments, plan, caplog
):
    runs = plan(grid, overrides=overrides)
    for run, letters, changed in zip(runs, prompts, ({}, changes), strict=True):
        finish(run, **changed)
        answer_test(run, [(letter, "good") for letter in letters])
    found = named(*runs)["experiment"].str.replace(r" \(\w+\)$", "", regex=True)
    assert list(found) == [f"LeZO{name}" for name in experiments]
    is_warned = any("data" in name or "model" in name for name in experiments)
    problem = experiments[1].removeprefix(", ")
    expected = f"{runs[1].directory} is not averaged with others of its settings: it has {problem}"
    assert [expected in message for message in caplog.messages] == [True] * is_warned


def test_a_sweep_whose_test_data_has_changed_meanwhile_says_so(plan, tmp_path):
    runs = plan("seed=0,1,2")
    for run, letters, test in zip(runs, ("ab", "ac", "ad"), (0.9, 0.5, 0.4), strict=True):
        finish(run, test)
        answer_test(run, [(letter, "good") for letter in letters])
    lines = write_tables(runs, tmp_path).splitlines()
    assert ", other test data" in lines[3] and " 0.4 " in lines[3]
    assert "data" not in pd.read_csv(tmp_path / "results.csv")


def test_a_report_of_one_run_has_a_table_by_label_and_a_page_has_one_for_each(plan, capsys):
    first, second = plan("seed=0,1")
    scores = label_scores(["bug", "bug", "bill"], ["bug", "bill", "bill"])
    finish(first, macro_f1=2 / 3, by_label=scores)
    finish(second)
    report.main(Namespace(runs=[str(first.directory)], html=None))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bug", "2", "1", "100.0", "50.0", "66.7"] in lines
    assert "66.7" in lines[1] and "F1" in lines[0]
    report.main(Namespace(runs=[str(first.directory), str(second.directory)], html=None))
    assert "bug" not in capsys.readouterr().out  # the table by label of one run only
    text = page(named(first, second))
    assert text.count("Scores by label of") == 1 and "<td>bug</td><td>2</td>" in text


def test_a_page_shows_answers_with_their_rewards_of_the_first_and_the_last_evaluation(plan):
    (run,) = plan("seed=0")
    finish(run, metric="reward")
    line = {"split": "dev", "index": 0, "prompt": "Say <i>", "ended": True}
    answers = [
        {"step": step, "answer": f"<b>{step}", "reward": step / 10} | line for step in (0, 1, 2)
    ]
    write_lines(run.directory / "samples.jsonl", answers)
    text = page(named(run))
    assert "Say &lt;i&gt;" in text and "<i>" not in text
    assert "&lt;b&gt;0" in text and "&lt;b&gt;2</td><td>0.2</td>" in text
    assert "&lt;b&gt;1" not in text


def test_a_page_draws_the_first_of_several_scores_of_an_evaluation(plan):
    first, second = plan("seed=0,1")
    finish(first)
    finish(second)
    line = {"step": 100, "seconds": 1, "dev_accuracy": 0.5, "dev_macro_f1": 0.1, "dev_loss": 1}
    write_lines(second.directory / "metrics.jsonl", [line])
    runs = named(first, second)
    ((_, (scores, _)),) = sections(runs)
    assert scores.curves == {"LeZO": [(100, 70), (200, 90)]}
    assert "<svg" in page(runs)


def test_the_columns_that_matter_come_first_and_empty_ones_are_left_out(plan):
    (run,) = plan("seed=0")
    finish(run)
    columns = list(score_table(named(run)))
    assert columns[:2] == ["method", "test"]
    assert "macro F1" not in columns and "" not in columns


def test_a_page_without_matplotlib_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"fix: pip install 'lezo_ds\[report\]'"):
        report.main(Namespace(runs=[str(tmp_path)], html=tmp_path / "page.html"))


@pytest.mark.parametrize("value", [0.7, 1e17, 1e300, 0.0])
def test_a_chart_of_equal_values_is_drawn(value):
    """Or of values that differ by their last bit. Nothing looks for round numbers between them."""
    curves = {
        "equal": [(0, value), (1, value)],
        "near": [(0, math.nextafter(value, 0)), (1, value)],
    }
    drawn = svg(Chart("Loss", "step", {**curves, "one point": [(5, value)]}, {"step 0": value}))
    assert drawn.startswith("<svg") and "near" in drawn
    assert "no curve" in svg(Chart("no curve", "step", {}, {}))


def test_a_run_is_found_by_its_name_and_counts_once(tmp_path):
    for run in (runs := [tmp_path / "a[1]", tmp_path / "b"]):
        run.mkdir()
    (tmp_path / "latest").symlink_to("b")
    assert find_runs([str(runs[0]), f"{tmp_path}/*"]) == runs


def test_a_page_shows_what_a_run_has_gained_and_ten_wrong_answers(plan, caplog):
    own = ["data.task=custom", "data.path=null", "data.prompt=Say {x}", "data.completion={y}"]
    tables = plan("data.train=a/t.csv,b/t.csv,c/t.csv", overrides=own)
    for run in tables:  # of the same name, so of the same task
        finish(run, metric="f1")
    rows = {"step": 0, "test_f1": 0.5}, {"step": [1], "seconds": 1, "dev_loss": 1.0, "dev_f1": 0.5}
    for run, row in zip(
        tables[1:], rows, strict=True
    ):  # the first has no curve, the second is damaged
        (run.directory / "metrics.jsonl").write_text(json.dumps(row))
    finish(run := plan("seed=0")[0], test=0.45, worse_than_base=True)
    metrics = run.directory / "metrics.jsonl"
    start = {"step": 0, "seconds": 0.0, "dev_loss": 0.7, "dev_accuracy": 0.51}
    metrics.write_text(json.dumps(start) + "\n" + metrics.read_text())
    answer_test(run, [("It was", "good" if n < 9 else "<bad>") for n in range(20)])
    runs = named(*tables, run)
    table, text = score_table(runs), page(runs)
    assert (
        caplog.text.count("no curve of") == 1
        and f"no curve of {tables[2].directory}" in caplog.text
    )
    assert list(table["task"]) == ["t", "t", "t", "sst2"]
    assert list(table["standard error"]) == ["-", "-", "-", "11.4"]  # sqrt(0.45 * 0.55 / 19)
    assert "<mark>worse than before training</mark>" in text
    assert "10 of 11 wrong answers" in text and text.count("<td>&lt;bad&gt;</td>") == 10
    found = list(sections(runs))
    scores, losses = found[-1][1]
    assert scores.levels == {"step 0": 51, "zero-shot, test split": 50, "majority class": 60}
    assert losses.levels == {"step 0": 0.7} and found[0][1][1].levels == {}
    assert scores.curves == {"LeZO": [(0, 51), (100, 90), (200, 90)]}
    assert "zero-shot, test split: 50" in text and text.count("<svg") == 4
    assert len(text) < 100_000


def test_scores_of_lm_eval_stand_next_to_each_other_by_step(tmp_path):
    def line(step, accuracy, limit=None, **more):
        scores = {"alias": "reviews", "acc,none": accuracy, "acc_stderr,none": 0.1, **more}
        return json.dumps({"step": step, "limit": limit, "results": {"reviews": scores}})

    measured = [line(0, 0.25), line(8, 0.5), line(8, 0.75, f1=0.5, limit=10)]
    (tmp_path / "lm_eval.jsonl").write_text("\n".join(measured))
    assert harness_table(tmp_path).to_dict("records") == [
        {"lm-eval": "reviews", "metric": metric, "examples": examples} | scores
        for metric, examples, scores in (
            ("acc", "all", {"step 0": "0.2500", "step 8": "0.5000"}),
            ("acc", "10", {"step 0": "-", "step 8": "0.7500"}),
            ("f1", "10", {"step 0": "-", "step 8": "0.5000"}),
        )
    ]
    assert harness_table(tmp_path / "none").empty
