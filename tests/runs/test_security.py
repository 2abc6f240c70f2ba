"""What a model, a recipe or a data set brings along is never executed, through the real command.

Each payload, run as its format's unsafe reader would run it, makes a file; so it would be seen.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from assets import REPOSITORY, write_recipe
from commands import assert_one_error, run_forked, run_forked_well
from safetensors.torch import load_file

from lezo_ds.checkpoints.checkpoint import build_checked, resolve_model
from lezo_ds.config import config_from_dict
from lezo_ds.errors import UserError
from lezo_ds.journal import encode_journal, read_journal
from lezo_ds.runs.export import read_file
from lezo_ds.runs.fit_head import fit_head
from lezo_ds.runs.opening import Opened, restore, score
from lezo_ds.runs.records import CODE_KEYS, read_run
from lezo_ds.runs.results import RunResults


class Payload:
    """Unpickling it makes a directory."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.mkdir, (self.target,)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("source")).parent


@pytest.fixture
def inputs(source, tmp_path):
    """A model, data and a recipe, to be spoilt."""
    return shutil.copytree(source, tmp_path / "inputs")


@pytest.fixture
def target(tmp_path):
    """What a payload that was executed has made."""
    return tmp_path / "executed"


def train(inputs, *overrides, recipe=None):
    places = {"model.path": "model", "data.path": "data", "run_dir": "run"}
    own = [f"{key}={inputs / name}" for key, name in places.items()]
    words = ["--config", recipe or inputs / "recipe.yaml", *own, "train.steps=1", *overrides]
    return run_forked(words)


def make_code(directory, name, target):
    code = f"import pathlib\npathlib.Path({str(target)!r}).mkdir()\n"
    (directory / f"{name}.py").write_text(code)


def test_a_pickle_in_place_of_weights_runs_no_code_and_is_refused(inputs, target):
    weights = inputs / "model" / "model.safetensors"
    tensors = {**load_file(weights), "extra": Payload(target)}
    torch.save(tensors, weights.with_name("pytorch_model.bin"))
    weights.unlink()
    assert_one_error(train(inputs), 2, "cannot be read in slices without running its code")
    assert not target.exists()
    pickle.loads(pickle.dumps(Payload(target)))
    assert target.exists()


def test_a_tag_in_yaml_makes_no_object(inputs, target):
    tagged = f"!!python/object/apply:os.mkdir [{target}]"
    recipe = inputs / "evil.yaml"
    recipe.write_text((inputs / "recipe.yaml").read_text() + f"seed: {tagged}\n")
    for refused in (train(inputs, recipe=recipe), train(inputs, f"seed={tagged}")):
        assert_one_error(refused, 2, "python/object/apply")
    assert not target.exists()
    yaml.unsafe_load(tagged)
    assert target.exists()


def test_code_that_a_model_asks_for_is_refused(inputs, target):
    directory = inputs / "model"
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (directory / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    make_code(directory, "evil", target)
    assert train(inputs, "model.trust_remote_code=true").code == 2
    assert_one_error(train(inputs), 2, str(directory))
    assert not target.exists()


def test_a_model_has_neither_links_to_files_elsewhere_nor_pipes(inputs, tmp_path):
    model = inputs / "model"
    private = tmp_path / "private.txt"
    private.write_text("secret")
    (model / "inner.txt").symlink_to("config.json")
    (model / "nothing.txt").symlink_to("nothing.txt")
    assert resolve_model(str(model)) == model
    (tmp_path / "way").symlink_to(private)
    for target in (private, Path("..") / ".." / "way"):
        (model / "notes.txt").symlink_to(target)
        refused = train(inputs)
        assert_one_error(refused, 2, f"notes.txt is a link to {private}, out of the model's")
        (model / "notes.txt").unlink()
    os.mkfifo(model / "tokenizer_config.txt")
    assert_one_error(train(inputs), 2, "tokenizer_config.txt is no regular file")


def test_a_model_in_the_cache_of_the_hub_may_have_links_to_its_blobs(inputs, tmp_path):
    cache = tmp_path / "models--owner--name"
    revision = cache / "snapshots" / "0123"
    revision.mkdir(parents=True)
    shutil.move(inputs / "model", cache / "blobs")
    for blob in (cache / "blobs").iterdir():
        (revision / blob.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    assert resolve_model(str(revision)) == revision
    (cache / "blobs" / "config.json").unlink()
    (cache / "blobs" / "config.json").symlink_to(inputs / "recipe.yaml")
    with pytest.raises(UserError, match=r"is a link to .*recipe\.yaml"):
        resolve_model(str(revision))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"ffn_dim": 2**62},
        {"num_hidden_layers": 10**6},
        {"attention_dropout": -1e-320},
        {"num_hidden_layers": "2"},
    ],
)
def test_a_damaged_config_of_a_model_is_refused_in_one_line(changes, inputs):
    path = inputs / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=r"config\.json|OPTConfig is not that of a causal"):
        build_checked(resolve_model(str(path.parent)), "fp32")


def test_code_and_pickles_beside_a_model_and_the_data_are_not_run(inputs, target):
    directory = inputs / "model"
    make_code(directory, "evil", target)
    for name in ("data", "sst2"):
        make_code(inputs / "data", name, target)
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(target)))
    added = {
        "config.json": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["evil.Slow", "evil.Fast"]},
    }
    for file, auto_map in added.items():
        values = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps({**values, "auto_map": auto_map}))
    finished = train(inputs)
    assert finished.code == 0, finished.err[-5000:]
    assert not target.exists()
    assert not list((inputs / "run").rglob("*.py"))
    for name in ("config.yaml", "journal.jsonl"):
        assert str(inputs / "model") in (inputs / "run" / name).read_text()


EVIL = {
    "data": {"task": "evil:X", "metric": "evil:X", "path": "absent"},
    "train": {"objective": "evil:loss", "report_to": ["wandb"]},
    "zo": {"estimator": "evil:X", "layer_policy": "evil:X"},
    "model": {"path": "absent"},
}


def test_the_module_that_an_untrusted_run_names_is_not_imported(inputs, target, monkeypatch):
    assert train(inputs).code == 0
    run_dir, journal, file = inputs / "run", inputs / "run" / "journal.jsonl", inputs / "run.lezo"
    header, records, _ = read_journal(journal)
    for section, values in EVIL.items():
        header.config[section] |= values
    header.config["deepspeed"] = str(inputs / "absent.json")
    journal.write_bytes(encode_journal(header, records))
    recorded = (run_dir / "config.yaml").read_text()
    recorded = recorded.replace("objective: task", "objective: evil:loss")
    (run_dir / "config.yaml").write_text(recorded)
    make_code(inputs, "evil", target)
    path = f"{REPOSITORY}{os.pathsep}{inputs}"
    model = f"model.path={inputs / 'model'}"
    given = [model, "deepspeed=null"]
    last = ["--run", run_dir, "--step", "last"]
    exported = ["--out", inputs / "exported"]
    assert_one_error(run_forked([*last, *exported, model], program="export"), 2, "absent.json")
    from_file = ["--journal", file, "--step", "last", "--out", inputs / "from_file", model]
    for program, arguments in (
        ("report", [run_dir]),
        ("export", [*last, *exported, *given]),
        ("export", ["--run", run_dir, "--journal", file]),
        ("export", from_file),
    ):
        run_forked_well(arguments, program=program, PYTHONPATH=path)
    score = [*last, "--json", *given, f"data.path={inputs / 'data'}"]
    manifest = inputs / "exported" / "lezo_manifest.json"
    assert '"data.task": "evil:X"' in manifest.read_text()
    label = ["--model", inputs / "exported", inputs / "data" / "validation.jsonl"]
    label += ["--out", inputs / "l.jsonl"]
    for program, words in (("evaluate", score), ("predict", label)):
        refused = run_forked(words, program=program, PYTHONPATH=path)
        assert_one_error(refused, 2, "imported only if the command names it")
    monkeypatch.syspath_prepend(inputs)
    header.config["zo"]["law"] = "evil:LAW"
    journal.write_bytes(encode_journal(header, records))
    reads = (lambda: read_file(journal, [model]), lambda: restore(read_run(run_dir, given), 1))
    for read in reads:
        with pytest.raises(UserError, match=r"zo\.law=evil:LAW of the run is in a module"):
            read()
    assert not target.exists()
    named = ["data.task=evil:X", "data.metric=evil:X", "train.objective=evil:loss"]
    # The module has no task.
    assert run_forked([*score, *named], program="evaluate", PYTHONPATH=path).code == 2
    assert target.exists()


@pytest.mark.parametrize("key", ["data.task", "data.metric", "train.objective"])
def test_scoring_refuses_each_module_that_only_the_run_names(key, source, tmp_path):
    values = yaml.safe_load((source / "recipe.yaml").read_text()) | {"run_dir": "run"}
    opened = Opened({}, config_from_dict(values, "run", [f"{key}=evil:X"]), lambda: None, [])
    for act in (partial(score, split="test"), partial(fit_head, target=tmp_path / "fitted")):
        with pytest.raises(UserError, match="imported only if the command names it"):
            act(opened)
    for named in ([f"{key}=evil:X"], None):  # by a command, or a recipe
        opened._replace(named=named).refuse_code(key)


ESCAPE = "x\x1b]0;title\x07\x1b[A\r\u202ey"


def test_what_a_run_says_reaches_the_terminal_without_commands_and_pipes_are_not_read(inputs):
    assert train(inputs).code == 0
    run_dir = inputs / "run"
    manifest = run_dir / "snapshots" / "step-00000001" / "lezo_manifest.json"
    facts = json.loads(manifest.read_text()) | {"files": {ESCAPE: {}}}
    manifest.write_text(json.dumps(facts))
    words = ["--run", run_dir, "--step", "last", "--out", inputs / "exported"]
    exported = run_forked_well(words, program="export")
    results = json.loads((run_dir / "results.json").read_text())
    (run_dir / "results.json").write_text(json.dumps(results | {"metric": ESCAPE}))
    table = run_forked_well([run_dir], program="report")
    for change in ({"steps": True}, {"best_step": "4"}, {"weights_digest": ["d"]}):
        (inputs / "wrong.json").write_text(json.dumps(results | change))
        assert RunResults.read(inputs / "wrong.json") is None
    header, records, _ = read_journal(run_dir / "journal.jsonl")
    header.libraries[ESCAPE] = "1.0"
    (run_dir / "journal.jsonl").write_bytes(encode_journal(header, records))
    resumed = train(inputs)
    with (run_dir / "config.yaml").open("a") as file:
        file.write(f"{json.dumps(ESCAPE)}: 1\n")
    refused = run_forked([run_dir], program="report")
    for text in (exported.err, table.out, resumed.err, refused.err):
        assert "x?]0;title" in text
        assert not re.search("[\x1b\x07\u202e]", text)
    for name in ("metrics.jsonl", "config.yaml"):
        (run_dir / name).unlink()
        os.mkfifo(run_dir / name)
        refused = run_forked([run_dir], program="report")
        assert_one_error(refused, 2, "none of these directories holds a run")


def test_the_page_names_every_key_that_imports_a_module():
    page = (REPOSITORY / "SECURITY.md").read_text()
    named = page.partition("of these keys imports the module")[2].partition(". `train`")[0]
    assert set(re.findall(r"`(\w+\.\w+)`", named)) == set(map(".".join, CODE_KEYS))
