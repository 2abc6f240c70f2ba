"""Writes into the pages what the code says of itself: the keys of a recipe, and the help of each command.

mkdocs calls this module for every page that it builds (hooks in mkdocs.yml).
"""

from __future__ import annotations

import html
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lezo_ds.commands import COMMANDS  # noqa: E402

from lezo_ds.config import describe  # noqa: E402
from lezo_ds.config.schema import SCHEMA  # noqa: E402


def keys() -> str:
    """Return all keys as a table for each section."""
    lines: list[str] = []
    shown = None
    for key in SCHEMA.keys.values():
        section = key.name.rpartition(".")[0]
        if section != shown:
            shown = section
            about = inspect.getdoc(SCHEMA.sections.get(section)) if section else "Keys without a section."
            title = f"`{section}`" if section else "The run"
            lines += ["", f"### {title}", "", about or "", "", "| key | value | meaning |", "|---|---|---|"]
        cells = (f"`{key.name}`", key.accepted, html.escape(SCHEMA.meanings[key.name], quote=False))
        lines.append("".join(f"| {' '.join(cell.split()).replace('|', '&#124;')} " for cell in cells) + "|")
    return "\n".join(lines)


def commands() -> str:
    """Return the help of every command."""
    lines: list[str] = []
    for name, summary in COMMANDS.items():
        command = [sys.executable, "-m", "lezo_ds", name, "--help"]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        shown = subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout
        shown = shown.replace(describe(), "(see Configuration)")
        text = f"{summary[:1].upper()}{summary[1:]}."
        lines += ["", f"### lezo-ds {name}", "", text, "", "```text", shown.rstrip(), "```"]
    return "\n".join(lines)


MARKS: dict[str, Callable[[], str]] = {"<!-- keys -->": keys, "<!-- commands -->": commands}
"""What replaces each comment of a page."""


def on_page_markdown(markdown: str, **_: Any) -> str:  # noqa: ANN401 (mkdocs passes page, config and files)
    """Return the text of a page with the parts that are made from the code."""
    for mark, text in MARKS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, text())
    return markdown
