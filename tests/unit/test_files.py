"""What a process leaves and says at its ends: files that are whole, errors of one line."""

import os
import sys
from pathlib import Path

import pytest
from commands import run

from lezo_ds.errors import LezoError, printable
from lezo_ds.files import failures_named, write_atomically


def names_in(directory):
    return [path.name for path in directory.iterdir()]


def test_a_file_is_replaced_while_its_readers_keep_the_old_content(tmp_path):
    (tmp_path / ".file.tmp").write_text("half of something longer, which a killed writer left")
    write_atomically(tmp_path / "file", "old and longer")
    with (tmp_path / "file").open() as reader:
        write_atomically(tmp_path / "file", "caf\u00e9\r\n")
        assert reader.read() == "old and longer"
    assert (tmp_path / "file").read_bytes() == b"caf\xc3\xa9\r\n"
    assert names_in(tmp_path) == ["file"]


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path):
    (tmp_path / "private").write_text("private")
    (tmp_path / ".file.tmp").symlink_to("private")
    write_atomically(tmp_path / "file", "content")
    assert (tmp_path / "private").read_text() == "private"
    assert (tmp_path / "file").read_text() == "content" and not (tmp_path / "file").is_symlink()


def test_the_content_is_synced_before_the_rename_and_the_directory_after(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(descriptor):
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, names_in(tmp_path)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write_atomically(tmp_path / "file", "content")
    assert synced == [(".file.tmp", [".file.tmp"]), (tmp_path.name, ["file"])]


def test_a_failed_write_is_an_error_that_names_the_file_and_the_fix(tmp_path):
    path = tmp_path / "missing" / "file"
    message = r"missing/file cannot be written: .*No such file.*; fix: free space"
    with pytest.raises(LezoError, match=message), failures_named(path):
        write_atomically(path, "content")


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
    program = """if True:
        import threading
        from lezo_ds.errors import LostRankError, end_with
        both = threading.Barrier(2)
        def report(name):
            both.wait()
            end_with(LostRankError(f"found by {name}"))
        threading.Thread(target=report, args=["the heartbeat"]).start()
        report("a message")"""
    finished = run([sys.executable, "-c", program], RANK="1")
    assert finished.code == 6
    assert finished.err.count("error: found by ") == 1
