"""Encoded examples are one Arrow file: found again, shared by ranks, the same by any processes."""

import os
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from assets import write_records
from own_data import PLAIN, load_own, write_byte_model, write_chat_model
from ranks import run_ranks

from lezo_ds import distributed
from lezo_ds.data import dataset
from lezo_ds.data.dataset import shared_dataset
from lezo_ds.errors import UserError

LABELS = {"prompt": "{text}", "label_field": "y", "labels": ["x", "y"]}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the cache of sources of any size."""
    monkeypatch.setattr(dataset, "_FEWEST_BYTES", 0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "cache" / "lezo_ds"


def write_run(directory, count=40):
    path = directory / "t.jsonl"
    write_records(path, [{"text": f"ticket {n}", "y": "xy"[n % 2]} for n in range(count)])
    return write_byte_model(directory / "model"), path


def content_of(data):
    splits = data.train, data.dev, data.test
    return [(s.fingerprint(), list(s.encoded), [e.prompt for e in s.examples]) for s in splits]


def left_over(directory):
    return [path.name for path in directory.glob("lezo_ds-*")]


def test_a_second_start_finds_the_files_of_the_first(cache, tmp_path, monkeypatch):
    model, path = write_run(tmp_path)
    first = content_of(load_own(model, path, **LABELS))
    assert len(list(cache.iterdir())) == 4  # the records, and three splits
    assert left_over(tmp_path) == []
    with monkeypatch.context() as without:
        without.setattr(dataset, "read_split", None)
        without.setattr(dataset, "_encode", None)
        assert content_of(load_own(model, path, **LABELS)) == first
    # Another recipe, another file and another tokenizer are other rows.
    assert content_of(load_own(model, path, **LABELS | {"prompt": "{text}!"})) != first
    path.write_text(path.read_text().replace("ticket 1", "ticket one"))
    assert content_of(load_own(model, path, **LABELS)) != first
    (model / "chat_template.jinja").write_text("{{ messages }}")
    load_own(model, path, **LABELS)
    assert len(list(cache.iterdir())) == 16


def test_a_start_on_another_day_does_not_find_texts_with_the_day_of_the_first(
    cache, tmp_path, monkeypatch
):
    _, path = write_run(tmp_path)
    model = write_chat_model(tmp_path / "dated", "{{ strftime_now('%F') }}" + PLAIN)
    in_chat = LABELS | {"chat_template": True}
    first = content_of(load_own(model, path, **in_chat))
    past = SimpleNamespace(now=lambda: datetime(2001, 1, 1))
    monkeypatch.setattr("lezo_ds.data.encode.datetime", past)
    assert content_of(load_own(model, path, **in_chat)) != first


def test_a_cache_that_cannot_be_written_is_done_without(cache, tmp_path):
    model, path = write_run(tmp_path)
    cache.parent.mkdir()
    cache.write_text("in the way")  # root may write into any folder
    content = content_of(load_own(model, path, **LABELS))
    assert cache.is_file() and left_over(tmp_path) == []
    cache.unlink()
    assert content_of(load_own(model, path, **LABELS)) == content
    if os.geteuid():
        cache.chmod(0o500)
        assert content_of(load_own(model, path, **LABELS)) == content


def test_several_processes_write_the_rows_of_one(tmp_path, monkeypatch):
    model, path = write_run(tmp_path, count=90)
    alone = content_of(load_own(model, path, **LABELS))
    monkeypatch.setattr(dataset, "_OF_A_PROCESS", 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    used = []
    own = datasets.Dataset.map

    def counted(self, *arguments, num_proc, **options):
        used.append(num_proc)
        return own(self, *arguments, num_proc=num_proc, **options)

    monkeypatch.setattr(datasets.Dataset, "map", counted)
    data = load_own(model, path, **LABELS)
    assert content_of(data) == alone
    assert used == [3, None, None]
    assert data.train.num_start == len("<s>ticket ") - 2


def load_on_rank(model, path, labels, joined=True):
    if joined:
        distributed.init_distributed()
    try:
        data = load_own(model, path, **labels)
    except UserError as error:
        return str(error)
    files = [file["filename"] for file in data.train.rows.cache_files]
    return content_of(data), files, [Path(file).exists() for file in files]


@pytest.mark.distributed
def test_ranks_map_the_same_file_and_raise_the_same_error(tmp_path):
    model, path = write_run(tmp_path)
    alone = run_ranks(load_on_rank, 2, model, path, LABELS, False)
    first, second = run_ranks(load_on_rank, 2, model, path, LABELS)
    assert first == second
    assert [content for content, *_ in alone] == [first[0]] * 2
    assert first[0] == content_of(load_own(model, path, **LABELS))
    assert first[2] == [False]  # gone once all ranks have mapped it
    with path.open("a") as file:
        file.write('{"text": "a", "y": "z"}\n')
    first, second = run_ranks(load_on_rank, 2, model, path, LABELS)
    assert first == second and "1 of 41 records cannot be used: row 41 of" in first


def test_examples_that_cannot_be_encoded_are_refused_together_or_left_out(tmp_path, caplog):
    model, path = write_run(tmp_path)
    (model / "chat_template.jinja").write_text(PLAIN)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"turns": turns}] * 30
    rows[0] = {"turns": turns[:1]}  # which has no answer
    rows[4] = rows[9] = {"turns": [{"role": "user", "content": "a" * 300}, turns[1]]}
    write_records(path, rows)
    write_records(tmp_path / "dev.jsonl", rows[:4])
    files = {"validation": str(tmp_path / "dev.jsonl"), "test": str(tmp_path / "dev.jsonl")}
    with pytest.raises(UserError, match=r"2 of 29 records cannot be used: row (5|10) of") as error:
        load_own(model, path, messages="turns", **files)
    assert "the conversation has 3" in str(error.value)
    data = load_own(model, path, messages="turns", skip_unusable=True, **files)
    assert (len(data.train), len(data.dev)) == (27, 3)
    assert "left out: 2 of 29 records cannot be used" in caplog.text
    assert {example.prompt for example in data.train.examples} == {"a"}


def test_two_runs_that_write_the_same_rows_at_once_do_not_meet(cache, tmp_path):
    def write(folder):
        rows = datasets.Dataset.from_dict({"a": [1, 2]})
        rows.map(lambda row: row, cache_file_name=str(folder / "rows.arrow"))

    def write_after_another(folder):
        shared_dataset("key", write)
        write(folder)

    assert shared_dataset("key", write_after_another)["a"][:] == [1, 2]
    assert shared_dataset("key", None)["a"][:] == [1, 2]
    assert [path.name for path in cache.iterdir()] == ["key"]
    assert left_over(tmp_path) == []
