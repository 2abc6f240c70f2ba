"""The command `lezo-ds predict`, as a script."""

from lezo_ds.__main__ import main

if __name__ == "__main__":
    main("predict")
