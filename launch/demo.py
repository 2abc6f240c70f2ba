"""The command `lezo-ds demo`, as a script."""

from lezo_ds.command_line import run_main
from lezo_ds.commands.demo import main

if __name__ == "__main__":
    run_main(main)
