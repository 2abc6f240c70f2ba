import hashlib
import os
import stat

import pytest

from lezo_ds import files
from lezo_ds.errors import LezoError
from lezo_ds.files import (
    failures_named,
    make_directory,
    sha256_file,
    sync,
    write_atomically,
)


def names_in(directory):
    return [path.name for path in directory.iterdir()]


def test_bytes_and_text_are_written_as_they_are(tmp_path):
    write_atomically(tmp_path / "bytes", b"\x00\xff\r\n")
    write_atomically(tmp_path / "text", "caf\u00e9\r\n\n")
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff\r\n"
    assert (tmp_path / "text").read_bytes() == b"caf\xc3\xa9\r\n\n"


def test_a_file_is_replaced_while_its_readers_keep_the_old_content(tmp_path):
    (tmp_path / ".file.tmp").write_text("half of something longer, which a killed writer left")
    write_atomically(tmp_path / "file", "old and longer")
    with (tmp_path / "file").open() as reader:
        write_atomically(tmp_path / "file", "new")
        assert reader.read() == "old and longer"
    assert (tmp_path / "file").read_text() == "new"
    assert names_in(tmp_path) == ["file"]


def test_a_failed_rename_keeps_the_old_file_and_removes_the_temporary_one(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "inside").write_text("kept")
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "taken", "content")
    assert names_in(tmp_path) == ["taken"]
    assert (tmp_path / "taken" / "inside").read_text() == "kept"


def test_the_file_gets_the_users_usual_permissions(tmp_path):
    old = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", "content")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_files_and_directories_that_exist_can_be_synced(tmp_path):
    (tmp_path / "file").write_text("content")
    sync(tmp_path)
    sync(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "none")


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_the_sha256_of_a_file_is_that_of_its_bytes(tmp_path, size):
    data = bytes(index % 251 for index in range(size))
    (tmp_path / "file").write_bytes(data)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_a_directory_is_made_with_its_parents_and_each_is_synced_into_the_one_above(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "sync", lambda path: (synced.append(path), sync(path)))
    make_directory(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    make_directory(tmp_path / "a" / "b" / "c")
    assert len(synced) == 3


@pytest.mark.parametrize("below", ["", "more", "more/still"])
def test_no_directory_replaces_a_file_or_is_made_below_one(tmp_path, below):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match="file"):
        make_directory(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_failed_write_is_an_error_that_names_the_file_and_the_fix(tmp_path):
    path = tmp_path / "missing" / "file"
    message = r"missing/file cannot be written; got: .*No such file.*; fix: free space"
    with pytest.raises(LezoError, match=message), failures_named(path):
        write_atomically(path, "content")
    with pytest.raises(ValueError, match="another"), failures_named(path):
        raise ValueError("another")
