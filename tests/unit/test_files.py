import os
from pathlib import Path

import pytest

from lezo_ds import files
from lezo_ds.errors import LezoError
from lezo_ds.files import failures_named, make_directory, sync, write_atomically


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


def test_a_failed_rename_keeps_the_old_file_and_removes_the_temporary_one(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "inside").write_text("kept")
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "taken", "content")
    assert names_in(tmp_path) == ["taken"]
    assert (tmp_path / "taken" / "inside").read_text() == "kept"


def test_a_directory_is_made_with_its_parents_and_each_is_synced_into_the_one_above(
    tmp_path, monkeypatch
):
    synced = []
    monkeypatch.setattr(files, "sync", lambda path: (synced.append(path), sync(path)))
    make_directory(tmp_path / "a" / "b" / "c")
    make_directory(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


def test_a_failed_write_is_an_error_that_names_the_file_and_the_fix(tmp_path):
    path = tmp_path / "missing" / "file"
    message = r"missing/file cannot be written: .*No such file.*; fix: free space"
    with pytest.raises(LezoError, match=message), failures_named(path):
        write_atomically(path, "content")
