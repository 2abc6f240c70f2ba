"""The page: its figures and tables, that it is one safe file, and how it looks in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import sys
from html.parser import HTMLParser

import pandas as pd
import pytest
from assets import REPOSITORY
from commands import run_well
from report_runs import write_run

from lezo_ds.errors import UserError
from lezo_ds.tools.benchmark import table
from lezo_ds.tools.reports.curves import MAX_POINTS, mean_curves, read_metrics, speedups
from lezo_ds.tools.reports.experiments import best_rates, name_experiments
from lezo_ds.tools.reports.figures import benchmark_figures, experiment_figures
from lezo_ds.tools.reports.page import BEST_RATES
from lezo_ds.tools.reports.report import make_page
from lezo_ds.tools.reports.results_table import read_runs

WILD = "</script><img src=x onerror=alert(1)>"
MEASURE = """
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  document.title = [root.clientWidth, root.scrollWidth, page.querySelectorAll(".main-svg").length].join(" ");
};
"""


class Page(HTMLParser):
    """What a browser finds on a page: its tags, and its texts by the tag around them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], {}, [""]
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1], []).append(data)


def page_of(*paths, benchmark=None):
    return Page(make_page(list(map(str, paths)), benchmark))


def read(directory):
    """Return the runs of a directory, and their metrics."""
    runs = name_experiments(read_runs(sorted(directory.iterdir())))
    return runs, read_metrics(runs)


def figures_of(directory):
    runs, metrics = read(directory)
    return dict(experiment_figures(runs, runs, metrics))


def legend(plot):
    return [trace.name for trace in plot.data if trace.showlegend is not False]


@pytest.fixture
def benchmark(tmp_path):
    """A benchmark of two lengths: LeZO is four times, and twice, as fast as the reference."""
    common = {"measured": "step", "shape": "opt-125m", "layers": 12, "dtype": "fp32", "batch": 16, "ranks": 1}
    common |= {"reference": "mezo_reference"}
    rows = [
        common | {"length": length, "variant": variant, "ratio": ratio}
        for length, gain in ((32, 4.0), (200, 2.0))
        for variant, ratio in (("mezo_reference", 1.0), ("ours:0.75", gain))
    ]
    table.append(tmp_path / "benchmark.csv", table.to_frame(rows))
    return tmp_path / "benchmark.csv"


def test_the_headline_is_the_setting_with_the_lowest_validation_loss(tmp_path):
    for seed, test in enumerate((0.88, 0.92)):
        write_run(tmp_path / f"low-{seed}", f"seed={seed}", test=test, losses=(0.6, 0.5, 0.3))
    write_run(tmp_path / "high", "zo.learning_rate=7e-7", test=0.95)
    texts = page_of(tmp_path / "*").texts["p"]
    start = texts.index("SST-2, opt-13b")
    assert texts[start + 1 : start + 4] == [
        "LeZO, learning_rate=1e-06",
        "90.0 ± 2.8%",
        "accuracy, 2 of 2 runs, zero-shot 50.0, majority class 51.0",
    ]


LONG = ("zo.estimator=one-sided", "zo.directions=15", "zo.probes_per_pass=16", "zo.lr_schedule=linear")


def names_of_experiments(pattern):
    return sorted(set(name_experiments(read_runs(pattern))["setting"]))


def test_experiments_with_many_settings_have_the_names_of_their_folders(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "plain" / f"seed={seed}", f"seed={seed}")
        write_run(tmp_path / "15 directions" / f"seed={seed}", f"seed={seed}", *LONG)
    runs = sorted(tmp_path.glob("*/*"))
    assert names_of_experiments(runs) == ["15 directions", "plain"]
    # A folder of two experiments names neither, and two folders of one do not either.
    write_run(tmp_path / "plain" / "rate", "zo.learning_rate=7e-7")
    assert names_of_experiments(runs) == ["15 directions", "plain"]
    assert not {"15 directions", "plain"} & set(names_of_experiments([*runs, tmp_path / "plain" / "rate"]))
    write_run(tmp_path / "again" / "seed=2", "seed=2")
    assert not {"again", "plain"} & set(names_of_experiments([*runs, tmp_path / "again" / "seed=2"]))


def test_a_reward_is_not_in_percent(tmp_path):
    for seed, test in enumerate((12.5, 13.5)):
        write_run(tmp_path / f"run-{seed}", f"seed={seed}", test=test, metric="reward", majority_class=None)
    page = page_of(tmp_path / "*")
    assert {"13.000 ± 0.707", "reward, 2 of 2 runs, zero-shot 0.500"} <= set(page.texts["p"])
    assert {"12.500", "13.500"} <= set(page.texts["td"])
    assert any("Not in percent: reward of SST-2." in text for text in page.texts["p"])


def test_the_table_of_runs_has_a_row_for_each_run_and_a_caption_with_what_they_share(tmp_path):
    write_run(tmp_path / "a", peak_memory_bytes=2e9)
    write_run(tmp_path / "b", "seed=1", finished=False)
    text = make_page([str(tmp_path / "*")], None)
    page, state = Page(text), "unfinished, at step 30"
    assert (
        "All runs: model opt-13b, task SST-2, validation loss 0.4, steps 30, seconds per step 1."
        in page.texts["p"]
    )
    head = ["method", "test", "seed", "peak memory, GB", "state", "directory"]
    assert page.texts["th"][-6:] == head
    assert page.texts["td"][-12:-6] == ["LeZO", "90.0%", "0", "2.00", "finished", "a"]
    assert page.texts["td"][-6:] == ["LeZO", "-", "1", "-", state, "b"]
    assert str(tmp_path) not in text


def test_what_does_not_count_is_logged_and_not_listed_on_the_page(tmp_path, caplog):
    write_run(tmp_path / "a")
    (tmp_path / "not-a-run-here").mkdir()
    assert "not-a-run-here" not in make_page([str(tmp_path / "*")], None)
    assert f"left out: {tmp_path / 'not-a-run-here'}: not a run directory" in caplog.text


def test_seeds_are_one_line_in_a_band_and_the_axes_end_where_the_data_ends(tmp_path):
    for seed, losses in enumerate([(0.6, 0.5, 0.4), (0.8, 0.5, 0.2)]):
        write_run(tmp_path / str(seed), f"seed={seed}", losses=losses, pace=60 * (seed + 1))
    figures = figures_of(tmp_path)
    assert list(figures) == [
        "Validation loss over steps",
        "Validation accuracy over steps",
        "Training loss over steps",
        "Validation loss over training time",
    ]
    plot, over_time = figures["Validation loss over steps"], figures["Validation loss over training time"]
    line, band = plot.data
    assert list(line.y) == pytest.approx([0.7, 0.5, 0.3])
    deviation = 0.02**0.5  # of 0.6 and 0.8, and of 0.2 and 0.4
    outline = [0.7 + deviation, 0.5, 0.3 + deviation, 0.3 - deviation, 0.5, 0.7 - deviation]
    assert list(band.y) == pytest.approx(outline)
    assert (band.fill, band.showlegend, band.legendgroup) == ("toself", False, line.legendgroup)
    assert plot.layout.xaxis.range == (10, 30)
    assert over_time.layout.xaxis.range == (15, 45)


def test_methods_are_compared_by_forward_passes_where_their_steps_have_different_numbers(tmp_path):
    write_run(tmp_path / "two-sided")
    assert "Validation loss over forward passes" not in figures_of(tmp_path)
    write_run(tmp_path / "fzoo", "zo.estimator=fzoo", "zo.directions=8")
    write_run(tmp_path / "adamw", "method=adamw")
    plot = figures_of(tmp_path)["Validation loss over forward passes"]
    lines = {line.name: list(line.x) for line in plot.data if line.showlegend is not False}
    passes = {
        "FT (AdamW)": 3,
        "LeZO, estimator=fzoo,<br>directions=8": 9,
        "LeZO, estimator=spsa,<br>directions=1": 2,
    }
    assert lines == {name: [10 * each, 20 * each, 30 * each] for name, each in passes.items()}


def test_a_setting_has_one_color_in_all_figures(tmp_path):
    write_run(tmp_path / "adamw", "method=adamw")
    write_run(tmp_path / "lezo")
    figures = figures_of(tmp_path)
    colors = [
        {line.name: line.line.color for line in figures[f"Validation loss over {x}"].data if line.name}
        for x in ("steps", "training time")
    ]
    assert [sorted(names) for names in colors] == [["FT (AdamW)", "LeZO"], ["FT (AdamW)", "LeZO"]]
    assert colors[0] == colors[1]


def test_a_long_curve_is_drawn_as_means_of_consecutive_steps():
    steps = range(1, 4 * MAX_POINTS + 1)
    long = pd.DataFrame({"step": steps, "loss": steps, "directory": "a", "setting": "LeZO"})
    long = long.assign(seconds=0.0, forward_passes=2 * long["step"])
    assert mean_curves(long, "loss")["mean"].tolist() == [4 * place + 2.5 for place in range(MAX_POINTS)]


def test_damaged_metrics_cost_a_run_its_curves_and_a_cut_line_only_itself(tmp_path, caplog):
    cut, damaged = write_run(tmp_path / "cut"), write_run(tmp_path / "damaged", "seed=1")
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "sec')
    (damaged / "metrics.jsonl").write_text('{"step": 1}\nx\n')
    _, metrics = read(tmp_path)
    assert metrics["directory"].unique().tolist() == [str(cut)]
    assert metrics["step"].max() == 30
    assert f"warning: no curves: {damaged}: its metrics.jsonl cannot be read" in caplog.text


def test_scores_are_drawn_over_sparsity_and_learning_rate_where_these_vary(tmp_path):
    for rate in ("1e-6", "1e-7"):
        for seed in (0, 1):
            name, overrides = f"{rate}-{seed}", [f"zo.learning_rate={rate}", f"seed={seed}"]
            write_run(tmp_path / name, *overrides, test=0.8 + 0.1 * seed)
            write_run(tmp_path / f"{name}-mezo", *overrides, "zo.sparsity=0", test=0.7)
    write_run(tmp_path / "alone", "zo.learning_rate=1e-3", "peft.kind=lora")  # one point is no curve
    figures, levels = figures_of(tmp_path), ["zero-shot", "majority class"]
    over_rate = figures["Test accuracy over learning rate"]
    assert legend(over_rate) == ["sparsity=0", "sparsity=0.75", *levels]
    assert list(over_rate.data[1].y) == pytest.approx([85, 85])
    assert list(over_rate.data[1].error_y.array) == pytest.approx([50**0.5, 50**0.5])
    assert over_rate.layout.xaxis.type == "log"
    assert list(over_rate.layout.xaxis.range) == pytest.approx([-7.04, -5.96])
    over_sparsity = figures["Test accuracy over sparsity"]
    assert legend(over_sparsity) == ["learning_rate=1e-07", "learning_rate=1e-06", *levels]
    assert list(over_sparsity.data[0].x) == [0, 0.75]


def test_with_many_experiments_each_method_is_shown_at_its_best_learning_rate(tmp_path):
    losses = {"1e-7": (0.6, 0.5, 0.5), "1e-6": (0.6, 0.5, 0.3), "1e-5": (0.6, 0.7, 0.8)}
    for sparsity in (0, 0.25, 0.5, 0.75):
        for rate, course in losses.items():
            name, overrides = f"{sparsity}-{rate}", [f"zo.sparsity={sparsity}", f"zo.learning_rate={rate}"]
            write_run(tmp_path / name, *overrides, losses=course, test=0.8 + sparsity / 10)
    # A rate that was run with one seed only does not win against one with two.
    write_run(tmp_path / "seed-1", "zo.sparsity=0", "seed=1", losses=(0.6, 0.5, 0.45), test=0.86)
    write_run(tmp_path / "lucky", "zo.sparsity=0", "zo.learning_rate=1e-8", losses=(0.6, 0.5, 0.1))
    write_run(tmp_path / "unfinished", "zo.sparsity=0.1", finished=False)
    page = page_of(tmp_path / "*")
    rows = ["MeZO", "LeZO, sparsity=0.1", "LeZO, sparsity=0.25", "LeZO, sparsity=0.5", "LeZO, sparsity=0.75"]
    shown = best_rates(read(tmp_path)[0])
    assert shown["setting"].drop_duplicates().tolist() == rows
    assert sorted(shown.loc[shown["method"] == "mezo", "seed"]) == [0, 1]
    assert any(BEST_RATES.strip() in text for text in page.texts["p"])
    figures = dict(experiment_figures(shown, *read(tmp_path)))
    assert legend(figures["Validation loss over steps"]) == rows
    assert list(figures["Test accuracy over sparsity"].data[0].x) == [0, 0.25, 0.5, 0.75]
    assert list(figures["Test accuracy over sparsity"].data[0].y) == pytest.approx([83, 82.5, 85, 87.5])
    assert list(figures["Test accuracy over learning rate"].data[1].x) == [1e-7, 1e-6, 1e-5]


def test_the_speedup_is_computation_times_convergence_against_the_best_mezo(tmp_path):
    write_run(tmp_path / "mezo", "zo.sparsity=0", "zo.learning_rate=1e-7", pace=2.0, losses=(0.6, 0.5, 0.4))
    poor = ["zo.sparsity=0", "zo.learning_rate=1e-9"]
    write_run(tmp_path / "mezo-poor", *poor, pace=8.0, losses=(0.7, 0.7, 0.7))
    write_run(tmp_path / "lezo", losses=(0.4, 0.3, 0.2))
    write_run(tmp_path / "lezo-slow", "zo.learning_rate=1e-8", pace=4.0, losses=(0.6, 0.5, 0.45))
    write_run(tmp_path / "lezo-other-ranks", "seed=1", world_size=4)
    found = speedups(*read(tmp_path)).set_index("setting")
    assert found.loc["LeZO, learning_rate=1e-06"].tolist() == [2.0, 3.0, 6.0]
    # Both reach 0.45, which is the lowest loss of this one, at the last of their three evaluations.
    assert found.loc["LeZO, learning_rate=1e-08"].tolist() == [0.5, 1.0, 0.5]
    assert len(found) == 2


@pytest.mark.parametrize("learned", [{"mezo": 0.9, "lezo": 0.54}, {"mezo": 0.54, "lezo": 0.9}])
def test_no_speedup_is_computed_from_runs_that_have_learned_nothing(learned, tmp_path):
    # Two standard errors of 0.51 over the 400 test examples are 0.05.
    write_run(tmp_path / "mezo", "zo.sparsity=0", test=learned["mezo"])
    write_run(tmp_path / "lezo", test=learned["lezo"])
    assert speedups(*read(tmp_path)).empty
    assert "Speedup over MeZO" not in figures_of(tmp_path)


def test_a_benchmark_is_drawn_as_ratios(benchmark):
    ((title, plot),) = benchmark_figures(table.read(benchmark))
    conditions = "shape=opt-125m, layers=12, dtype=fp32, batch=16, ranks=1, reference=mezo_reference"
    assert title == f"Speed of a step: {conditions}"
    assert {bar.name: dict(zip(bar.y, bar.x, strict=True)) for bar in plot.data} == {
        "mezo_reference": {"length=32": 1.0, "length=200": 1.0},
        "ours:0.75": {"length=32": 4.0, "length=200": 2.0},
    }


def test_the_page_is_one_file_that_loads_nothing(tmp_path, benchmark):
    page = page_of(write_run(tmp_path / "a"), benchmark=benchmark)
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not [attributes for _, attributes in page.tags if {"src", "href"} & attributes.keys()]
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    assert sum("plotly.js v" in script for script in page.texts["script"]) == 1
    assert page.texts["figcaption"].count("Validation loss over steps") == 1


def test_names_in_runs_are_text_and_never_markup_or_script(tmp_path):
    for rate in ("1e-6", "1e-7"):
        overrides = [f"model.path={json.dumps(WILD)}", f"peft.lora_targets={json.dumps(rate + WILD)}"]
        write_run(tmp_path / f"{rate}-<img src=x>", *overrides, task=WILD, metric=WILD)
    text = make_page([str(tmp_path / "*")], None)
    page = Page(text)
    assert "img" not in {tag for tag, _ in page.tags}
    assert text.count("</script>") == sum(tag == "script" for tag, _ in page.tags)
    # As text it is there: in the headline, in the tables and above the figures.
    for tag in ("p", "th", "h2", "figcaption"):
        assert any(WILD in found for found in page.texts[tag])
    # In texts that plotly draws, which may hold tags, the markup is escaped as well.
    runs, metrics = read(tmp_path)
    figures = experiment_figures(runs, runs, metrics)
    assert not [title for title, plot in figures if "<img" in plot.to_json()]
    assert [title for title, plot in figures if "&lt;img" in plot.to_json()]


def test_what_is_unfinished_is_shown_without_scores_and_nothing_at_all_is_refused(tmp_path):
    page = page_of(write_run(tmp_path / "a", finished=False))
    assert "no finished run" in page.texts["p"]
    assert "Scores" not in page.texts["h2"]
    assert "Validation loss over steps" in page.texts["figcaption"]
    with pytest.raises(UserError, match="there is no run or benchmark to show; got: left out: "):
        make_page([str(tmp_path)], None)
    with pytest.raises(UserError, match="is not a table of benchmark results"):
        make_page([], tmp_path / "a" / "metrics.jsonl")


@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_figures_are_drawn_and_the_page_is_as_wide_as_the_screen(width, benchmark, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium here")
    write_run(tmp_path / "zo.learning_rate=1e-06,zo.sparsity=0.75,peft.kind=none,train.batch_size=16")
    command = [sys.executable, str(REPOSITORY / "launch" / "report.py"), str(tmp_path / "zo*")]
    run_well([*command, "--benchmark", str(benchmark), "--html", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    # In a frame: the browser's own window has a least width.
    frame = f'<iframe srcdoc="{html.escape(text)}" width="{width}" height="800" frameborder="0"></iframe>'
    page = tmp_path / "frame.html"
    page.write_text(f"<!doctype html><title></title>{frame}<script>{MEASURE}</script>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    shown = run_well([browser, *options, "--dump-dom", page.as_uri()]).out
    visible, whole, drawn = map(int, re.search(r"<title>(\d+) (\d+) (\d+)</title>", shown).groups())
    assert whole == visible
    assert width - 20 <= visible <= width
    assert drawn >= len(Page(text).texts["figcaption"])
