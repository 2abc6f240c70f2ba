"""`python -m lezo_ds` is the program `lezo-ds`."""

from lezo_ds.cli import main

if __name__ == "__main__":
    main()
