"""The commands of `lezo-ds`: each parses its arguments, builds and runs.

A command is a module of this package whose function `main` reads `sys.argv`, and a line in `COMMANDS`.
`launch/NAME.py` runs it as a script.
"""

from __future__ import annotations

COMMANDS: dict[str, str] = {
    "init": "write a recipe for a model and a file of your own data",
    "train": "fine-tune a model, or check a recipe and print it",
    "evaluate": "score a model, or the weights of a run at any step",
    "export": "write the model of any step of a run or pack",
    "pack": "pack a run into one small file without weights",
    "plan": "say how a recipe fits on given GPUs",
    "report": "show runs as tables, or as a page with figures",
    "sweep": "run every combination of a grid",
    "study": "compare methods, each at its best learning rate",
    "benchmark": "time variants of a step against each other",
    "gpu": "check bits, speed and memory on a GPU",
    "demo": "fine-tune a real model on two CPU ranks",
}
"""What each command does, by its name."""
