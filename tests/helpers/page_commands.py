"""What a page shows a reader to run: its files and its commands, in their order.

    python tests/helpers/page_commands.py docs/tutorial.md

runs a page's commands as they are, from the root of a clone.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def blocks(text, language):
    """Return the code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def shown_files(text):
    """Return the files that a page shows: blocks whose first line is a comment with their name."""
    found = {}
    for block in (*blocks(text, "python"), *blocks(text, "yaml")):
        name = re.match(r"# ([\w-]+\.(?:py|yaml))\b", block)
        if name:
            found[name[1]] = block
    return found


def commands(text):
    """Return the commands of a page, each as one line."""
    joined = "".join(blocks(text, "bash")).replace("\\\n", " ")
    lines = (" ".join(line.partition(" #")[0].split()) for line in joined.splitlines())
    return [line for line in lines if line]


def write_files(text, directory):
    """Write the files that a page shows to a directory."""
    for name, content in shown_files(text).items():
        (Path(directory) / name).write_text(content, encoding="utf-8")


def main(page):
    text = Path(page).read_text(encoding="utf-8")
    write_files(text, ".")
    script = "\n".join(["set -euxo pipefail", *commands(text)])
    return subprocess.run(["bash", "-c", script], stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
