"""The commands of `lezo-ds`: each parses its arguments, builds and runs.

A command is a module of this package whose function `main` reads `sys.argv`, and a line in `COMMANDS`.
`launch/NAME.py` runs it as a script.
"""

from __future__ import annotations

COMMANDS: dict[str, str] = {
    "init": "write a recipe for a model and a file of your own data",
    "train": "fine-tune a model, or check a recipe and print it",
    "evaluate": "score a model, or the weights of a run at any step",
    "export": "write the model of any step of a run, or a run as one small file",
    "report": "show runs as tables, or as a page with figures",
    "sweep": "run every combination of a grid",
    "benchmark": "time variants of a step against each other",
}
"""What each command does, by its name."""
