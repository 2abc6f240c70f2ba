"""What a model, a recipe or a data set brings along is never executed: it would make a file."""

import json
import os
import pickle
import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml
from assets import REPOSITORY, change_json, write_recipe
from commands import assert_refused, lezo, run_forked, run_words

from lezo_ds.checkpoints.checkpoint import build_checked, resolve_model
from lezo_ds.config import config_from_dict, load_config
from lezo_ds.config.load import read_override
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


def training(inputs, *keys):
    places = [f"model.path={inputs / 'model'}", f"data.path={inputs / 'data'}"]
    return run_words(inputs / "recipe.yaml", inputs / "run", *places, "train.steps=1", *keys)


def make_code(directory, name, target):
    code = f"import pathlib\npathlib.Path({str(target)!r}).mkdir()\n"
    (directory / f"{name}.py").write_text(code)


def test_a_tag_in_yaml_makes_no_object(inputs, target):
    tagged = f"!!python/object/apply:os.mkdir [{target}]"
    recipe, evil = inputs / "recipe.yaml", inputs / "evil.yaml"
    evil.write_text(recipe.read_text() + f"seed: {tagged}\n")
    for path, keys in ((evil, []), (recipe, [f"seed={tagged}"])):
        with pytest.raises(UserError, match="python/object/apply"):
            load_config(path, keys)
    assert not target.exists()
    yaml.unsafe_load(tagged)
    assert target.exists()


def test_code_that_a_model_asks_for_is_refused(inputs, target):
    directory = inputs / "model"
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (directory / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    make_code(directory, "evil", target)
    assert_refused("train", training(inputs, "model.trust_remote_code=true"), "unknown key")
    assert_refused("train", training(inputs), str(directory))
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
        with pytest.raises(UserError, match=f"notes.txt is a link to {private}, out of the model"):
            resolve_model(str(model))
        (model / "notes.txt").unlink()
    os.mkfifo(model / "tokenizer_config.txt")
    with pytest.raises(UserError, match=r"tokenizer_config.txt is no regular file"):
        resolve_model(str(model))


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


def test_a_damaged_config_of_a_model_is_refused_in_one_line(inputs):
    config = inputs / "model" / "config.json"
    whole = config.read_text()
    for changes in (
        {"num_attention_heads": 0},
        {"ffn_dim": 2**62},
        {"num_hidden_layers": 10**6},
        {"attention_dropout": -1e-320},
        {"num_hidden_layers": "2"},
    ):
        config.write_text(whole)
        change_json(config, **changes)
        with pytest.raises(UserError, match=r"config\.json|OPTConfig is not that of a causal"):
            build_checked(resolve_model(str(inputs / "model")), "fp32")


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
        change_json(directory / file, auto_map=auto_map)
    lezo("train", *training(inputs))
    assert not target.exists()
    pickle.loads(pickle.dumps(Payload(target)))
    assert target.exists()
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
    lezo("train", *training(inputs))
    run_dir, file, exported = inputs / "run", inputs / "run.lezo", inputs / "exported"
    journal, recorded = run_dir / "journal.jsonl", run_dir / "config.yaml"
    header, records, _ = read_journal(journal)
    for section, values in EVIL.items():
        header.config[section] |= values
    header.config["deepspeed"] = str(inputs / "absent.json")
    journal.write_bytes(encode_journal(header, records))
    text = recorded.read_text().replace("objective: task", "objective: evil:loss")
    recorded.write_text(text)
    make_code(inputs, "evil", target)
    path = f"{REPOSITORY}{os.pathsep}{inputs}"
    model = f"model.path={inputs / 'model'}"
    last = ["--run", run_dir, "--step", "last"]
    whole = [*last, "--out", exported, model]
    assert_refused("export", whole, "absent.json")
    from_file = ["--journal", file, "--step", "last", "--out", inputs / "from_file", model]
    for name, words in (
        ("report", [run_dir]),
        ("export", [*whole, "deepspeed=null"]),
        ("export", ["--run", run_dir, "--journal", file]),
        ("export", from_file),
    ):
        lezo(name, *words, PYTHONPATH=path)
    score = [*last, "--json", model, "deepspeed=null", f"data.path={inputs / 'data'}"]
    assert '"data.task": "evil:X"' in (exported / "lezo_manifest.json").read_text()
    label = ["--model", exported, inputs / "data" / "validation.jsonl", "--out", inputs / "l.jsonl"]
    for name, words in (("evaluate", score), ("predict", label)):
        assert_refused(name, words, "imported only if the command names it", PYTHONPATH=path)
    monkeypatch.syspath_prepend(inputs)
    header.config["zo"]["law"] = "evil:LAW"
    journal.write_bytes(encode_journal(header, records))
    given = [model, "deepspeed=null"]
    reads = (lambda: read_file(journal, [model]), lambda: restore(read_run(run_dir, given), 1))
    for read in reads:
        with pytest.raises(UserError, match=r"zo\.law=evil:LAW of the run is in a module"):
            read()
    assert not target.exists()
    named = ["data.task=evil:X", "data.metric=evil:X", "train.objective=evil:loss"]
    # The module has no task.
    assert run_forked([*score, *named], program="evaluate", PYTHONPATH=path).code == 2
    assert target.exists()


NAMED = [f"{key}=evil:X" for key in ("data.task", "data.metric", "train.objective")]


@pytest.mark.parametrize("word", [*NAMED, "train.objective={evil:X: 1}"])
def test_scoring_refuses_each_module_that_only_the_run_names(word, source, tmp_path):
    values = yaml.safe_load((source / "recipe.yaml").read_text()) | {"run_dir": "run"}
    opened = Opened({}, config_from_dict(values, "run", [word]), lambda: None, [], "LeZO")
    for act in (partial(score, split="test"), partial(fit_head, target=tmp_path / "fitted")):
        with pytest.raises(UserError, match="imported only if the command names it") as caught:
            act(opened)
        (fix,) = shlex.split(str(caught.value).rpartition(" add ")[2])
        assert read_override(fix) == read_override(word)
    for named in ([word], None):  # by a command, or a recipe
        opened._replace(named=named).refuse_code(word.partition("=")[0])


ESCAPE = "x\x1b]0;title\x07\x1b[A\r\u202ey"


def test_what_a_run_says_reaches_the_terminal_without_commands_and_pipes_are_not_read(inputs):
    lezo("train", *training(inputs))
    run_dir = inputs / "run"
    change_json(run_dir / "snapshots" / "step-00000001" / "lezo_manifest.json", files={ESCAPE: {}})
    words = ["--run", run_dir, "--step", "last", "--out", inputs / "exported"]
    shown = [lezo("export", *words).err]
    results = change_json(run_dir / "results.json", metric=ESCAPE)
    shown.append(lezo("report", run_dir).out)
    for change in ({"steps": True}, {"best_step": "4"}, {"weights_digest": ["d"]}):
        (inputs / "wrong.json").write_text(json.dumps(results | change))
        assert RunResults.read(inputs / "wrong.json") is None
    header, records, _ = read_journal(run_dir / "journal.jsonl")
    header.libraries[ESCAPE] = "1.0"
    (run_dir / "journal.jsonl").write_bytes(encode_journal(header, records))
    shown.append(lezo("train", *training(inputs)).err)
    with (run_dir / "config.yaml").open("a") as file:
        file.write(f"{json.dumps(ESCAPE)}: 1\n")
    shown.append(run_forked([run_dir], program="report").err)
    for text in shown:
        assert "x?]0;title" in text
        assert not re.search("[\x1b\x07\u202e]", text)
    for name in ("metrics.jsonl", "config.yaml"):
        (run_dir / name).unlink()
        os.mkfifo(run_dir / name)
        assert_refused("report", [run_dir], "none of these directories holds a run")


def test_the_page_names_every_key_that_imports_a_module():
    page = (REPOSITORY / "SECURITY.md").read_text()
    named = page.partition("of these keys imports the module")[2].partition(". `train`")[0]
    assert set(re.findall(r"`(\w+\.\w+)`", named)) == set(map(".".join, CODE_KEYS))
