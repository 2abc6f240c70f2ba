"""How a process ends with an error."""

from __future__ import annotations

import sys

from commands import run

PROGRAM = """
import threading
from lezo_ds.errors import LostRankError, end_with
both = threading.Barrier(2)
def report(name):
    both.wait()
    end_with(LostRankError(f"found by {name}"))
threading.Thread(target=report, args=["the heartbeat"]).start()
report("a message")
"""


def test_two_threads_that_find_the_same_lost_rank_print_one_line():
    finished = run([sys.executable, "-c", PROGRAM], RANK="1")
    assert finished.code == 6
    assert finished.err.count("error: found by ") == 1
