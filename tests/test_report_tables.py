"""Tables of finished runs: means, deviations and averages, the paper's numbers, and what is left out."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest
import yaml
from assets import REPOSITORY, write_recipe
from commands import python, run, run_well

from lezo_ds.config import config_to_dict
from lezo_ds.errors import UserError
from lezo_ds.recipes import load_recipe
from lezo_ds.tools.reports.tables import average, find_runs, read_report, to_csv, to_markdown, write_report

VERSIONS = {"python": "3.11.4", "torch": "2.13.0"}


@pytest.fixture
def write_run(tmp_path):
    """Write what a run leaves; `test` and `majority` are shares, `settings` overrides of its recipe."""

    def write(name, test, *settings, majority=0.5, recipe="opt-13b-sst2-lezo", versions=VERSIONS, **results):
        config = load_recipe(recipe, settings)
        path = tmp_path / name
        path.mkdir()
        (path / "config.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
        values = {"finished": True, "test": test, "majority_class": majority, "steps": 20000}
        (path / "results.json").write_text(json.dumps(values | {"versions": versions} | results))
        return path

    return write


def markdown_rows(report):
    """Return the cells of each line of the tables by their first: Markdown, read independently."""
    lines = [line for line in to_markdown(report).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_a_cell_is_the_mean_and_sample_deviation_over_seeds(write_run):
    # The deviations from 0.92 are -0.02, 0 and 0.02: a variance of 0.0008 / 2, a deviation of 0.02.
    paths = [write_run(f"run-{seed}", 0.90 + 0.02 * seed, f"seed={seed}") for seed in range(3)]
    report = read_report(paths)
    assert report.warnings == ()
    (table,) = report.tables
    majority, measured, paper = table.rows
    assert (table.model, table.tasks) == ("opt-13b", ("sst2",))
    assert (majority.label, majority.scores["sst2"].mean) == ("majority class", 50.0)
    assert measured.label == "LeZO"
    assert measured.scores["sst2"].mean == pytest.approx(92.0)
    assert measured.scores["sst2"].deviation == pytest.approx(2.0)
    assert measured.num_runs == {"sst2": 3}
    assert (paper.label, paper.is_paper) == ("LeZO (paper)", True)
    rows = markdown_rows(report)
    assert rows["LeZO"] == ["92.0 +- 2.0 (3)"]
    assert rows["LeZO (paper)"] == ["93.0 +- 0.3"]


def test_a_single_run_has_no_deviation(write_run):
    assert markdown_rows(read_report([write_run("run", 0.9)]))["LeZO"] == ["90.0 (1)"]


def test_rows_and_columns_stand_in_the_papers_order(write_run):
    recipes = ["squad-lezo-prefix", "sst2-lezo", "cb-mezo", "sst2-zero-shot", "cb-adamw", "sst2-mezo-lora"]
    recipes += ["boolq-icl"]
    report = read_report([write_run(name, 0.5, recipe=f"opt-13b-{name}") for name in recipes])
    (table,) = report.tables
    assert table.tasks == ("sst2", "cb", "boolq", "squad")
    labels = ["zero-shot", "ICL", "FT (AdamW)", "MeZO", "LeZO", "MeZO LoRA", "LeZO prefix"]
    assert [row.label for row in table.rows if not row.is_paper] == ["majority class", *labels]
    assert [row.label for row in table.rows if row.is_paper] == [f"{label} (paper)" for label in labels]
    rows = markdown_rows(report)
    assert rows[""] == ["SST-2", "CB", "BoolQ", "SQuAD", "average"]
    assert rows["FT (AdamW)"] == ["-", "50.0 (1)", "-", "-", "-"]
    assert rows["FT (AdamW) (paper)"][:3] == ["92.0", "83.9", "77.1"]
    assert rows["LeZO prefix (paper)"][3] == "83.1 +- 0.4"


def test_the_average_is_over_all_tasks_and_missing_where_one_is(write_run):
    write = [("sst2-lezo", 0.9), ("rte-lezo", 0.6), ("copa-lezo", 0.84), ("sst2-mezo", 0.8)]
    report = read_report([write_run(name, test, recipe=f"opt-13b-{name}") for name, test in write])
    rows = markdown_rows(report)
    assert rows["LeZO"][-1] == "78.0"
    assert rows["MeZO"][-1] == "-"
    # 93.0, 71.4 and 87.2 are the paper's.
    assert rows["LeZO (paper)"][-1] == "83.9"
    (table,) = report.tables
    assert average(table, table.rows[1]) is None
    assert table.rows[1].label == "MeZO"


def test_the_average_of_all_tasks_of_13b_is_the_one_the_paper_prints(write_run):
    tasks = ("sst2", "rte", "cb", "boolq", "wsc", "wic", "copa", "squad")
    recipes = [f"opt-13b-{task}-{method}" for task in tasks for method in ("zero-shot", "lezo")]
    rows = markdown_rows(read_report([write_run(recipe, 0.5, recipe=recipe) for recipe in recipes]))
    assert rows["zero-shot (paper)"][-1] == "55.4"
    assert rows["LeZO (paper)"][-1] == "75.4"


def test_the_majority_class_is_the_mean_over_runs_and_missing_where_it_means_nothing(write_run):
    paths = [write_run(f"boolq-{n}", 0.7, f"data.seed={n}", majority=0.6 + 0.02 * n) for n in range(2)]
    paths.append(write_run("squad", 0.8, recipe="opt-13b-squad-lezo", majority=None))
    rows = markdown_rows(read_report(paths))
    assert rows["majority class"] == ["61.0", "-", "-"]


def test_each_model_has_its_table_and_only_the_papers_models_its_numbers(write_run):
    own = write_run("own", 0.7, "model.path=models/mine")
    small = write_run("small", 0.8, "model.path=somewhere/OPT-1.3b")
    report = read_report([own, small])
    assert [table.model for table in report.tables] == ["models/mine", "opt-1.3b"]
    mine, paper = report.tables
    assert [row.label for row in mine.rows] == ["majority class", "LeZO"]
    assert paper.rows[-1].scores["sst2"].mean == 91.9


def test_runs_of_a_cell_that_differ_in_more_than_seeds_have_rows_of_their_own(write_run):
    paths = [write_run(f"a{seed}", 0.9, f"seed={seed}", "zo.learning_rate=1e-6") for seed in (0, 1)]
    paths += [write_run("b", 0.8, "zo.learning_rate=7e-7")]
    # Another task has but one learning rate: that is no difference within a cell.
    paths += [write_run("c", 0.7, "zo.learning_rate=7e-7", recipe="opt-13b-rte-lezo")]
    rows = markdown_rows(read_report(paths))
    assert rows["LeZO, zo.learning_rate=1e-06"] == ["90.0 +- 0.0 (2)", "-", "-"]
    assert rows["LeZO, zo.learning_rate=7e-07"] == ["80.0 (1)", "70.0 (1)", "75.0"]
    assert "LeZO" not in rows


def test_where_a_run_lies_and_how_it_is_cut_is_no_difference(write_run):
    paths = [
        write_run("a", 0.9, "seed=0", "run_dir=a", "train.micro_batch_size=4"),
        write_run("b", 0.9, "seed=1", "run_dir=b", "deepspeed=null", "train.eval_batch_size=2"),
    ]
    assert markdown_rows(read_report(paths))["LeZO"] == ["90.0 +- 0.0 (2)"]


def test_runs_of_the_same_seeds_and_settings_are_counted_once(write_run):
    first, again = write_run("first", 0.9), write_run("again", 0.8)
    other = write_run("other", 0.7, "data.seed=1")
    report = read_report([first, again, other])
    assert report.warnings == (
        f"counted once: {again} has the seeds and settings of {first}, though they score 90.00 and 80.00",
    )
    assert markdown_rows(report)["LeZO"][0].startswith("80.0 +- 14.1 (2)")


def test_versions_that_differ_and_protocols_that_differ_are_named(write_run):
    paths = [
        write_run("a", 0.9, "seed=0"),
        write_run("b", 0.9, "seed=1", versions=VERSIONS | {"torch": "2.12.0"}),
        write_run("c", 0.9, "data.protocol=clean", recipe="opt-13b-rte-lezo"),
    ]
    report = read_report(paths)
    assert report.versions["torch"] == ("2.13.0", "2.12.0")
    assert report.warnings == (
        f"torch differs: 2.13.0 in {paths[0]}, {paths[2]}; 2.12.0 in {paths[1]}",
        f"data.protocol differs: mezo in {paths[0]}, {paths[1]}; clean in {paths[2]}",
    )
    text = to_markdown(report)
    assert "python 3.11.4, torch 2.13.0 / 2.12.0, data.protocol mezo / clean." in text
    assert all(f"- {warning}\n" in text for warning in report.warnings)


def test_what_is_not_a_finished_run_is_left_out_and_named(write_run, tmp_path):
    good = write_run("good", 0.9)
    stopped = write_run("stopped", None, "seed=1", finished=False, steps=8000)
    killed = write_run("killed", 0.9, "seed=2")
    (killed / "results.json").unlink()
    (tmp_path / "assets").mkdir()
    (tmp_path / "run.log").write_text("text")
    report = read_report(find_runs([str(tmp_path / "*"), str(tmp_path / "run.log")]))
    assert report.warnings == (
        f"left out: {tmp_path / 'assets'}: not a run directory (it has no config.yaml)",
        f"left out: {killed}: no results yet (the run was killed, or is still going)",
        f"left out: {stopped}: unfinished, at step 8000",
        f"left out: {tmp_path / 'run.log'}: not a run directory (it has no config.yaml)",
    )
    assert markdown_rows(report)["LeZO"] == ["90.0 (1)"]
    assert good.name not in str(report.warnings)


def test_without_any_finished_run_the_reasons_are_given(write_run, tmp_path):
    stopped = write_run("stopped", None, finished=False, steps=8000)
    with pytest.raises(UserError, match=r"no finished run.*unfinished, at step 8000.*fix: "):
        read_report([stopped])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("results.json", "{"),
        ("results.json", '{"finished": true}'),
        ("results.json", "[]"),
        ("config.yaml", "a: ["),
    ],
)
def test_a_damaged_run_is_refused_by_name(name, text, write_run):
    path = write_run("run", 0.9)
    (path / name).write_text(text)
    with pytest.raises(UserError, match="run cannot be read"):
        read_report([path])


def test_a_configuration_that_is_none_is_refused(write_run):
    path = write_run("run", 0.9)
    (path / "config.yaml").write_text("run_dir: x\nmodel: {path: m, dtype: fp7}")
    with pytest.raises(UserError, match=r"model.dtype in .*config.yaml"):
        read_report([path])


def test_runs_are_found_by_name_and_pattern_and_each_once(tmp_path, monkeypatch):
    for name in ("b", "a"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / f"{name}.log").touch()
    monkeypatch.chdir(tmp_path)
    assert [str(path) for path in find_runs(["runs/b", "runs/*", str(tmp_path / "runs" / "a")])] == [
        "runs/b",
        "runs/a",
    ]
    for wrong in ("runs/c", "runs/c*", "runs/*.log", str(tmp_path / "none")):
        with pytest.raises(UserError, match="there is no such run"):
            find_runs([wrong])


def test_the_csv_has_the_same_rows_with_numbers_in_columns_of_their_own(write_run):
    paths = [write_run(f"s{seed}", 0.9 + 0.02 * seed, f"seed={seed}") for seed in range(2)]
    paths += [write_run("copa", 0.8, recipe="opt-13b-copa-lezo")]
    paths += [write_run("rte", 0.6, recipe="opt-1.3b-rte-lezo", majority=None)]
    rows = list(csv.DictReader(io.StringIO(to_csv(read_report(paths)))))
    assert [(row["model"], row["method"], row["source"]) for row in rows] == [
        ("opt-1.3b", "LeZO", "runs"),
        ("opt-1.3b", "LeZO (paper)", "paper"),
        ("opt-13b", "majority class", "runs"),
        ("opt-13b", "LeZO", "runs"),
        ("opt-13b", "LeZO (paper)", "paper"),
    ]
    assert (rows[0]["RTE"], rows[0]["RTE runs"], rows[0]["SST-2"]) == ("60.0", "1", "")
    measured, paper = rows[3:]
    assert float(measured["SST-2"]) == 91.0
    assert float(measured["SST-2 deviation"]) == pytest.approx(2**0.5, abs=1e-4)
    assert (measured["SST-2 runs"], measured["COPA deviation"], measured["RTE"]) == ("2", "", "")
    assert float(measured["average"]) == 85.5
    assert (paper["SST-2"], paper["SST-2 deviation"], paper["SST-2 runs"]) == ("93.0", "0.3", "")
    assert float(paper["average"]) == pytest.approx((93.0 + 87.2) / 2)


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        write_report(tmp_path / "none" / "report.md", "text")


@pytest.mark.distributed
def test_the_command_prints_or_writes_the_table(write_run, tmp_path):
    command = [sys.executable, str(REPOSITORY / "launch" / "report.py")]
    write_run("run-0", 0.9)
    stopped = write_run("run-1", None, "seed=1", finished=False, steps=8000)
    printed = run_well([*command, str(tmp_path / "run-*")])
    assert printed.out == to_markdown(read_report(find_runs([str(tmp_path / "run-*")])))
    out = tmp_path / "report.csv"
    written = run_well([*command, str(tmp_path / "run-*"), "--format", "csv", "--out", str(out)])
    assert written.out == ""
    assert f"warning: left out: {stopped}: unfinished, at step 8000" in written.err
    assert out.read_text().startswith("model,method,source,SST-2,")
    refused = run([*command, str(tmp_path / "none")])
    assert refused.code == 2
    assert refused.err.count("error: ") == 1


@pytest.mark.distributed
def test_a_run_that_was_really_made_is_in_the_table_with_its_own_score(tmp_path):
    recipe = write_recipe(tmp_path)
    path = tmp_path / "run"
    run_well(python("--config", recipe, f"run_dir={path}", "train.steps=2", "train.eval_every=2"))
    results = json.loads((path / "results.json").read_text())
    report = read_report([path])
    majority, measured = report.tables[0].rows
    assert report.tables[0].model == str(tmp_path / "model")
    assert measured.scores["sst2"].mean == 100 * results["test"]
    assert majority.scores["sst2"].mean == 100 * results["majority_class"]
    assert report.versions["torch"] == (results["versions"]["torch"],)
