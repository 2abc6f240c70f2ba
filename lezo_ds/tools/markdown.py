"""Tables as Markdown that is readable as plain text, too."""

from __future__ import annotations

import pandas as pd


def markdown_table(frame: pd.DataFrame) -> str:
    """Return a table of texts as Markdown, with a line for the column names and one for each row.

    Args:
        frame: the index is not printed; values are printed as `str` gives them.

    >>> print(markdown_table(pd.DataFrame({"method": ["LeZO", "MeZO"], "SST-2": ["93.0", "91.1"]})))
    | method | SST-2 |
    | ------ | ----- |
    | LeZO   | 93.0  |
    | MeZO   | 91.1  |
    """
    escaped = [
        [str(value).replace("|", "\\|") for value in row] for row in [frame.columns, *frame.to_numpy()]
    ]
    widths = [max(map(len, column)) for column in zip(*escaped, strict=True)]
    escaped.insert(1, ["-" * width for width in widths])
    lines = [" | ".join(map(str.ljust, row, widths)) for row in escaped]
    return "\n".join(f"| {line} |" for line in lines)
