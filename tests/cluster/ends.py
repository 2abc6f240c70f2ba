"""How long the runs are, and what holds of one that was told to stop."""

from __future__ import annotations

from run_ends import num_steps, results_of

SHORT = ("train.steps=8", "train.eval_every=4")
LONG = ("train.steps=200", "train.eval_every=50", "train.snapshot_every=20")
"""Steps enough that a run is told to stop before it has done them."""


def assert_stopped_by_agreement(run_dir):
    """Assert that a long run ended well before its end, with all it had done in its results."""
    results = results_of(run_dir)
    assert not results["finished"]
    assert 0 < results["steps"] == num_steps(run_dir) < 200
