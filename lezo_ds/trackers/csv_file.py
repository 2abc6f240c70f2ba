"""trackers/metrics.csv in the run's directory: a row for each step and each evaluation."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from io import StringIO

from lezo_ds.files import write_atomically
from lezo_ds.trackers.base import RunFacts, Tracker


class CsvFile(Tracker):
    """A table whose columns are the names of metrics.jsonl. A cell is empty if its row has no such value."""

    def __init__(self, run: RunFacts) -> None:
        self._path = run.folder / "metrics.csv"
        self._columns = ["step"]
        if not self._path.exists():
            return
        # A crash may have cut the last row short.
        lines = [line for line in self._path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        reader = csv.DictReader(lines)
        rows = [row for row in reader if int(row["step"]) <= run.step]
        self._columns = list(reader.fieldnames or self._columns)
        self._rewrite(rows)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a row. The whole file is written again if there is a new column."""
        row = {"step": step, **values}
        new = [name for name in row if name not in self._columns]
        if new:
            rows: list[dict[str, str]] = []
            if self._path.exists():
                with self._path.open(newline="") as file:
                    rows = list(csv.DictReader(file))
            self._columns += new
            self._rewrite(rows)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        text = StringIO()
        writer = csv.DictWriter(text, self._columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self._path, text.getvalue())
