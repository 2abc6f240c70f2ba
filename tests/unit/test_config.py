"""Configurations: recipes and overrides are read strictly, and a wrong one is refused in one
line."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import yaml
from assets import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st

from lezo_ds.config import (
    check_world,
    config_from_dict,
    config_to_dict,
    copies_per_pass,
    dump_yaml,
    eval_every,
    load_config,
    load_yaml,
    num_passes,
    probes_per_pass,
    with_steps,
)
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.config.paper import PAPER_SCORES
from lezo_ds.config.paths import PATH_KEYS, resolve_paths
from lezo_ds.config.schema import READER
from lezo_ds.config.yaml_text import inline_yaml
from lezo_ds.errors import UserError

RECIPES = sorted((REPOSITORY / "launch" / "recipes").glob("*.yaml"))
REQUIRED = {
    "run_dir": "runs/x",
    "model": {"path": "facebook/opt-1.3b", "dtype": "bf16"},
    "zo": {"learning_rate": 1e-6, "sparsity": 0.75},
    "train": {"steps": 100, "eval_every": 10},
}


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


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("zo.learning_rate=1e-6", 1e-6),
        ("zo.learning_rate=+1.E-6", 1e-6),
        ("run_dir=1e6", "1e6"),
        ("run_dir=runs/lr=1", "runs/lr=1"),
        ("data.task=SST2", "sst2"),
        (
            "data.task=mine.tasks:REVIEWS",
            "mine.tasks:REVIEWS",
        ),  # its module is imported when data is read
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
        ("'{text}: '", "{text}: "),
        ('"Really" {text}', '"Really" {text}'),
        ('"{text}\\nIt is"', "{text}\nIt is"),
        ("{text}\nIt is", "{text}\nIt is"),
    ],
)
def test_a_string_on_the_command_line_needs_no_quotes_but_those_of_the_shell(text, expected):
    keys = ("data.train=t.csv", "data.labels=a, 7", "data.label_field=c", f"data.prompt={text}")
    data = config_with(*keys).data
    assert (data.prompt, data.task, data.labels) == (expected, "custom", ["a", "7"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("On", "On"),
        ("1:30", "1:30"),
        ("true", True),
        ("~", None),
        ("1e-3", 1e-3),
        ("+1.E-6", 1e-6),
        ("0o17", 15),
        ("017", 17),
        ("1_000", 1000),
    ],
)
def test_yaml_is_of_version_1_2(text, value):
    """In YAML 1.1, no is false, 1:30 is 90, 1e-3 is a string, and 017 is 15."""
    found = load_yaml(text)
    assert (found, type(found)) == (value, type(value))


OWN_TASK = """
run_dir: 2024-11-26
model: {{path: 7, dtype: fp32}}
method: zero_shot
data:
  prompt: {prompt}
  train: t.csv
  label_field: 0123
  {key}: {value}
"""


def own_task(folder, prompt="{text}", key="labels", value="[a, b]"):
    path = folder / "recipe.yaml"
    path.write_text(OWN_TASK.format(prompt=prompt, key=key, value=value))
    return load_config(path)


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("labels", "[yes, no]", ["yes", "no"]),
        ("labels", "[true, 1e3, 0123, 2024-01-01]", ["true", "1e3", "0123", "2024-01-01"]),
        ("labels", "[null, ~, 1.50]", ["null", "~", "1.50"]),
        ("labels", "{0: negative, 01: null}", {"0": "negative", "01": "null"}),
        ("labels", "{True: yes, False: 1.0}", {"True": "yes", "False": "1.0"}),
        ("choices", "[{a}, {b.c}]", ["{a}", "{b.c}"]),
        ("choices", "{options}", ["{options}"]),
    ],
)
def test_what_a_key_for_texts_takes_is_read_as_it_is_written(key, value, meant, tmp_path):
    recipe = own_task(tmp_path, key=key, value=value)
    keys = ("data.train=t.csv", "data.prompt={text}", "data.label_field=c", f"data.{key}={value}")
    for config in (recipe, config_with(*keys)):
        assert getattr(config.data, key) == meant
    found = (recipe.run_dir, recipe.model.path, recipe.data.prompt, recipe.data.label_field)
    assert found == ("2024-11-26", "7", "{text}", "0123")


def test_an_option_that_takes_a_text_takes_a_number():
    keys = ("zo.layer_policy=fixed", "zo.layer_policy_options.blocks=1")
    assert config_with(*keys).zo.layer_policy_options == {"blocks": "1"}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (r"'{text}\nLabel:'", "line 6: a text has a backslash and an n, .* double quotes; fix: "),
        (r"Text {text}\tLabel", "line 6: a text has a backslash and a t, .* double quotes; fix: "),
    ],
)
def test_an_escape_outside_double_quotes_is_refused_in_a_recipe_as_on_the_command_line(
    written, message, tmp_path
):
    with pytest.raises(UserError, match=message):
        own_task(tmp_path, prompt=written)
    with pytest.raises(UserError, match="line 9: a text has a backslash and an n"):
        own_task(tmp_path, value=r"['a\nb', c]")
    refused = message_of(f"data.prompt={written}")
    assert "has a backslash" in refused
    assert "has a backslash" in message_of(r"data.labels=[a\nb, c]")


@pytest.mark.parametrize(
    "text", ["{text}\nLabel:", "{text}\t:", r"{text}\nabla", "\x7f {text}\u2028"]
)
def test_a_text_in_double_quotes_and_a_printed_one_are_read_as_they_are(text, tmp_path):
    config = own_task(tmp_path, prompt=inline_yaml(text))
    assert config.data.prompt == text
    printed = tmp_path / "printed.yaml"
    printed.write_text(dump_yaml(config_to_dict(config)))
    assert load_config(printed) == config


@given(st.recursive(st.text(), lambda part: st.lists(part) | st.dictionaries(st.text(), part)))
def test_a_line_of_yaml_has_every_text(value):
    line = inline_yaml(value)
    assert len(line.splitlines()) == 1
    assert load_yaml(f"key: {line}  # comment") == {"key": value}


# Refusals.


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sede=1", "unknown key sede in recipe.yaml and the command line; fix: did you mean seed?"),
        ("train.learning_rate=1", "did you mean zo.learning_rate or adamw.learning_rate?"),
        ("train.steps.more=5", "did you mean train.steps?"),
        ("lr=1e-5", "unknown key lr in recipe.yaml and the command line; fix: did you mean zo.lea"),
        ("num_train_epochs=3", "did you mean train.epochs?"),
        ("zo_eps=1e-3", "did you mean zo.perturbation_scale?"),
        ("save_total_limit=3", "did you mean train.keep_snapshots?"),
        (
            "model=DIR",
            "model in recipe.yaml and the command line is a section; fix: did you mean mo",
        ),
        ("zo=1", "is a section; fix: set its keys, as in zo.KEY=VALUE"),
        ("method=lora", "is not one of lezo, adamw, zero_shot, icl; fix: set peft.kind=lora"),
        ("method=mezo", "fix: set method=lezo zo.sparsity=0"),
        ("model.dtype=float16", "fix: did you mean fp16?"),
        ("zo.sparsity=true", "zo.sparsity=true"),
        ("zo.directions=4611686018427387904", "is not an integer from 1 to 4096"),
        ("zo.learning_rate=.inf", "zo.learning_rate=Infinity"),
        ("zo.update_precision=fp32_mister", "did you mean fp32_master?"),
        ("zo.update_precision=nearest", "is not one of stochastic, fp32_master; fix: "),
        ("train.steps=10.0", "train.steps=10.0"),
        ("train.steps=1e3", "fix: write 1000"),
        ("zo.sparsity=75.0", "train --help describes it"),
        ("train.report_to=csv,wandbb", "did you mean wandb?"),
        ("zo.only_blocks=yes", 'only_blocks="yes" in recipe.yaml and the command line is not true'),
        ("zo.only_blocks=yes", "fix: write true or false"),
        ("seed=-1", "is not an integer from 0 to 18446744073709551615"),
        ("steps", "is not of the form key=value"),
        ("data.prompt={text}\\nIt is", "has a backslash and an n"),
        ("zo.learning_rate=null", "method=lezo needs zo.learning_rate"),
        ("zo.estimator_options.x=1", "zo.estimator_options.x=1 is no option of Spsa"),
        ("generation.num_samples=2", "need a temperature"),
    ],
)
def test_a_wrong_override_is_refused(override, expected):
    assert expected in message_of(override)


def test_epochs_are_steps_once_the_examples_are_counted():
    config = config_with("train.steps=null", "train.epochs=2.5", "train.batch_size=16")
    train = with_steps(config, num_examples=100).train
    assert (train.steps, train.epochs) == (16, 2.5)  # 250 examples in batches of 16
    assert with_steps(config_with(), num_examples=100) == config_with()
    falling = config_with("train.steps=null", "train.epochs=2", "zo.lr_schedule=linear")
    assert with_steps(falling, num_examples=100).train.steps == 12
    with pytest.raises(UserError, match=r"zo\.warmup_steps=20 is not below train\.steps=16"):
        with_steps(replace(config, zo=replace(config.zo, warmup_steps=20)), num_examples=100)


def test_more_epochs_than_a_run_can_have_are_refused():
    config = config_with("train.steps=null", "train.epochs=1e9", "train.batch_size=16")
    with pytest.raises(UserError, match=r"train\.epochs=1e\+09 is 6\.25e\+09 steps"):
        with_steps(config, 100)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["zo.layer_policy=fixed", "zo.layer_policy_options.block=3"],
            "block=3 is no option of Fixed",
        ),
        (["zo.estimator=fzoo", "zo.directions=2"], "set zo.directions=8"),
        (["data.prompt={a}", "data.task=sst2"], "data.prompt cannot change data.task=sst2"),
        (["data.train=a.csv", "data.path=b"], "both say where the data is"),
        (["train.epochs=2"], "train.steps and train.epochs both say how long"),
        (
            ["method=icl", "data.messages=turns", "data.train=t"],
            "shows no examples in a chat template",
        ),
        (
            ["method=zero_shot", "peft.kind=lora", "peft.path=runs/adapter"],
            "zero_shot scores the model without one; fix: run lezo-ds evaluate --model",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(overrides, expected):
    assert expected in message_of(*overrides)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "train: {steps: 1}\nzo: {sparsity: 0}\ntrain: {eval_every: 1}",
            'line 3: found duplicate key "train"',
        ),
        ("zo: &a {sparsity: 0}\ntrain: *a", "line 2: aliases are not supported"),
        ("a: b: c", "is not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("seed: " + "[" * 5000, "is not valid YAML: RecursionError"),
        ("seed: " + "[" * 250 + "]" * 250, "is nested too deeply"),
        ("seed: 0x" + "f" * 5000, "Exceeds the limit"),
        ("a: " + "x" * 2**18, "has more than 262144 characters"),
        ("data.labels: {? [a, b] : c}", "cannot be read: keys must be str"),
        ("a: !!set {b, c}\nd: !unknown e", "line 2: could not determine a constructor for the tag"),
        ("zo.estimator_options: 1\nzo.estimator_options.x: 1", "missing in"),
        ("", "holds no keys"),
        (
            "seed: 1",
            "missing in {path}: run_dir (a string), model.path (a string), model.dtype (one of",
        ),
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


@pytest.mark.parametrize("method", ["zero_shot_sfc", "icl_sfc"])
def test_a_recorded_run_with_calibrated_scores_is_refused(method):
    recorded = config_to_dict(config_from_dict(REQUIRED, "run")) | {"method": method}
    with pytest.raises(UserError) as caught:
        config_from_dict(recorded, "run runs/old", recorded=True)
    expected = f'method="{method}" in run runs/old is not one of lezo, adamw, zero_shot, icl; fix: '
    assert expected in str(caught.value)


def test_a_refusal_without_a_recipe_names_the_command_line_once():
    with pytest.raises(UserError, match=r"^seed=-1 in the command line is not an integer"):
        load_config(None, ["run_dir=x", "model.path=m", "model.dtype=fp32", "seed=-1"])


def test_every_integer_of_a_recipe_has_an_upper_limit():
    for name, schema in READER.keys.items():
        num_limits = str(schema).count("'maximum'") + str(schema).count("'enum'")
        assert str(schema).count("'integer'") <= num_limits, name


# Plain dicts.


@given(
    learning_rate=st.floats(0, 1),
    sparsity=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    num_train=st.none() | st.integers(1, 10**6),
    labels=st.dictionaries(st.text(min_size=1), st.text(min_size=1), min_size=2),
)
def test_a_config_survives_dicts_yaml_and_json(learning_rate, sparsity, seed, num_train, labels):
    data = {
        "num_train": num_train,
        "labels": labels,
        "train": "t.csv",
        "prompt": "{a} b",
        "label_field": "c",
    }
    zo = {"learning_rate": learning_rate, "sparsity": sparsity}
    values = REQUIRED | {"zo": zo, "seed": seed, "data": data}
    config = config_from_dict(values, "test", recorded=True)
    assert (config.zo.learning_rate, config.seed, config.data.labels) == (
        learning_rate,
        seed,
        labels,
    )
    for read in (
        load_yaml(dump_yaml(config_to_dict(config))),
        json.loads(json.dumps(values)),
    ):
        assert config_from_dict(read, "text", recorded=True) == config


def test_what_a_run_recorded_names_code_that_is_not_imported():
    values = config_to_dict(config_with())
    values["zo"] |= {"estimator": "nowhere:Estimator", "estimator_options": {"x": 1}}
    values["data"] |= {"task": "nowhere:TASK", "path": "../$UNSET/~"}
    config = config_from_dict(values, "run x", ["train.eval_batch_size=3"], recorded=True)
    assert (config.zo.estimator, config.data.path) == ("nowhere:Estimator", "../$UNSET/~")
    with pytest.raises(UserError, match=r"zo.estimator=nowhere:Estimator names no estimator"):
        config_from_dict(values | {"data": {}}, "recipe.yaml")


# Steps and ranks.


@pytest.mark.parametrize(
    ("overrides", "recorded", "found"),
    [
        (["zo.directions=8"], 2, 2),
        (["zo.directions=8", "zo.probes_per_pass=null"], None, 2),
        (["zo.directions=8", "zo.noise_rank=1"], None, 16),
        (["zo.directions=30", "zo.noise_rank=1"], None, 32),
        (["zo.directions=30", "zo.noise_rank=1", "zo.probes_per_pass=60"], 60, 60),
        (["zo.directions=8", "zo.noise_rank=1", "zo.probes_per_pass=2"], 2, 2),
        (["zo.noise_rank=1", "zo.estimator=one-sided", "zo.directions=4"], None, 5),
        (["method=adamw"], 2, 2),
    ],
)
def test_all_probes_that_copy_no_weights_share_a_pass_by_default(overrides, recorded, found):
    config = config_with(*overrides)
    assert config.zo.probes_per_pass == recorded
    assert probes_per_pass(config.zo) == found


def test_passes_and_copies_are_those_of_the_estimator():
    config = config_with("zo.directions=4", "zo.probes_per_pass=4", "train.micro_batch_size=8")
    assert (num_passes(config), copies_per_pass(config)) == (4, 4)
    assert copies_per_pass(config_with("method=adamw")) == 1


@pytest.mark.parametrize(
    ("world_size", "fix"),
    [
        (2, "set train.micro_batch_size to one of 1, 2, 4, 8"),
        (32, "set train.batch_size=32 train.micro_batch_size=1, or use fewer ranks"),
    ],
)
def test_a_batch_that_the_ranks_do_not_divide_is_refused_and_the_fix_works(world_size, fix):
    with pytest.raises(UserError, match=f"fix: {fix}"):
        check_world(config_with(), world_size)
    sizes = [int(size) for size in re.findall(r"\d+", fix)]
    batch, micros = (sizes[0], sizes[1:]) if "batch_size=" in fix else (16, sizes)
    for micro in micros:
        check_world(
            config_with(f"train.batch_size={batch}", f"train.micro_batch_size={micro}"), world_size
        )


# Paths.


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/people/ann")
    monkeypatch.setenv("DATA", "/data/ann")
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
    folder = {"here": folders, "parent": folders.parent}
    for key in PATH_KEYS[1:]:
        assert resolve_paths({key: path}, folders / "recipes") == {key: in_recipe.format(**folder)}
        assert resolve_paths({key: path}, None) == {key: on_command_line.format(**folder)}
    assert resolve_paths({"run_dir": "mine.csv"}, folders / "recipes") == {"run_dir": "mine.csv"}


# Shipped recipes, and those of the paper's tables.


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_valid_and_found_by_its_name_from_any_folder(
    path, tmp_path, monkeypatch
):
    overrides = []
    if path.stem in ("countdown", "keywords"):  # whose modules are in the recipe's folder
        overrides = ["train.objective=a:b", "data.metric=null"]
    monkeypatch.chdir(tmp_path)
    config = load_config(path.stem, overrides)
    assert config == load_config(path, overrides)
    load_ds_config(config.deepspeed, config.model.dtype, 1, config.train.micro_batch_size)


def paper(model, task, method, peft="none", *overrides):
    cell = [f"model={model}", f"task={task}", f"method={method}", f"peft={peft}"]
    return load_config("paper", [*cell, *overrides])


def test_every_cell_of_the_papers_tables_is_a_recipe():
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
        assert (config.data.protocol, cell.method in ("lezo", "mezo")) == (
            "mezo",
            config.method == "lezo",
        )


@pytest.mark.parametrize(
    ("cell", "rate", "scale", "sparsity"),
    [
        (("opt-1.3b", "sst2", "lezo"), 3e-6, 1e-3, 0.75),
        (("opt-13b", "rte", "mezo"), 1e-6, 1e-3, 0),
        (("opt-13b", "squad", "lezo", "prefix"), 3e-2, 1e-1, 0.75),
        (("opt-13b", "squad", "mezo", "prefix"), 5e-2, 1e-1, 0),
        (("opt-13b", "cb", "lezo", "lora"), 3e-5, 1e-2, 0.5),
        (("opt-13b", "cb", "mezo", "lora"), 1e-4, 1e-2, 0),
    ],
)
def test_a_recipe_of_the_paper_has_its_hyperparameters(cell, rate, scale, sparsity):
    config = paper(*cell)
    zo = config.zo
    assert (zo.learning_rate, zo.perturbation_scale, zo.sparsity) == (rate, scale, sparsity)
    assert (config.train.steps, eval_every(config), config.train.batch_size) == (
        20_000,
        2_000,
        16,
    )
    check_world(config, 1 if cell[0] == "opt-1.3b" else 2)


def test_the_papers_other_recipes_and_overrides():
    adamw = paper("opt-13b", "cb", "adamw", "none", "adamw.learning_rate=5e-5")
    assert (adamw.adamw.learning_rate, adamw.train.steps, adamw.model.dtype) == (5e-5, 93, "bf16")
    precisions = [paper("opt-30b", task, "lezo").zo.update_precision for task in ("sst2", "boolq")]
    assert precisions == ["stochastic", "fp32_master"]


def test_the_page_lists_every_key_with_its_default():
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    shown = {}
    for section, text in re.findall(
        r"^- (?:`(\w+)`: )?((?:.+\n)(?:  .+\n)*)", page.partition("```")[0], re.M
    ):
        for name, default in re.findall(r"`([a-z]\w+)(?:=([^`]*))?`", text):
            shown[f"{section}.{name}" if section else name] = (
                load_yaml(default) if default else None
            )
    values = {name: key.get("default") or None for name, key in READER.keys.items()}
    assert shown.keys() == values.keys()
    assert {name: value or None for name, value in shown.items()} == values
