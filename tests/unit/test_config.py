"""Configurations: recipes and overrides are read strictly, and a wrong one is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections import Counter

import pytest
import yaml
from assets import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st

from lezo_ds.config import (
    RESUME_MAY_DIFFER,
    ZoConfig,
    check_world,
    config_from_dict,
    config_to_dict,
    copies_per_pass,
    load_config,
    num_passes,
)
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.config.paper import LEARNING_RATES, PAPER_SCORES
from lezo_ds.config.paths import PATH_KEYS, resolve_paths
from lezo_ds.config.schema import READER
from lezo_ds.errors import UserError

RECIPES = sorted((REPOSITORY / "launch" / "recipes").glob("*.yaml"))
REQUIRED = {
    "run_dir": "runs/x",
    "model": {"path": "facebook/opt-1.3b", "dtype": "bf16"},
    "zo": {"learning_rate": 1e-6, "sparsity": 0.75},
    "train": {"steps": 100, "eval_every": 10},
}
BARE = {"run_dir": "r", "model": REQUIRED["model"]}


def config_with(*overrides):
    return config_from_dict(REQUIRED, "recipe.yaml", overrides)


def message_of(*overrides, values=REQUIRED):
    with pytest.raises(UserError) as caught:
        config_from_dict(values, "recipe.yaml", overrides)
    message = str(caught.value)
    assert "\n" not in message and re.search(r"; fix: \S", message), message
    return message


# Recipes and overrides.


def test_overrides_change_a_recipe_and_the_last_of_a_key_counts(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("zo.lr_schedule: linear\nadamw:\n" + yaml.safe_dump(REQUIRED))
    config = load_config(path, ["train.steps=5", "zo.sparsity=0.5", "train.steps=7", "seed=4"])
    assert (config.train.steps, config.zo.sparsity, config.seed) == (7, 0.5, 4)
    assert (config.train.eval_every, config.zo.lr_schedule) == (10, "linear")


def test_overrides_alone_make_a_configuration():
    overrides = "run_dir=r model.path=m model.dtype=fp32 zo.learning_rate=0 zo.sparsity=0 train.steps=1"
    config = load_config(None, overrides.split())
    assert config.zo == ZoConfig(learning_rate=0.0, sparsity=0.0)
    assert isinstance(config.zo.learning_rate, float)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("zo.learning_rate=1e-6", 1e-6),
        ("zo.learning_rate=+1.E-6", 1e-6),
        ("zo.learning_rate=1", 1.0),
        ("run_dir=1e6", "1e6"),
        ("run_dir=runs/lr=1", "runs/lr=1"),
        ("model.path='2024'", "2024"),
        ("data.path=null", None),
        ("data.task=SST2", "sst2"),
        ("data.task=mine.tasks:REVIEWS", "mine.tasks:REVIEWS"),  # its module is imported when data is read
        ("zo.estimator=One-Sided", "one-sided"),
        ("train.report_to=csv, wandb", ["csv", "wandb"]),
        ("generation.stop=a, b", ["a, b"]),
        ('generation.stop=["\\n", x]', ["\n", "x"]),
    ],
)
def test_a_value_is_read_as_its_key_needs_it(override, value):
    section, _, name = override.partition("=")[0].rpartition(".")
    config = config_with(override)
    found = getattr(getattr(config, section) if section else config, name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{text} It is #1, [a] ", "{text} It is #1, [a] "),
        ("'{text}: '", "{text}: "),
        ('"Really" {text}', '"Really" {text}'),
        ('"{text}\\nIt is"', "{text}\nIt is"),
        ("{text}\nIt is", "{text}\nIt is"),
    ],
)
def test_a_string_on_the_command_line_needs_no_quotes_but_those_of_the_shell(text, expected):
    data = config_with(
        "data.train=t.csv", "data.labels=a, 7", "data.label_field=c", f"data.prompt={text}"
    ).data
    assert (data.prompt, data.task, data.labels) == (expected, "custom", ["a", "7"])


# Refusals.


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sede=1", "unknown key sede in recipe.yaml and the command line; fix: did you mean seed?"),
        ("zo.sparcity=0.5", "did you mean zo.sparsity?"),
        ("trian.steps=5", "did you mean train.steps?"),
        ("train.learning_rate=1", "did you mean zo.learning_rate or adamw.learning_rate?"),
        ("xyzzy=1", "lezo-ds train --help lists the keys"),
        ("train=5", "train in recipe.yaml and the command line is a section"),
        ("train.steps.more=5", "did you mean train.steps?"),
        (
            "zo.sparsity=1.5",
            "zo.sparsity=1.5 in recipe.yaml and the command line is not a number from 0 to 1 or",
        ),
        ("zo.sparsity=true", "zo.sparsity=true"),
        ("zo.learning_rate=-1", "is not a number of at least 0"),
        ("zo.learning_rate=.inf", "zo.learning_rate=Infinity"),
        ("zo.learning_rate=fast", 'zo.learning_rate="fast"'),
        ("zo.perturbation_scale=0", "is not a number above 0"),
        ("zo.update_precision=fp32_mister", "did you mean fp32_master?"),
        (
            "zo.estimator=both",
            "is not one of spsa, one-sided, fzoo, evolution-strategies, package.module:name",
        ),
        ("train.steps=0", "is not an integer above 0"),
        ("train.steps=10.0", "train.steps=10.0"),
        ("train.report_to=csv,wandbb", "did you mean wandb?"),
        ("data.task=SST3", "did you mean sst2?"),
        ("data.labels=[yes, no]", 'fix: write it in quotes: "yes"'),
        ("run_dir=null", "is not a string"),
        ("seed=-1", "is not an integer from 0 to 18446744073709551615"),
        ("steps", "is not of the form key=value"),
        ("train..steps=5", "is not of the form key=value"),
        ("seed=@", "is not YAML"),
        ("data.prompt={text}\\nIt is", "has a backslash and an n"),
        ("zo.learning_rate=null", "method=lezo needs zo.learning_rate"),
        ("zo.warmup_steps=100", "zo.warmup_steps=100 is not below train.steps=100"),
        ("zo.estimator_options.x=1", "zo.estimator_options.x=1 is no option of Spsa"),
        ("data.test=t.csv", "need data.train"),
        ("generation.stop=[a, '']", "generation.stop has an empty string"),
        ("generation.num_samples=2", "need a temperature"),
        ("partition_size=0", "is not an integer above 0"),
    ],
)
def test_a_wrong_override_is_refused(override, expected):
    assert expected in message_of(override)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["zo.layer_policy=fixed", "zo.layer_policy_options.blocks=3"], "blocks=3 is no option of Fixed"),
        (
            ["zo.layer_policy=fixed", "zo.layer_policy_options.block=3"],
            "its options and their defaults: blocks=''",
        ),
        (["zo.estimator=fzoo", "zo.directions=2"], "set zo.directions=8"),
        (["data.prompt={a}", "data.task=sst2"], "data.prompt cannot change data.task=sst2"),
        (["data.prompt={a}", "data.completion={b}"], "a task of your own needs data.train"),
        (["data.prompt={a}", "data.train=t.csv"], "reward"),
        (["data.train=a.csv", "data.path=b"], "both say where the data is"),
        (["method=icl", "data.messages=turns", "data.train=t"], "shows no examples in a chat template"),
        (["method=adamw", "train.steps=null"], "method=adamw needs train.steps"),
    ],
)
def test_values_that_contradict_each_other_are_refused(overrides, expected):
    assert expected in message_of(*overrides)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {steps: 1}\nzo: {sparsity: 0}\ntrain: {eval_every: 1}", "repeated key train"),
        ("train: {steps: 1, steps: 2}", "repeated key steps"),
        ("a: b: c", "is not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("seed: " + "[" * 5000, "is not valid YAML: RecursionError"),
        ("run_dir: 2001-99-99", "is not valid YAML: ValueError"),
        ("", "holds no keys"),
        ("- seed", "holds no keys"),
        (
            "run_dir: 5\nmodel: {path: m, dtype: fp32}",
            'run_dir=5 in {path} is not a string; fix: write it in quotes: "5"',
        ),
        ("seed: 1", "missing in {path}: run_dir (a string), model.path (a string), model.dtype (one of"),
        (None, "cannot read the recipe"),
    ],
)
def test_a_broken_recipe_is_refused_by_its_name(text, expected, tmp_path):
    path = tmp_path / "broken.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert expected.format(path=path) in str(caught.value)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000


# Plain dicts and help.


@given(
    learning_rate=st.floats(0, 1),
    sparsity=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    num_train=st.none() | st.integers(1, 10**6),
    labels=st.dictionaries(st.text(min_size=1), st.text(min_size=1), min_size=2),
)
def test_a_config_survives_dicts_yaml_and_json(learning_rate, sparsity, seed, num_train, labels):
    data = {"num_train": num_train, "labels": labels, "train": "t.csv", "prompt": "{a} b", "label_field": "c"}
    values = REQUIRED | {
        "zo": {"learning_rate": learning_rate, "sparsity": sparsity},
        "seed": seed,
        "data": data,
    }
    config = config_from_dict(values, "test", recorded=True)
    assert (config.zo.learning_rate, config.seed, config.data.labels) == (learning_rate, seed, labels)
    for text, load in (
        (yaml.safe_dump(config_to_dict(config)), yaml.safe_load),
        (json.dumps(values), json.loads),
    ):
        assert config_from_dict(load(text), "text", recorded=True) == config


def test_a_config_is_frozen_and_checked_wherever_it_is_made():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_with().zo.sparsity = 0.0
    with pytest.raises(ValueError, match="less than or equal to 1"):
        ZoConfig(sparsity=2.0)


def test_what_a_run_recorded_names_code_that_is_not_imported():
    values = config_to_dict(config_with())
    values["zo"] |= {"estimator": "nowhere:Estimator", "estimator_options": {"x": 1}}
    values["data"] |= {"task": "nowhere:TASK", "path": "../$UNSET/~"}
    config = config_from_dict(values, "run x", ["train.eval_batch_size=3"], recorded=True)
    assert (config.zo.estimator, config.data.path) == ("nowhere:Estimator", "../$UNSET/~")
    with pytest.raises(UserError, match=r"zo.estimator=nowhere:Estimator does not name"):
        config_from_dict(values | {"data": {}}, "recipe.yaml")


def test_options_have_the_defaults_of_their_component():
    assert config_with("zo.layer_policy=fixed").zo.layer_policy_options == {"blocks": ""}
    assert config_with(
        "zo.layer_policy=fixed", "zo.layer_policy_options.blocks='1'"
    ).zo.layer_policy_options == {"blocks": "1"}


def test_the_help_describes_every_key():
    blocks = dict(re.findall(r"^(\S+): (.+\n(?: .+\n?)+)", READER.describe(), re.MULTILINE))
    sections = {k: v for k, v in config_to_dict(config_with()).items() if isinstance(v, dict)}
    keys = {f"{section}.{name}" for section, values in sections.items() for name in values}
    assert blocks.keys() == keys | config_to_dict(config_with()).keys() - sections.keys()
    assert blocks["zo.perturbation_scale"].startswith("a number above 0; default 0.001\n    Perturbation")
    assert blocks["model.path"].startswith("a string; required\n")
    assert all(len(line) <= 100 for line in READER.describe().splitlines())
    assert {"run_dir", "train.steps", "deepspeed"} <= RESUME_MAY_DIFFER <= blocks.keys()


# Steps and ranks.


def test_passes_and_copies_are_those_of_the_estimator():
    config = config_with("zo.directions=4", "zo.probes_per_pass=4", "train.micro_batch_size=8")
    assert (num_passes(config), copies_per_pass(config)) == (4, 4)
    assert copies_per_pass(config_with("method=adamw")) == 1


@pytest.mark.parametrize(
    ("world_size", "fix"),
    [
        (2, "set train.micro_batch_size to one of 1, 2, 4, 8"),
        (8, "set train.micro_batch_size to one of 1, 2"),
        (3, "set train.batch_size=18 train.micro_batch_size=6, or use fewer ranks"),
        (32, "set train.batch_size=32 train.micro_batch_size=1, or use fewer ranks"),
    ],
)
def test_a_batch_that_the_ranks_do_not_divide_is_refused_and_the_fix_works(world_size, fix):
    with pytest.raises(UserError, match=f"fix: {fix}"):
        check_world(config_with(), world_size)
    sizes = [int(size) for size in re.findall(r"\d+", fix)]
    batch, micros = (sizes[0], sizes[1:]) if "batch_size=" in fix else (16, sizes)
    for micro in micros:
        check_world(config_with(f"train.batch_size={batch}", f"train.micro_batch_size={micro}"), world_size)


# Paths.


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/people/ann")
    monkeypatch.setenv("DATA", "/data/ann")
    monkeypatch.delenv("UNSET", raising=False)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.csv").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("path", "in_recipe", "on_command_line"),
    [
        ("./mine.csv", "{here}/recipes/mine.csv", "{here}/mine.csv"),
        ("../models/tiny", "{here}/models/tiny", "{parent}/models/tiny"),
        ("mine.csv", "{here}/recipes/mine.csv", "mine.csv"),
        ("facebook/opt-13b", "facebook/opt-13b", "facebook/opt-13b"),
        ("owner/name:train", "owner/name:train", "owner/name:train"),
        ("..", "{here}", "{parent}"),
        ("~/x", "/people/ann/x", "/people/ann/x"),
        ("${DATA}x/$HOME", "/data/annx//people/ann", "/data/annx//people/ann"),
    ],
)
def test_a_path_is_relative_to_the_recipe_if_it_says_so_or_exists_there(
    path, in_recipe, on_command_line, folders
):
    places = {"here": folders, "parent": folders.parent}
    for key in PATH_KEYS:
        if key == "run_dir" and path == "mine.csv":
            in_recipe = "mine.csv"  # it is written, and need not exist
        assert resolve_paths({key: path}, folders / "recipes") == {key: in_recipe.format(**places)}
        assert resolve_paths({key: path}, None) == {key: on_command_line.format(**places)}
        in_recipe = "{here}/recipes/mine.csv" if path == "mine.csv" else in_recipe


def test_only_paths_are_expanded_and_a_variable_must_be_set(folders):
    assert resolve_paths({"data.prompt": "./{text} costs $UNSET ~", "data.train": None}, None) == {
        "data.prompt": "./{text} costs $UNSET ~",
        "data.train": None,
    }
    assert "data.path=$UNSET/x names an environment variable that is not set" in message_of(
        "data.path=$UNSET/x"
    )


# Shipped recipes, and those of the paper's tables.


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_valid_and_found_by_its_name_from_any_folder(path, tmp_path, monkeypatch):
    overrides = ["train.objective=a:b", "data.metric=null"] if path.stem == "keywords" else []
    monkeypatch.chdir(tmp_path)
    config = load_config(path.stem, overrides)
    assert config == load_config(path, overrides)
    load_ds_config(config.deepspeed, config.model.dtype, 1, config.train.micro_batch_size)
    with pytest.raises(UserError, match=r"is neither a file nor one of paper, .*did you mean demo"):
        load_config("demoo")


def paper(model, task, method, peft="none", *overrides):
    return load_config(
        "paper", [f"model={model}", f"task={task}", f"method={method}", f"peft={peft}", *overrides]
    )


def test_every_cell_of_the_papers_tables_is_a_recipe_and_each_average_is_the_printed_one():
    assert Counter((cell.model, cell.peft) for cell in PAPER_SCORES) == {
        ("opt-1.3b", "none"): 11 * 4,
        ("opt-13b", "none"): 8 * 5,
        ("opt-13b", "lora"): 5 * 2,
        ("opt-13b", "prefix"): 5 * 2,
        ("opt-30b", "none"): 2 * 4,
    }
    for cell in PAPER_SCORES:
        config = paper(*cell)
        assert (config.model.path, config.data.task) == (f"facebook/{cell.model}", cell.task)
        assert (config.method, config.peft.kind) == (cell.method.replace("mezo", "lezo"), cell.peft)
        assert (config.data.protocol, cell.method in ("lezo", "mezo")) == ("mezo", config.method == "lezo")
    printed = {"zero_shot": 55.4, "icl": 65.7, "adamw": 77.7, "mezo": 74.2, "lezo": 75.4}
    for method, average in printed.items():
        cells = [
            cell
            for cell in PAPER_SCORES
            if (cell.model, cell.method, cell.peft) == ("opt-13b", method, "none")
        ]
        assert statistics.mean(PAPER_SCORES[cell].mean for cell in cells) == pytest.approx(
            average, abs=0.0501
        )


@pytest.mark.parametrize(
    ("cell", "rate", "scale", "sparsity"),
    [
        (("opt-1.3b", "sst2", "lezo"), 3e-6, 1e-3, 0.75),
        (("opt-30b", "boolq", "lezo"), 1e-6, 1e-3, 0.75),
        (("opt-13b", "rte", "mezo"), 1e-6, 1e-3, 0),
        (("opt-13b", "squad", "lezo", "prefix"), 3e-2, 1e-1, 0.75),
        (("opt-13b", "squad", "mezo", "prefix"), 5e-2, 1e-1, 0),
        (("opt-13b", "cb", "lezo", "lora"), 3e-5, 1e-2, 0.5),
        (("opt-13b", "cb", "mezo", "lora"), 1e-4, 1e-2, 0),
    ],
)
def test_a_recipe_of_the_paper_has_its_hyperparameters(cell, rate, scale, sparsity):
    config = paper(*cell)
    assert (config.zo.learning_rate, config.zo.perturbation_scale, config.zo.sparsity) == (
        rate,
        scale,
        sparsity,
    )
    assert (config.train.steps, config.train.eval_every, config.train.batch_size) == (20_000, 2_000, 16)
    check_world(config, 1 if cell[0] == "opt-1.3b" else 2)


def test_the_papers_other_recipes_and_overrides():
    adamw = paper("opt-13b", "cb", "adamw", "none", "adamw.learning_rate=5e-5")
    assert (adamw.adamw.learning_rate, adamw.train.steps, adamw.model.dtype) == (5e-5, 93, "bf16")
    assert LEARNING_RATES["adamw", "none"][""] == (1e-5, 5e-5, 8e-5)
    assert [paper("opt-30b", task, "lezo").zo.update_precision for task in ("sst2", "boolq")] == [
        "stochastic",
        "fp32_master",
    ]
    with pytest.raises(UserError, match="their nearest cell is opt-13b sst2 lezo none"):
        paper("opt-13b", "sst2", "lizo")
    with pytest.raises(UserError, match="needs method, task"):
        load_config("paper", ["model=opt-13b"])
