"""The page: its figures from runs and benchmarks, as HTML that loads nothing, and as Markdown."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import sys
from html.parser import HTMLParser

import pytest
import yaml
from assets import REPOSITORY, write_recipe
from commands import python, run, run_well

from lezo_ds.config import config_to_dict
from lezo_ds.errors import UserError
from lezo_ds.recipes import load_recipe
from lezo_ds.tools.benchmark.results import (
    Cell,
    Elapsed,
    ModelSettings,
    Results,
    Settings,
    Timing,
    write_results,
)
from lezo_ds.tools.benchmark.shapes import Workload
from lezo_ds.tools.benchmark.stages import STAGES
from lezo_ds.tools.reports.blocks import DataTable
from lezo_ds.tools.reports.page import make_page, to_html, to_markdown

MEASURE = """
const frame = document.querySelector("iframe");
frame.onload = () => {
  const root = frame.contentDocument.documentElement;
  document.title = root.clientWidth + " " + root.scrollWidth;
};
"""
VERSIONS = {"python": "3.11.4", "torch": "2.13.0"}
ENVIRONMENT = {
    "versions": VERSIONS,
    "hardware": {"device": "cpu", "gpu": None, "cpu": "a processor", "cores": 8},
    "platform": "Linux",
    "world_size": 2,
    "threads": 1,
    "command": ["python", "launch/train.py", "--config", "my recipe.yaml"],
}


class Document(HTMLParser):
    """What a page holds: tags with their attributes, texts; and whether every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def write_run(tmp_path):
    """Write a run's files: steps `pace` seconds apart, validated every 10 steps with the given scores."""

    def write(name, *overrides, method="lezo", pace=1.0, scores=(0.5, 0.6, 0.7), test=0.7, finished=True):
        path = tmp_path / name
        path.mkdir()
        config = config_to_dict(load_recipe(f"opt-13b-sst2-{method}", [f"run_dir={path}", *overrides]))
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        (path / "environment.json").write_text(json.dumps(ENVIRONMENT))
        lines = []
        for step in range(1, 10 * len(scores) + 1):
            seconds = pace * step
            lines.append({"step": step, "loss": 1 / step, "projected_gradient": (-1) ** step * 5.0})
            lines[-1] |= {"applied": True, "seconds": seconds}
            if step % 10 == 0:
                score = scores[step // 10 - 1]
                lines.append({"step": step, "dev_loss": 1 - score, "dev_accuracy": score})
                lines[-1]["seconds"] = seconds
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        results = {"finished": finished, "test": test, "zero_shot": 0.5, "majority_class": 0.51}
        results |= {"steps": 30, "best_step": 30, "peak_memory_bytes": 2e9, "versions": VERSIONS}
        if finished is not None:
            (path / "results.json").write_text(json.dumps(results))
        return path

    return write


@pytest.fixture
def benchmark(tmp_path):
    """A benchmark of two lengths: twice and four times as fast as MeZO."""

    def timing(name, seconds):
        shares = dict(zip(STAGES, (0.5, 0.2, 0.1, 0.1, 0.1), strict=True))
        return Timing(name, (Elapsed(seconds, seconds),), shares, shares, 1, None, 1, 1)

    def cell(length, gain):
        settings = Settings(ModelSettings("opt-125m"), Workload(16, length))
        timings = [timing("mezo_reference", 8.0), timing("ours:0", 6.0), timing("ours:0.75", 8.0 / gain)]
        return Cell(settings, 1, 100, 0.5, tuple(timings))

    facts = ENVIRONMENT | {"processor": "fast one", "date": "2026-01-01"}
    write_results(Results(facts, (cell(32, 4.0), cell(200, 2.0))), tmp_path / "bench.json")
    return tmp_path / "bench.json"


def section(sections, title):
    return next(found for found in sections if found.title == title)


def table_of(sections, title):
    (found,) = [block for block in section(sections, title).blocks if isinstance(block, DataTable)]
    return found


def points(chart):
    return {series.label: list(series.points) for series in chart.series}


def test_every_run_has_a_line_with_its_setting_and_scores(write_run):
    paths = [write_run("a"), write_run("b", method="mezo", pace=2.0, finished=None)]
    table = table_of(make_page(paths), "Runs")
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert rows["a"]["sparsity"] == "0.75"
    assert (rows["a"]["test"], rows["a"]["zero-shot"], rows["a"]["majority class"]) == (
        "70.0",
        "50.0",
        "51.0",
    )
    assert (rows["a"]["s a step"], rows["b"]["s a step"]) == ("1", "2")
    assert (rows["b"]["steps"], rows["b"]["test"]) == ("30 (unfinished)", "-")
    assert rows["b"]["time"] == "0:01:00"


def test_runs_of_one_name_are_told_apart_by_the_folders_above(write_run, tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    paths = [write_run("x/run"), write_run("y/run")]
    assert [row[0] for row in table_of(make_page(paths), "Runs").rows] == ["x/run", "y/run"]


def test_losses_and_scores_are_drawn_over_steps_and_over_time(write_run):
    course = section(make_page([write_run("a", pace=2.0)]), "Loss and score over steps and time")
    charts = {chart.title: chart for chart in course.blocks}
    assert len(charts) == 6
    assert points(charts["Training loss over step"])["a"][:2] == [(1.0, 1.0), (2.0, 0.5)]
    assert points(charts["Training loss over time"])["a"][:2] == [(2.0, 1.0), (4.0, 0.5)]
    assert points(charts["Validation accuracy over step"])["a"] == [(10.0, 0.5), (20.0, 0.6), (30.0, 0.7)]
    assert charts["Validation accuracy over time"].x_label == "time, s"


def test_long_runs_are_drawn_in_hours(write_run):
    course = section(make_page([write_run("a", pace=1800.0)]), "Loss and score over steps and time")
    chart = next(chart for chart in course.blocks if chart.title == "Training loss over time")
    assert chart.x_label == "time, h"
    assert points(chart)["a"][-1][0] == 15.0


def test_the_projected_gradient_is_drawn_for_runs_that_have_one(write_run):
    (chart,) = section(make_page([write_run("a")]), "Projected gradient").blocks
    assert points(chart)["a"][:2] == [(1.0, -5.0), (2.0, 5.0)]


def test_speedups_are_ratios_of_step_times_and_of_steps_to_the_same_score(write_run):
    paths = [
        write_run("poor", "zo.learning_rate=1e-9", method="mezo", pace=8.0, scores=(0.5, 0.5, 0.5)),
        write_run("mezo", method="mezo", pace=2.0, scores=(0.5, 0.6, 0.7)),
        write_run("lezo", pace=1.0, scores=(0.7, 0.7, 0.8)),
        write_run("worse", "seed=1", pace=4.0, scores=(0.5, 0.5, 0.5)),
        write_run("other", "train.batch_size=32"),
    ]
    rows = table_of(make_page(paths), "Speedup against MeZO").rows
    assert list(map(list, rows)) == [
        ["lezo", "mezo", "2.00", "3.00", "6.00"],
        ["worse", "mezo", "0.50", "-", "-"],
    ]


def test_lezo_that_leaves_out_no_block_is_mezo(write_run):
    paths = [write_run("dense", "zo.sparsity=0", pace=3.0), write_run("a", "zo.sparsity=0.75", pace=2.0)]
    sections = make_page(paths)
    (table,) = section(sections, "Speedup against MeZO").blocks
    assert table.rows == [("a", "dense", "1.50", "1.00", "1.50")]
    assert [row[3] for row in table_of(sections, "Runs").rows] == ["mezo", "lezo"]
    assert "MeZO" in {row[0] for row in table_of(sections, "Scores beside the paper's").rows}


def test_the_grid_holds_the_mean_of_each_cell_and_shades_the_best_most(write_run):
    paths = [
        write_run("a", "zo.learning_rate=1e-6", "zo.sparsity=0.5", test=0.8),
        write_run("b", "zo.learning_rate=1e-6", "zo.sparsity=0.75", test=0.85),
        write_run("c", "zo.learning_rate=1e-6", "zo.sparsity=0.75", "seed=1", test=0.95),
        write_run("d", "zo.learning_rate=1e-7", "zo.sparsity=0.75", test=0.7),
        write_run("e", "zo.learning_rate=1e-7", "zo.sparsity=0.5", test=0.99, finished=False),
    ]
    table = table_of(make_page(paths), "Score over learning rate and sparsity")
    assert table.header == ("learning rate / sparsity", "0.5", "0.75")
    assert list(map(list, table.rows)) == [["1e-07", "-", "70.0 (1)"], ["1e-06", "80.0 (1)", "90.0 (2)"]]
    assert table.shades == [[None, 0.0], [pytest.approx(0.5), pytest.approx(1.0)]]


def test_time_and_best_score_over_sparsity_come_from_runs_and_benchmarks(write_run, benchmark):
    paths = [
        write_run("a", "zo.sparsity=0.5", pace=2.0, test=0.8),
        write_run("b", "zo.sparsity=0.75", pace=1.0, test=0.85),
        write_run("c", "zo.sparsity=0.75", "seed=1", pace=1.0, test=0.95),
    ]
    times, scores, short, _ = section(make_page(paths, [benchmark]), "Time and score over sparsity").blocks
    assert points(times) == {"opt-13b, SST2, batches of 16": [(0.5, 2.0), (0.75, 1.0)]}
    assert short.title == "Time of a step, opt-125m, 16 x 32 tokens, 1 rank"
    assert points(short) == {"ours": [(0.0, 6.0), (0.75, 2.0)]}
    (only,) = points(scores).values()
    assert only == [(0.5, pytest.approx(80.0)), (0.75, pytest.approx(95.0))]


def test_stages_speed_and_length_come_from_benchmarks(benchmark):
    sections = make_page([], [benchmark])
    short, long = section(sections, "Speedup against MeZO").blocks
    assert short.title == "opt-125m, 16 x 32 tokens, 1 rank"
    assert [value for _, (value,) in short.rows] == pytest.approx([1.0, 8 / 6, 4.0])
    assert long.rows[-1] == ("ours:0.75", (2.0,))
    stages = section(sections, "Where the time of a step goes").blocks[0]
    assert stages.parts == STAGES
    assert sum(stages.rows[0][1]) == pytest.approx(100)
    (lengths,) = section(sections, "Speedup over input length").blocks
    assert points(lengths)["ours:0.75 to mezo_reference, opt-125m, 1 rank"] == [(32.0, 4.0), (200.0, 2.0)]


def test_the_environment_is_shared_by_those_who_share_it_and_each_has_its_command(write_run, benchmark):
    made = section(make_page([write_run("a"), write_run("b", "seed=1")], [benchmark]), "Made with")
    (table,) = made.blocks
    assert table.header == ("", "a; b", "benchmark 1")
    assert ("torch", "2.13.0", "2.13.0") in table.rows
    assert ("device", "a processor", "fast one") in table.rows
    assert made.commands[0] == ("a", "deepspeed --num_gpus 2 launch/train.py --config 'my recipe.yaml'")


def test_a_column_of_many_runs_names_the_first(write_run):
    made = section(make_page([write_run(str(seed), f"seed={seed}") for seed in range(5)]), "Made with")
    assert made.blocks[0].header == ("", "0; 1; 2 and 2 more")
    assert len(made.commands) == 5


def test_a_run_of_several_ranks_is_repeated_by_a_launcher(write_run):
    run = write_run("a")
    made = json.loads((run / "environment.json").read_text())
    made |= {"world_size": 2, "command": ["/bin/python", "launch/train.py", "--local_rank=0", "seed=3"]}
    (run / "environment.json").write_text(json.dumps(made))
    commands = section(make_page([run]), "Made with").commands
    assert commands == [("a", "deepspeed --num_gpus 2 launch/train.py seed=3")]


def test_many_curves_are_named_once_for_all_figures_of_a_section(write_run):
    runs = [write_run(f"run-{seed}", f"seed={seed}") for seed in range(5)]

    def count(num_runs):
        text = to_html(make_page(runs[:num_runs]))
        course = text.split("<h2>Loss and score over steps and time</h2>")[1].split("</section>")[0]
        return course.count('<ul class="legend">'), course.count("<figure>")

    assert count(4) == (6, 6)
    assert count(5) == (1, 6)


def test_warnings_are_lines_of_their_own(write_run):
    stopped = write_run("stopped", "seed=1", finished=False)
    sections = make_page([write_run("a"), stopped])
    warning = f"Warning: left out: {stopped}: unfinished"
    assert any(text.startswith(warning) for text in Document(to_html(sections)).texts)
    assert f"\n- {warning}" in to_markdown(sections)


def test_the_papers_tables_stand_on_the_page_with_its_numbers(write_run):
    table = table_of(
        make_page([write_run("a"), write_run("b", "seed=1", test=0.8)]), "Scores beside the paper's"
    )
    rows = {row[0]: row[1] for row in table.rows}
    assert rows["LeZO"] == "75.0 +- 7.1 (2)"
    assert rows["LeZO (paper)"] == "93.0 +- 0.3"


def test_the_html_is_whole_loads_nothing_and_runs_nothing(write_run, benchmark):
    text = to_html(make_page([write_run("a"), write_run("b", method="mezo")], [benchmark]))
    document = Document(text)
    tags = [tag for tag, _ in document.tags]
    assert not {"script", "link", "img", "iframe", "object"} & set(tags)
    for _, attributes in document.tags:
        assert not {"src", "href", "onload", "onclick"} & attributes.keys()
    assert not re.search(r"url\(|@import|https?:", text)
    policy = next(a["content"] for _, a in document.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "prefers-color-scheme: dark" in text
    assert tags.count("figure") == text.count('<svg viewBox="0 0 360') > 10


def test_names_in_runs_are_text_and_not_markup(write_run):
    wild = "<script>alert(1)<|script>&"
    page = make_page([write_run(wild.replace("/", "|"))])
    document = Document(to_html(page))
    assert "script" not in {tag for tag, _ in document.tags}
    assert wild in document.texts
    row = next(line for line in to_markdown(page).splitlines() if "alert" in line)
    assert "<\\|script" in row


def test_what_there_is_no_data_for_is_named_with_what_would_fill_it(write_run):
    page = make_page([write_run("a", method="mezo")])
    for text in (to_html(page), to_markdown(page)):
        rest = text[text.index("Not shown") :]
        assert "Where the time of a step goes: needs --benchmark FILE.json" in rest
        assert "Speedup over input length: needs" in rest
        assert "Runs: needs" not in rest


def test_the_markdown_has_every_chart_as_a_table(write_run, benchmark):
    page = make_page([write_run("a"), write_run("b", method="mezo")], [benchmark])
    lines = to_markdown(page).splitlines()
    titles = [block.title for part in page for block in part.blocks if block.title]
    assert [line.removeprefix("### ") for line in lines if line.startswith("### ")] == titles
    widths = [(line.count("|") - line.count("\\|")) for line in lines if line.startswith("| ")]
    assert min(widths) >= 3
    start = lines.index("### Validation accuracy over step")
    assert lines[start + 2] == "| accuracy at step | 10 | 20 | 30 |"
    assert lines[start + 4] == "| a | 0.5 | 0.6 | 0.7 |"


def test_unfinished_runs_alone_are_shown_without_the_papers_table(write_run):
    page = make_page([write_run("a", finished=None), write_run("b", "seed=1", finished=False)])
    assert section(page, "Scores beside the paper's").blocks == []
    assert len(section(page, "Loss and score over steps and time").blocks) == 6


def test_nothing_to_show_and_damaged_files_are_refused(write_run, tmp_path):
    with pytest.raises(UserError, match="neither a run nor a benchmark"):
        make_page([tmp_path])
    damaged = write_run("a")
    (damaged / "metrics.jsonl").write_text("{\n")
    with pytest.raises(UserError, match="a cannot be read"):
        make_page([damaged])
    with pytest.raises(UserError, match="holds no results of a benchmark"):
        make_page([], [damaged / "metrics.jsonl"])


@pytest.mark.distributed
def test_the_command_writes_the_page_of_a_real_run(tmp_path):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    run_well(python("--config", recipe, f"run_dir={run_dir}", "train.steps=4", "train.eval_every=2"))
    command = [sys.executable, str(REPOSITORY / "launch" / "report.py"), str(run_dir)]
    files = tmp_path / "page.html", tmp_path / "page.md"
    done = run_well([*command, "--html", str(files[0]), "--page", str(files[1])])
    assert done.out == ""
    document = Document(files[0].read_text())
    made = json.loads((run_dir / "environment.json").read_text())
    command_line = shlex.join(["python", *made["command"][1:]])
    assert command_line in document.texts
    assert command_line in files[1].read_text().splitlines()
    refused = run([*command[:2], "--html", str(files[0])])
    assert (refused.code, refused.err.count("error: ")) == (2, 1)


@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_the_page_is_as_wide_as_the_screen_and_only_tables_scroll(
    width, write_run, benchmark, tmp_path
):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium here")
    label = "zo.learning_rate=1e-06,zo.sparsity=0.75,peft.kind=none,train.batch_size=16"
    text = to_html(make_page([write_run(label), write_run("b", method="mezo")], [benchmark]))
    # In a frame: the browser's own window has a least width.
    frame = f'<iframe srcdoc="{html.escape(text)}" width="{width}" height="800" frameborder="0"></iframe>'
    page = tmp_path / "frame.html"
    page.write_text(f"<!doctype html><title></title>{frame}<script>{MEASURE}</script>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    shown = run_well([browser, *options, "--dump-dom", page.as_uri()]).out
    visible, whole = map(int, re.search(r"<title>(\d+) (\d+)</title>", shown).groups())
    assert whole == visible
    assert width - 20 <= visible <= width
