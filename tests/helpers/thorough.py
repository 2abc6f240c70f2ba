"""Parameters of tests that only `make test-thorough` runs."""

import pytest


def thorough(*values):
    """Return values of a parametrized test that repeat, with others, what `make test` covers."""
    return pytest.param(*values, marks=pytest.mark.thorough)
