"""lezo-ds report: runs as a table on the terminal, or as an HTML page with curves and answers."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterable
from glob import glob
from pathlib import Path

import pandas as pd

from lezo_ds.errors import UserError, require_package
from lezo_ds.files import write_output
from lezo_ds.tools.tables import (
    NOTE,
    each_seed_once,
    harness_table,
    name_experiments,
    read_runs,
    score_table,
)

_FIX = "give the run_dir of runs, or a pattern"

logger = logging.getLogger(__name__)


def main(arguments: Namespace) -> None:
    """Print the table, or write the page. A run that is not finished is a warning."""
    writes_page = arguments.html is not None
    if writes_page:
        problem = "report --html draws curves with matplotlib, which is not installed"
        require_package("matplotlib", problem, "'lezo_ds[report]'")
    runs = read_runs(find_runs(arguments.runs))
    for run in runs[~runs["finished"]].itertuples():
        logger.warning("warning: %s: %s", run.directory, run.problem)
    if runs["method"].isna().all():
        raise UserError("none of these directories holds a run", fix=_FIX)
    runs = each_seed_once(name_experiments(runs))
    if writes_page:
        from lezo_ds.tools.page import page  # which needs matplotlib

        write_output(arguments.html, page(runs))
    elif runs["finished"].any():
        print(f"{score_table(runs).to_string(index=False)}\n\n{NOTE}")
        finished = runs[runs["finished"]]
        if len(finished) == 1 and finished["labels"].iloc[0]:
            by_label = pd.DataFrame(finished["labels"].iloc[0])
            print(f"\n{by_label.to_string(index=False)}")
        for directory in finished["directory"]:
            harness = harness_table(Path(directory))
            if not harness.empty:
                print(f"\n{directory}\n{harness.to_string(index=False)}")
    else:
        fix = "wait, start them again (they resume), or use --html for their curves"
        raise UserError("none of these runs is finished", fix=fix)


def find_runs(patterns: Iterable[str]) -> list[Path]:
    """Return the directories that names and glob patterns stand for, each once, in this order.

    Raises:
        UserError: No directory matches a pattern.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        # A name may have characters that a pattern gives a meaning.
        names = [pattern] if Path(pattern).is_dir() else sorted(glob(pattern))  # noqa: PTH207
        directories = [path for path in map(Path, names) if path.is_dir()]
        if not directories:
            raise UserError(f"there is no run {pattern}", fix=_FIX)
        for directory in directories:
            found.setdefault(directory.resolve(), directory)
    return list(found.values())
