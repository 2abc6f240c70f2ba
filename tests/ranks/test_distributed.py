"""What ranks that srun started know of each other before they meet."""

from __future__ import annotations

import pytest

from lezo_ds.distributed import slurm_rank_variables

TASK = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}


def ranks_of(job=7, step=0, nodes="n1", **more):
    numbers = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_STEP_NODELIST": nodes}
    return slurm_rank_variables({**TASK, **numbers, **more})


def test_a_task_is_a_rank():
    ranks = ranks_of()
    assert (ranks["RANK"], ranks["LOCAL_RANK"], ranks["WORLD_SIZE"]) == ("3", "1", "4")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[007,009-011],big[1-3]", "gpu007"),
        ("gpu-a[12-13].site.example,login", "gpu-a12.site.example"),
        ("rack[2-3]node[05-08]", "rack2node05"),
    ],
)
def test_the_ranks_meet_at_the_first_node_of_their_step(nodes, first):
    assert ranks_of(nodes=nodes)["MASTER_ADDR"] == first


def test_concurrent_jobs_and_steps_meet_at_ports_of_their_own():
    ports = [
        int(ranks_of(job=job, step=step)["MASTER_PORT"]) for job in range(900, 1000) for step in range(16)
    ]
    assert len(set(ports)) == 1600
    assert min(ports) >= 10_000
    assert max(ports) < 30_000


def test_a_meeting_point_that_is_given_stays():
    ranks = ranks_of(MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    assert (ranks["MASTER_ADDR"], ranks["MASTER_PORT"]) == ("10.0.0.1", "29500")
