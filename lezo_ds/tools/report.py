"""lezo-ds report: runs as tables on the terminal, as JSON, or as an HTML page with curves.

    directories --read_runs--> a row for each run --name_runs--> with names --score_table--> scores

A name is that of the method with what differs among the runs of the method. Runs of one name differ
in their seeds only, and are averaged. A run may be unfinished or damaged, and may come from anyone:
its values are read, and nothing that it names is imported.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import pandas as pd

from lezo_ds import files
from lezo_ds.config import config_from_dict, flatten, keys_with, load_yaml
from lezo_ds.config.schema import KEYS
from lezo_ds.data.metrics import REWARD, best_f1, normalize
from lezo_ds.errors import UserError, one_line, require_package
from lezo_ds.journal import scan_journal
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.results import RunResults, method_name

DAMAGE = (*files.DAMAGE, UserError)
"""What reading a damaged file of a run may raise."""
SEEDS = ["seed", "data.seed"]
SECTION = ["task", "model", "metric"]
"""Runs that are alike in these share a table and charts."""
# Keys that may change when a run resumes, and decide its score all the same.
_DECISIVE = {"peft.path", "train.steps", "train.epochs", "train.patience", "train.eval_every"}
_MEASURED = ["test", "error", "zero_shot", "majority_class", "macro_f1", "validation"]
_MEASURED += ["best_dev_loss", "steps", "seconds", "peak_memory_bytes"]
_JUDGES: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "accuracy": lambda answer, right: float(answer in right),
    "exact_match": lambda answer, right: float(normalize(answer) in map(normalize, right)),
    "f1": best_f1,
}
_FORMAT: Mapping[str, Any] = {"na_rep": "", "float_format": "{:.4g}".format}
_NOTE = """\
Scores are means over runs that differ in their seeds, in percent; rewards are as they are. The
deviation is that of the sample of runs; the error is the standard error of one run, over its test
examples. `validation` is the score of the best step or, of a run that is not finished, the last."""

logger = logging.getLogger(__name__)


def main(arguments: Namespace) -> None:
    """Print the tables or their numbers, or write the page."""
    if arguments.html is not None:
        problem = "report --html draws curves with matplotlib, which is not installed"
        require_package("matplotlib", problem, "'lezo_ds[report]'")
    runs = name_runs(read_runs(find_runs(arguments.runs)))
    compared = comparison(runs)
    if arguments.html is not None:
        files.write_output(arguments.html, page(runs, compared))
        return
    tables = {", ".join(key): score_table(same) for key, same in runs.groupby(SECTION, sort=False)}
    if arguments.json:
        numbers = {key: json.loads(table.to_json(orient="index")) for key, table in tables.items()}
        print(json.dumps({"scores": numbers, "comparison": compared}, indent=1))
        return
    for key, table in tables.items():
        print(f"{key}\n{table.to_string(**_FORMAT)}\n")
    by_label = runs["by_label"].iloc[0]
    if len(runs) == 1 and by_label:
        print(f"{label_table(by_label).to_string(**_FORMAT)}\n")
    print(compared or _NOTE)


def find_runs(patterns: Iterable[str]) -> list[Path]:
    """Return the directories that names and glob patterns stand for, each once, in this order.

    Raises:
        UserError: No directory matches a pattern.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        # A name may have characters that a pattern gives a meaning.
        names = [pattern] if Path(pattern).is_dir() else sorted(glob(pattern))  # noqa: PTH207
        directories = list(filter(Path.is_dir, map(Path, names)))
        if not directories:
            raise UserError(f"there is no run {pattern}", fix="give the run_dir of runs")
        for directory in directories:
            found.setdefault(directory.resolve(), directory)
    return list(found.values())


def read_runs(directories: Iterable[Path]) -> pd.DataFrame:
    """Return a row for each directory that holds a run, finished or not. Others are warned of.

    The columns are those of `_read_run`.

    Raises:
        UserError: None of the directories holds a run.
    """
    rows = []
    for directory in directories:
        try:
            rows.append(_read_run(directory))
        except DAMAGE as error:
            logger.warning("warning: %s: not a run, or damaged (%s)", directory, one_line(error))
    if not rows:
        fix = "give the run_dir of runs, or a pattern"
        raise UserError("none of these directories holds a run", fix=fix)
    return pd.DataFrame(rows)


def _read_run(directory: Path) -> dict[str, Any]:
    """Return the row of a run. Raises one of DAMAGE.

    Its columns are each key of the configuration, as a text, the values of results.json, and:

        directory, method, model
        error             the standard error of the score, over the test examples
        state             "", or the step at which the run is not finished
        base, adapter     digests of the weights that the run started from
        test_data         digest of the test examples
        curve             a row for each validation: step, minutes, loss, score
        validation        the score of the best step or, of a run that is not finished, the last
        answers, scores   what the model answered to the test examples, and how right it is, 0 to 1
        samples           answers that the evaluations have shown, with their rewards
    """
    run = RunDirectory(directory)
    values = load_yaml(files.read_regular(run.config).decode())
    config = config_from_dict(values, str(directory))
    curve, metric = _read_curve(run.metrics)
    row: dict[str, Any] = dict.fromkeys(RunResults.__dataclass_fields__)
    row |= {"metric": metric, "steps": max(curve["step"], default=0), "by_label": {}}
    results = RunResults.read(run.results)
    if results is not None:
        row |= vars(results)
    row |= {key: str(value) for key, value in flatten(config.model_dump()).items()}
    row |= {"base": row["model_fingerprint"], "state": "", "adapter": None, "answers": []}
    if run.journal.exists():
        header = next(scan_journal(run.journal)).item
        row |= {"base": header.model_fingerprint, "adapter": header.config.get("adapter")}
    shown = curve
    if row["finished"]:
        shown = curve[curve["step"] == row["best_step"]]
        row["answers"] = _read_lines(run.predictions_at(row["best_step"] or 0))
    else:
        row["state"] = f"not finished, at step {row['steps']:.0f}"
    judge = _JUDGES.get(row["metric"])
    scores = []
    if judge is not None:
        scores = [judge(each["predicted"], each["right"]) for each in row["answers"]]
    # A chat template may write the day of the run at the start of a prompt.
    examples = sorted((each["prompt"][-200:], each["right"]) for each in row["answers"])
    return row | {
        "directory": str(directory),
        "method": row["method"] or method_name(config),
        "model": Path(config.model.path).name,
        "test_data": hashlib.sha256(str(examples).encode()).hexdigest()[:6] if examples else "",
        "curve": curve,
        "validation": shown["score"].tail(1).mean(),
        "scores": scores,
        "error": pd.Series(scores, dtype=float).sem(),
        "samples": _read_lines(run.samples),
    }


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSONL file, none if it is missing. A crash may cut the last line."""
    if not path.exists():
        return []
    lines = files.read_regular(path).decode().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _read_curve(path: Path) -> tuple[pd.DataFrame, str]:
    """Return the validations in metrics.jsonl (step, minutes, loss, score) and their metric."""
    rows = [line for line in _read_lines(path) if line.get("dev_loss") is not None]
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("dev_"))
    metric = next((name for name in names if name != "dev_loss"), "dev_")
    columns = {"step": "step", "seconds": "minutes", "dev_loss": "loss", metric: "score"}
    curve = pd.DataFrame(rows, columns=list(columns), dtype=float).rename(columns=columns)
    return curve.assign(minutes=curve["minutes"] / 60), metric.removeprefix("dev_")


def name_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the column `name`, such as "LeZO, learning_rate=1e-06".

    Runs of one name are averaged. A run that has other test examples than the first one of its name
    and data.seed, which draws them, or that repeats its seeds, has a name of its own.
    """
    ignored = (keys_with("may_differ_on_resume") - _DECISIVE) | set(SEEDS)
    keys = ["base", "adapter", *(key for key in KEYS if key in runs and key not in ignored)]
    rows = runs.to_dict("records")
    of_section: dict[Any, list[Any]] = {}
    for run in rows:
        of_section.setdefault((*map(run.get, SECTION), run["method"]), []).append(run)
    seen: dict[Any, Any] = {}
    for section, group in of_section.items():
        varying = [key for key in keys if len({str(run[key]) for run in group}) > 1]
        for run in group:
            settings = [f"{key.rpartition('.')[2]}={run[key]}" for key in varying]
            name = ", ".join(filter(None, [run["method"], *settings, run["state"]]))
            first = seen.setdefault((section, name, run["data.seed"]), run["test_data"])
            if run["test_data"] != first:
                name += f", other test data ({run['test_data']})"
            place = (section, name, run["data.seed"], run["seed"])
            if place in seen:
                name += f", the same seeds again in {run['directory']}"
            seen[place] = None
            run["name"] = name
    return pd.DataFrame(rows)


def score_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each name in runs of one section, without the columns that say nothing."""
    groups = runs.astype(dict.fromkeys(_MEASURED, float)).groupby("name", sort=False)
    means = groups[_MEASURED].mean()
    factor = 1 if REWARD in runs["metric"].values else 100
    table = pd.DataFrame(
        {
            "test": factor * means["test"],
            "deviation": factor * groups["test"].std(),
            "runs": groups.size(),
            "note": None,
            "error": factor * means["error"],
            "before": factor * means["zero_shot"],
            "majority": factor * means["majority_class"],
            "macro F1": 100 * means["macro_f1"],
            "validation": factor * means["validation"],
            "loss": means["best_dev_loss"],
            "steps": means["steps"],
            "minutes": means["seconds"] / 60,
            "GB": means["peak_memory_bytes"] / 1e9,
        }
    )
    table.loc[table["test"] < table["majority"], "note"] = "below the majority class"
    table.loc[table["test"] < table["before"], "note"] = "below the score before training"
    return table.dropna(axis="columns", how="all")


def label_table(by_label: Mapping[str, Any]) -> pd.DataFrame:
    """Return a row for each label: its test examples and its scores."""
    return pd.DataFrame(map(vars, by_label.values()), index=list(by_label))


def comparison(runs: pd.DataFrame) -> str:
    """Return how two finished runs differ on the same test examples; "" if there are not two.

    Right and wrong answers are compared by McNemar's exact test, other scores by the standard error
    of their mean difference.
    """
    if len(runs) != 2 or not all(runs["scores"].map(len)):
        return ""
    first, second = runs.to_dict("records")
    if first["test_data"] != second["test_data"]:
        return "The two runs have other test examples, so they are not compared."
    gains = pd.Series(second["scores"]) - pd.Series(first["scores"])
    title = f"On the same {len(gains)} test examples, {second['directory']}"
    if not gains.isin([-1, 0, 1]).all():
        return f"{title} is {gains.mean():+.3f} ± {gains.sem():.3f} (standard error) ahead"
    better = int((gains > 0).sum())
    worse = int((gains < 0).sum())
    num_ways = sum(math.comb(better + worse, few) for few in range(min(better, worse) + 1))
    p_value = min(1, 2 * num_ways / 2 ** (better + worse))
    return (
        f"{title} alone is right on {better}, and {first['directory']} alone on {worse} "
        f"(McNemar's exact test: p = {p_value:.2g})"
    )


def page(runs: pd.DataFrame, compared: str) -> str:
    """Return one HTML page without scripts, which loads nothing and shows texts of runs as text."""
    from jinja2 import Template

    sections = []
    for key, same in runs.groupby(SECTION, sort=False):
        charts = [_chart(same, "step", "score"), _chart(same, "minutes", "loss")]
        sections.append((", ".join(key), score_table(same).to_html(**_FORMAT), charts))
    each_run = runs.to_dict("records")
    for run in each_run:
        run["labels"] = label_table(run["by_label"]).to_html(**_FORMAT)
        pairs = zip(run["scores"], run["answers"], strict=False)
        run["wrong"] = [answer for score, answer in pairs if score < 1]
    template = Template(Path(__file__).with_name("report.html").read_text(), autoescape=True)
    html: str = template.render(sections=sections, compared=compared, note=_NOTE, runs=each_run)
    return html


def _chart(runs: pd.DataFrame, x: str, y: str) -> str:
    """Return the validations of each name, means over its runs, as an <svg> element."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text, in a font of the browser, and a dollar sign in a name begins no formula.
    with mpl.rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(6, 3.2))
        axes = figure.subplots()
        axes.set(title=f"Validation {y}", xlabel=x)
        axes.set_prop_cycle(color=mpl.color_sequences["okabe_ito"])  # for color-blind readers, too
        for name, group in runs.groupby("name", sort=False):
            curve = pd.concat(list(group["curve"])).groupby("step").mean().reset_index()
            axes.plot(curve[x], curve[y], marker="o", label=name)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.18), frameon=False)
        document = io.StringIO()
        figure.savefig(document, format="svg", bbox_inches="tight")  # it grows by the legend
    # A page cannot hold the XML declaration, which is before the element.
    _, tag, element = document.getvalue().partition("<svg")
    return tag + element
