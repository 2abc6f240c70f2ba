"""The command `lezo-ds predict`, as a script."""

from lezo_ds.cli import main

if __name__ == "__main__":
    main("predict")
