"""How a process ends with an error."""

from __future__ import annotations

import sys

from commands import run

from lezo_ds.errors import printable

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


def test_what_commands_a_terminal_is_not_printed_but_bars_are():
    text = "\ta\u00a0b \U0001f468\u200d\U0001f469\n"
    assert printable(text) == text
    assert printable("\x1b[A\x1b[2J\r\u2066\udc80\x9b") == "?[A?[2J????"
    assert printable("\r50%\x1b[A\x1b[2J", has_bars=True) == "\r50%\x1b[A?[2J"


def test_two_threads_that_find_the_same_lost_rank_print_one_line():
    finished = run([sys.executable, "-c", PROGRAM], RANK="1")
    assert finished.code == 6
    assert finished.err.count("error: found by ") == 1
