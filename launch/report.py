"""The command `lezo-ds report`, as a script."""

from lezo_ds.command_line import run_main
from lezo_ds.commands.report import main

if __name__ == "__main__":
    run_main(main)
