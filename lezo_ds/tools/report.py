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
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lezo_ds import files
from lezo_ds.config import config_from_dict, flatten, keys_with, load_yaml
from lezo_ds.data.metrics import REWARD
from lezo_ds.errors import LezoError, UserError, one_line, require_package
from lezo_ds.journal import scan_journal
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.results import RunResults, method_name

DAMAGE = (*files.DAMAGE, LezoError)
"""What reading a damaged file of a run may raise."""
SEEDS = ["seed", "data.seed"]
SECTION = ["task", "model", "metric"]
"""Runs that are alike in these share a table and charts."""
# Keys that may change when a run resumes, and decide its score all the same.
_DECISIVE = {"peft.path", "train.steps", "train.epochs", "train.patience", "train.eval_every"}
_COLUMNS = {
    "test": "test",
    "error": "error",
    "zero_shot": "before",
    "majority_class": "majority",
    "macro_f1": "macro F1",
    "validation": "validation",
    "best_dev_loss": "loss",
    "steps": "steps",
    "seconds": "minutes",
    "peak_memory_bytes": "GB",
}
"""The numbers of a run, and the names of their columns in a table."""
_SHARES = ["deviation", *list(_COLUMNS)[:6]]
"""Those that a table shows in percent."""
_FORMAT: Mapping[str, Any] = {
    "na_rep": "",
    "float_format": "{:.4g}".format,
}
_NOTE = """\
Scores are means over runs that differ in their seeds, in percent; rewards are as they are. The
deviation is that of the sample of runs; the error is the standard error of one run, over its test
examples. The validation score is that of the best step; of a run that is not finished, the last."""

logger = logging.getLogger(__name__)


def main(arguments: Namespace) -> None:
    """Print the tables or their numbers, or write the page."""
    if arguments.html is not None:
        problem = "report --html draws curves with matplotlib, which is not installed"
        require_package("matplotlib", problem, "'lezo_ds[report]'")
    runs = name_runs(read_runs(arguments.runs))
    if arguments.html is not None:
        files.write_output(arguments.html, page(runs))
        return
    tables = score_tables(runs)
    compared = comparison(runs)
    if arguments.json:
        scores = {title: json.loads(tables[title].to_json(orient="index")) for title in tables}
        print(json.dumps({"scores": scores, "comparison": compared}, indent=1))
        return
    for title, table in tables.items():
        print(f"{title}\n{as_text(table)}\n")
    print(compared or _NOTE)


def read_runs(directories: Iterable[str | Path]) -> pd.DataFrame:
    """Return a row for each directory that holds a run, finished or not. Others are warned of.

    A directory counts once. The columns are those of `_read_run`.

    Raises:
        UserError: None of the directories holds a run.
    """
    rows = []
    for directory in dict.fromkeys(map(Path, directories)):
        try:
            rows.append(_read_run(directory))
        except DAMAGE as error:
            problem = f"not a run, or damaged ({one_line(error)})"
            run = RunDirectory(directory)
            if run.journal.exists() and not run.config.exists():
                problem = "a loop of your own or a run that has just begun, without scores to show"
            logger.warning("warning: %s: %s", directory, problem)
    if not rows:
        problem = "none of these directories holds a run with scores"
        raise UserError(problem, fix="give the run_dir of runs of lezo-ds train")
    return pd.DataFrame(rows)


def _read_run(directory: Path) -> dict[str, Any]:
    """Return the row of a run. Raises one of DAMAGE.

    Its columns are each key of the configuration, as a text, the values of results.json, and:

        directory, method, model
        error             the standard error of the score, over the test examples
        state             "", or what its name ends with: why there is no score, and the last step
        adapter           digest of the adapter that the run started from
        test_data         digest of the test examples
        curve             a row for each validation: step, loss, score
        validation        the score of the best step or, of a run that is not finished, the last
        answers, scores   what the model answered to the test examples, and how right each is
        samples           answers that the evaluations have shown, with their rewards
    """
    run = RunDirectory(directory)
    text = files.read_regular(run.config).decode()
    config = config_from_dict(load_yaml(text), str(directory))
    curve, metric = _read_curve(run.metrics)
    row: dict[str, Any] = dict.fromkeys(RunResults.__dataclass_fields__)
    row["method"] = method_name(config)
    row["metric"] = metric
    row["steps"] = max(curve["step"], default=0)
    results = RunResults.read(run.results)
    if results is not None:
        row |= vars(results)
    for key, value in flatten(config.model_dump()).items():
        row[key] = str(value)
    row["directory"] = str(directory)
    row["task"] = config.data.task
    row["model"] = Path(config.model.path).name
    row["adapter"] = None
    if run.journal.exists():
        header = next(scan_journal(run.journal)).item
        row["model_fingerprint"] = header.model_fingerprint
        row["adapter"] = header.config.get("adapter") or "none"
    row["samples"] = _read_lines(run.samples)
    row["curve"] = curve
    answers = []
    row["state"] = ""
    if row["finished"]:
        path = run.predictions_at(row["best_step"] or 0)
        answers = _read_lines(path)
        curve = curve[curve["step"] == row["best_step"]]
    elif results is None and run.results.exists():
        row["state"] = ", damaged results.json"
    else:
        row["state"] = f", not finished, at step {row['steps']:.0f}"
    row["validation"] = curve["score"].tail(1).mean()
    row["answers"] = answers
    # Metrics that are no mean over examples give them no scores.
    scores = [answer.get("score") for answer in answers]
    row["scores"] = pd.Series(scores, dtype=float)
    row["error"] = row["scores"].sem()
    # A chat template may write the day of the run at the start of a prompt.
    examples = [(answer["prompt"][-200:], answer["right"]) for answer in answers]
    digest = hashlib.sha256(str(examples).encode())
    row["test_data"] = digest.hexdigest()[:6]
    return row


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSONL file, none if it is missing. A crash may cut the last line."""
    if not path.exists():
        return []
    text = files.read_regular(path).decode()
    whole = [line for line in text.splitlines() if line.endswith("}")]
    return list(map(json.loads, whole))


def _read_curve(path: Path) -> tuple[pd.DataFrame, str]:
    """Return the validations in metrics.jsonl (step, loss, score) and their metric."""
    lines = [line for line in _read_lines(path) if line.get("dev_loss") is not None]
    frame = pd.DataFrame(lines)
    scores = frame.filter(regex="^dev_(?!loss)").columns
    score = [*scores, "dev_"][0]
    curve = frame.reindex(columns=["step", "dev_loss", score])
    curve = curve.astype(float)
    curve.columns = ["step", "loss", "score"]
    return curve, score.removeprefix("dev_")


def name_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the column `name`, such as "LeZO, learning_rate=1e-06".

    Runs of one name are averaged. A run that has other test examples than the first one of its name
    and data.seed, which draws them, or that repeats its seeds, has a name of its own.
    """
    ignored = keys_with("may_differ_on_resume") - _DECISIVE | set(SEEDS)
    keys = ["model_fingerprint", "adapter"]
    keys += [key for key in runs if "." in key and key not in ignored]  # of sections and options
    runs = runs.assign(name=runs["method"])
    methods = runs.groupby([*SECTION, "method"], sort=False)
    for _, group in methods:
        is_known = group[keys].notna()
        settings = group[keys].astype(str).where(is_known)
        for key in settings.columns[settings.nunique() > 1]:
            leaf = key.rpartition(".")[2]
            shown = f", {leaf}=" + settings[key]
            runs.loc[group.index, "name"] += shown.fillna("")
    runs["name"] += runs["state"]
    alike = runs.groupby([*SECTION, "name", "data.seed"], sort=False)
    first = alike["test_data"].transform("first")
    is_other = runs["test_data"] != first
    runs.loc[is_other, "name"] += ", other test data (" + runs["test_data"] + ")"
    is_repeated = runs.duplicated([*SECTION, "name", *SEEDS])
    runs.loc[is_repeated, "name"] += ", the same seeds again in " + runs["directory"]
    return runs


def score_tables(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return a table for each section of runs, by its title."""
    sections = runs.groupby(SECTION, sort=False)
    return {", ".join(key): score_table(same) for key, same in sections}


def score_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each name in runs of one section, without the columns that say nothing."""
    runs = runs.astype(dict.fromkeys(_COLUMNS, float))
    groups = runs.groupby("name", sort=False)
    table = groups[list(_COLUMNS)].mean()
    table.insert(1, "deviation", groups["test"].std())
    table.insert(2, "runs", groups.size())
    if REWARD not in set(runs["metric"]):
        table[_SHARES] *= 100
    table["seconds"] /= 60
    table["peak_memory_bytes"] /= 1e9
    table = table.rename(columns=_COLUMNS)
    table.index.name = None
    return table.dropna(axis="columns", how="all")


def as_text(table: pd.DataFrame) -> str:
    """Return a table with numbered rows, and below it their names, which may be long."""
    numbers = range(1, len(table) + 1)
    names = [f"{number}: {name}" for number, name in zip(numbers, table.index, strict=True)]
    return "\n".join([table.set_axis(numbers).to_string(**_FORMAT), *names])


def comparison(runs: pd.DataFrame) -> str:
    """Return how far two finished runs differ on the same test examples; "" if there are not two.

    The standard error is that of the mean of the differences by example, which are smaller than
    those between runs on different examples.
    """
    has_scores = runs["error"].notna().all()
    if len(runs) != 2 or not has_scores:
        return ""
    first, second = runs.to_dict("records")
    if first["test_data"] != second["test_data"]:
        return "The two runs have other test examples, so they are not compared."
    gains = 100 * (second["scores"] - first["scores"])
    return (
        f"On the same {len(gains)} test examples, {second['directory']} is {gains.mean():+.2f} "
        f"± {gains.sem():.2f} (standard error) ahead of {first['directory']}, in percent."
    )


def page(runs: pd.DataFrame) -> str:
    """Return one HTML page without scripts, which loads nothing and shows texts of runs as text."""
    from jinja2 import Template

    sections = []
    for key, same in runs.groupby(SECTION, sort=False):
        table = score_table(same).to_html(**_FORMAT)
        charts = [_chart(same, column) for column in ("score", "loss")]
        sections.append((", ".join(key), table, charts))
    text = Path(__file__).with_name("report.html").read_text()
    template = Template(text, autoescape=True)
    html: str = template.render(
        sections=sections,
        compared=comparison(runs),
        note=_NOTE,
        runs=runs.to_dict("records"),
    )
    return html


def _chart(runs: pd.DataFrame, column: str) -> str:
    """Return the validations of each name, means over its runs, as an <svg> element."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text, in a font of the browser, and a dollar sign in a name begins no formula.
    with mpl.rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(6, 3.2))
        axes = figure.subplots()
        axes.set_title(f"Validation {column}")
        axes.set_xlabel("step")
        axes.set_prop_cycle(color=mpl.color_sequences["okabe_ito"])  # for color-blind readers, too
        for name, group in runs.groupby("name", sort=False):
            curves = pd.concat(list(group["curve"]))
            axes.plot(
                curves.groupby("step")[column].mean(),
                marker="o",
                label=textwrap.fill(name, 70),
            )
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(0, -0.18),
            frameon=False,
        )
        document = io.StringIO()
        figure.savefig(
            document,
            format="svg",
            bbox_inches="tight",  # it grows by the legend
        )
    # A page cannot hold the XML declaration, which is before the element.
    return "<svg" + document.getvalue().partition("<svg")[2]
