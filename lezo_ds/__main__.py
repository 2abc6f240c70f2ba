"""`python -m lezo_ds` is the program `lezo-ds`."""

import os
import sys

from lezo_ds.errors import launched_rank


def main(command: str | None = None) -> None:
    """Run a command. Ctrl-C ends it with one line; a run that trains stops after its step instead."""
    try:
        from lezo_ds import cli  # this and what it imports later may take seconds

        cli.main(command)
    except KeyboardInterrupt:
        if launched_rank() == 0:
            print("interrupted; the same command starts again", file=sys.stderr, flush=True)
        os._exit(130)  # a shell's code for SIGINT; sys.exit would wait for other ranks


if __name__ == "__main__":
    main()
