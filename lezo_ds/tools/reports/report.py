"""What lezo-ds report writes: the tables of runs as Markdown, or the page."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from lezo_ds.errors import UserError
from lezo_ds.tools.benchmark import table
from lezo_ds.tools.reports.experiments import best_rates, drop_repeats, name_experiments
from lezo_ds.tools.reports.paper_layout import score_table, to_markdown
from lezo_ds.tools.reports.results_table import find_runs, read_runs

logger = logging.getLogger(__name__)


def make_table(patterns: Sequence[str]) -> str:
    """Return the scores of runs as Markdown. Each run that does not count is logged as a warning.

    Args:
        patterns: names of run directories, and glob patterns.

    Raises:
        UserError: there is no such run, or none of them is finished.
    """
    runs, warnings = _read(patterns)
    if not runs["finished"].any():
        raise _nothing_to_show("finished run", warnings)
    return to_markdown(score_table(best_rates(runs)))


def make_page(patterns: Sequence[str], benchmark: Path | None) -> str:
    """Return the page as HTML. Each run that does not count is logged as a warning.

    Args:
        patterns: names of run directories, finished or not, and glob patterns.
        benchmark: CSV of lezo-ds benchmark; None shows no benchmark.

    Raises:
        UserError: there is no such run, nothing to show, no such CSV, or plotly is not installed.
    """
    try:
        from lezo_ds.tools.reports import page
    except ModuleNotFoundError as error:
        raise UserError(
            "a page needs a library that is not installed",
            got=str(error),
            expected="the libraries of the extra named report",
            fix="pip install 'lezo_ds[report]'",
        ) from error
    runs, warnings = _read(patterns)
    if runs.empty and benchmark is None:
        raise _nothing_to_show("run or benchmark", warnings)
    return page.render(runs, None if benchmark is None else table.read(benchmark))


def _read(patterns: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """Return all runs with a configuration, named, each once; and a warning for each that does not count."""
    found = read_runs(find_runs(patterns))
    runs, repeats = drop_repeats(name_experiments(found[found["method"].notna()]))
    left_out = found.loc[~found["finished"], ["directory", "problem"]].to_numpy()
    warnings = [*(f"left out: {directory}: {problem}" for directory, problem in left_out), *repeats]
    for warning in warnings:
        logger.warning("warning: %s", warning)
    return runs, warnings


def _nothing_to_show(what: str, warnings: Sequence[str]) -> UserError:
    return UserError(
        f"there is no {what} to show",
        got="; ".join(warnings) or "no path",
        expected="directories with the config.yaml and results.json of a run",
        fix="start the same commands again (they resume), or give other directories",
    )
