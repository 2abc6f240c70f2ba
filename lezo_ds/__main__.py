"""The program `lezo-ds`, which is also `python -m lezo_ds`: it runs one of `lezo_ds.commands`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from lezo_ds import __version__, command_line
from lezo_ds.commands import COMMANDS
from lezo_ds.config.reading import nearest
from lezo_ds.errors import UserError
from lezo_ds.shipped import find_file

_DESCRIPTION = """\
Fine-tune language models without gradients, on DeepSpeed ZeRO-3.

commands:
{commands}

`lezo-ds COMMAND --help` describes the arguments of a command. Several ranks, here two:
deepspeed --num_gpus 2 --module lezo_ds train --config RECIPE key=value ..."""


def main() -> None:
    """Run the program and end the process."""
    command_line.run_main(_run)


def _run() -> None:
    lines = (f"  {name:10} {summary}" for name, summary in COMMANDS.items())
    parser = command_line.parser(None, _DESCRIPTION.format(commands="\n".join(lines)))
    add = parser.add_argument
    add("--version", action="version", version=f"lezo_ds {__version__}")
    path_help = "print where a shipped file is, such as launch/slurm/one_node.sbatch"
    add("--path", metavar="FILE", help=path_help)
    add("command", nargs="?", metavar="COMMAND", help="one of the commands above")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="the arguments of the command")
    given = parser.parse_args()
    if given.path is not None:
        print(_shipped(given.path))
        return
    _check(given.command)
    # A command reads sys.argv, as its script in launch/ does. What is recorded of it is the same for both.
    sys.argv = [f"launch/{given.command}.py", *given.arguments]
    import_module(f"lezo_ds.commands.{given.command}").main()


def _check(command: str | None) -> None:
    if command in COMMANDS:
        return
    near = nearest(command or "", COMMANDS)
    raise UserError(
        "there is no such command" if command else "a command is missing",
        got=command or "no command",
        expected=f"one of {', '.join(COMMANDS)}",
        fix=f"did you mean {near[0]}?" if near else "lezo-ds --help describes them",
    )


def _shipped(name: str) -> str:
    path = find_file(name)
    if not path.exists():
        raise UserError(
            "there is no such shipped file",
            got=name,
            expected="a path such as launch/slurm/one_node.sbatch, launch/recipes or ds_configs",
            fix="lezo-ds --path launch is the folder of most of them",
        )
    return str(path.resolve())


if __name__ == "__main__":
    main()
