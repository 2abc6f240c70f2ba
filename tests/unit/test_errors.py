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


def test_an_error_is_one_line_of_printable_characters():
    program = (
        r"from lezo_ds.errors import *; end_with(UserError('a\n\x1b]0;\x07\x9b\u202e\u00e9' * 999))"
    )
    finished = run([sys.executable, "-c", program], PYTHONIOENCODING="utf-8")
    assert finished.err.startswith("error: a ?]0;???\u00e9a ?]0;") and len(finished.err) < 2100


def test_two_threads_that_find_the_same_lost_rank_print_one_line():
    finished = run([sys.executable, "-c", PROGRAM], RANK="1")
    assert finished.code == 6
    assert finished.err.count("error: found by ") == 1
