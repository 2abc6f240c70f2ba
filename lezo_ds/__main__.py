"""`python -m lezo_ds` is the program `lezo-ds`."""

import sys

from lezo_ds.errors import launched_rank, leave


def main(command: str | None = None) -> None:
    """Run a command, by default the one that the first argument names.

    Ctrl-C ends it with one line. A run that trains stops after its step instead.
    """
    try:
        # Inside the try: this, and what it imports later, may take seconds.
        from lezo_ds import cli

        cli.main(command)
    except KeyboardInterrupt:
        if launched_rank() == 0:
            print("interrupted; the same command starts again", file=sys.stderr, flush=True)
        leave(130)  # a shell's code for SIGINT


if __name__ == "__main__":
    main()
