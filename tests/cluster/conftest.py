"""What tests of launchers share: how a run of the recipe ends under plain python, and a Slurm."""

import pytest
from commands import python, run_well
from run_ends import end
from slurm_lab import slurm_cluster


@pytest.fixture(scope="session")
def undisturbed(recipe, tmp_path_factory):
    """Return how a run of some length ends under plain python on one rank."""
    ends = {}

    def end_of(length):
        if length not in ends:
            run_dir = tmp_path_factory.mktemp("by_python")
            run_well(python("--config", recipe, f"run_dir={run_dir}", *length))
            ends[length] = end(run_dir)
        return ends[length]

    return end_of


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
