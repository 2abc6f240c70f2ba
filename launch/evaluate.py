"""The command `lezo-ds evaluate`, as a script."""

from lezo_ds.cli import main

if __name__ == "__main__":
    main("evaluate")
