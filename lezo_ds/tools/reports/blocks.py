"""What a page is made of, as data that HTML and Markdown are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lezo_ds.tools.reports.charts import BarChart, LineChart


@dataclass(frozen=True)
class DataTable:
    """A table.

    Attributes:
        header: its first line.
        rows: the others.
        shades: 0 to 1 for each row's cells from the second on, how strong their colour is; may be empty.
        title: above it.
        is_text: its cells are words, not numbers: they may be broken.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    shades: Sequence[Sequence[float | None]] = ()
    title: str = ""
    is_text: bool = False


Block = LineChart | BarChart | DataTable


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: of the section.
        blocks: its figures and tables; where there are none it is left out.
        note: what to know of them.
        warnings: what may be wrong with them.
        needs: what would fill it.
        commands: (what it is, command line).
    """

    title: str
    blocks: Sequence[Block]
    note: str = ""
    warnings: Sequence[str] = ()
    needs: str = ""
    commands: Sequence[tuple[str, str]] = ()
