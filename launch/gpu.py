"""The command `lezo-ds gpu`, as a script."""

from lezo_ds.command_line import run_main
from lezo_ds.commands.gpu import main

if __name__ == "__main__":
    run_main(main)
