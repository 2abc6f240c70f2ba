"""Recipes and overrides are read strictly, and a wrong one is refused in one line."""

import json
import re

import pytest
import yaml
from assets import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st

import lezo_ds.config
from lezo_ds.config import check_training, check_world, config_from_dict, load_config, load_yaml
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.config.load import default_of, expected
from lezo_ds.config.schema import KEYS, SECTIONS
from lezo_ds.errors import UserError
from lezo_ds.registry import FOLDERS
from lezo_ds.zo.laws import LowRankLaw

REQUIRED = {"run_dir": "runs/x", "model": {"path": "facebook/opt-1.3b", "dtype": "bf16"}}
REQUIRED |= {"zo": {"learning_rate": 1e-6, "sparsity": 0.75}}
REQUIRED |= {"train": {"steps": 100, "eval_every": 10}}
OWN_TASK = ("data.train=t.csv", "data.prompt={text} It is", "data.label_field=c", "data.labels=a,b")


def config_with(*overrides):
    config = config_from_dict(REQUIRED, "recipe.yaml", overrides)
    check_training(config)
    return config


def test_overrides_change_a_recipe_and_the_last_of_a_key_counts(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("\ufeffzo.lr_schedule: linear\npeft:\n" + yaml.safe_dump(REQUIRED))
    config = load_config(path, ["train.steps=5", "zo.sparsity=0.5", "train.steps=7", "seed=4"])
    assert (config.train.steps, config.zo.sparsity, config.seed) == (7, 0.5, 4)
    assert (config.train.eval_every, config.zo.lr_schedule) == (10, "linear")
    assert [str(tmp_path)] == FOLDERS


READ = {"zo.learning_rate=1e-6": 1e-6, "zo.sparsity=1": 1.0, "run_dir=1e6": "1e6"}
READ |= {"data.labels=good,bad": ["good", "bad"], 'data.labels=["a, b", c]': ["a, b", "c"]}
READ |= {"data.labels={a: good, b: bad}": {"a": "good", "b": "bad"}}
READ |= {"zo.estimator=One-Sided": "one-sided", 'generation.stop=["\\n", x]': ["\n", "x"]}
READ |= {"train.objective={mine:f: 0.5}": {"mine:f": 0.5}}
READ |= {"zo.layer_policy_options.blocks='1'": {"blocks": "1"}}


@pytest.mark.parametrize(("override", "value"), READ.items())
def test_a_value_on_the_command_line_is_read_as_its_key_needs_it(override, value):
    config = config_from_dict(REQUIRED, "recipe.yaml", [*OWN_TASK, override])
    section, _, name = override.partition("=")[0].removesuffix(".blocks").rpartition(".")
    found = getattr(getattr(config, section) if section else config, name)
    assert (found, type(found)) == (value, type(value))


def test_yaml_is_of_version_1_2():
    """In YAML 1.1, no is false, 1:30 is 90, 1e-3 is a string, and 017 is 15."""
    found = load_yaml("[no, On, 1:30, true, ~, 1e-3, 0o17, 017]")
    assert found == ["no", "On", "1:30", True, None, 1e-3, 15, 17]


WRONG_VALUES = [
    ("zo.sparsity=1.5", r"zo.sparsity=1.5 in recipe.yaml and the command line: .* --help zo"),
    ("zo.learning_rate=.inf", "Input should be a finite number"),
    ("train.steps=1e3", "fix: write 1000"),
    ("zo.only_blocks=yes", "fix: write true or false"),
    ("model.dtype=float16", "fix: did you mean fp16"),
    ("zo.estimator=fzo", "is not a registered estimator .* did you mean fzoo"),
    ("data.labels=[0,1]", "data.labels=0 .*: Input should be a valid string; fix: .* quotes"),
    (r"data.prompt={text}\nIt", "backslash and an n .*; fix: write a line break"),
    ("train.steps.more=5", "unknown key train.steps.more: steps is 100"),
    ("steps", "is not of the form key=value"),
    ("zo.sparsity=[", "is not YAML"),
]
UNKNOWN_KEYS = [
    ("sede=1", r"unknown key .*; fix: did you mean seed\?"),
    ("train.learning_rate=1", r"fix: did you mean zo.learning_rate\?"),
    ("per_device_train_batch_size=1", r"fix: did you mean train.micro_batch_size\?"),
    ("train.metric_for_best_model=1", "remove it: the best step has the lowest validation loss"),
    ("train.optim=1", "lezo-ds train --help train lists the keys"),
]
CONTRADICTIONS = [
    ("zo.law=low-rank", "LowRankLaw needs a rank"),
    ("zo.law=dense zo.noise_rank=1", "zo.law=dense has no rank"),
    ("zo.learning_rate=null zo.sparsity=null", "needs zo.learning_rate and zo.sparsity; fix: set"),
    ("train.epochs=2", "both say how long the run is"),
    ("zo.warmup_steps=100", "is not below train.steps=100"),
    ("zo.estimator=grzo", "compares directions with each other"),
    ("zo.estimator_options.x=1", "zo.estimator_options.x=1 is not an option of Spsa"),
    ("zo.layer_policy=fixed zo.layer_policy_options.blocks=3", """default, ''; .*blocks="3"'"""),
    ("zo.estimator=fzoo zo.directions=2", "set zo.directions=8"),
    ("zo.examples_per_direction=1", "needs directions of low rank"),
    ("zo.noise_rank=1 zo.examples_per_direction=3", "into whole groups"),
    ("zo.noise_rank=1 peft.kind=prefix", "a prefix has none"),
    ("model.bits=4", "training its codes diverges"),
    ("peft.path=x", "peft.path is a LoRA adapter, and peft.kind=none"),
    ("elastic.lighthouse=http://a peft.kind=prefix", "replicas cannot train"),
    ("data.prompt={a} data.task=sst2", "data.prompt cannot change data.task=sst2"),
    ("data.prompt={a} data.train=t", "no key says what the model must answer"),
    ("data.prompt={a} data.labels=a,b data.train=t", "add data.label_field=COLUMN"),
    ("data.train=a.csv data.path=b", "both say where the data is"),
    ("data.chat_template_kwargs.x=1", "needs data.chat_template=true"),
    ("generation.num_samples=2", "need a temperature"),
    ("generation.stop=a,", "has an empty string"),
    ("train.objective={}", "does not name a reward"),
    ("train.objective={'a:b':0}", "does not name a reward with a weight other than 0"),
    (
        "data.prompt={a} data.choices=x,y data.labels={'b':'x','a':'y'}",
        "a map in data.labels gives",
    ),
    ("zo={sparsity:1}", "zo has several values"),
]


def test_a_key_of_a_recipe_has_one_value():
    for twice in ({"zo.sparsity": 1, **REQUIRED}, {**REQUIRED, "zo.sparsity": 1}):
        with pytest.raises(UserError, match=r"sparsity has several values: .*; fix: "):
            config_from_dict(twice, "recipe.yaml")


@pytest.mark.parametrize(("words", "message"), WRONG_VALUES + UNKNOWN_KEYS + CONTRADICTIONS)
def test_what_is_wrong_unknown_or_contradicts_is_refused_with_a_fix(words, message):
    with pytest.raises(UserError) as caught:
        config_with(*words.split())
    assert "\n" not in str(caught.value)
    assert re.search(r"; fix: \S", str(caught.value))
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zo: {sparsity: 0}\nzo: {sparsity: 1}", 'line 2: found duplicate key "zo"'),
        ("run_dir: r\nmodel: {path: m, dtype: fp32}\ndata: t.csv", "data=t.csv in "),
        ("zo: &a {sparsity: 0}\ntrain: *a", "line 2: aliases are not supported"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("seed: " + "[" * 5000, "is not valid YAML: RecursionError"),
        ("a: " + "x" * 2**18, "has more than 262144 characters"),
        ("", "holds no keys"),
        ("seed: 1", "run_dir (string), model.path (string), model.dtype (one"),
        (None, "cannot read the recipe"),
    ],
)
def test_a_broken_recipe_is_refused_by_its_name(text, message, tmp_path):
    path = tmp_path / "broken.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000


PLAIN = st.text(min_size=1).filter(lambda text: "\\" not in text)
LABELS = st.dictionaries(st.text(min_size=1), PLAIN, min_size=2)


@settings(max_examples=20)
@given(st.floats(0, 1), st.integers(0, 2**64 - 1), LABELS)
def test_a_config_survives_dicts_yaml_and_json(learning_rate, seed, labels):
    data = {"labels": labels, "train": "t.csv", "prompt": "{a}\nb", "label_field": "c"}
    values = REQUIRED | {"zo": {"learning_rate": learning_rate}, "seed": seed, "data": data}
    config = config_from_dict(values, "test")
    assert (config.zo.learning_rate, config.seed) == (learning_rate, seed)
    assert (config.data.labels, config.data.prompt) == (labels, "{a}\nb")
    as_yaml = lezo_ds.config.dump_yaml(config.model_dump())
    for read in (load_yaml(as_yaml), json.loads(json.dumps(values))):
        assert config_from_dict(read, "text") == config


def test_what_a_run_recorded_stays_as_it_is_and_imports_no_code():
    values = config_with().model_dump()
    values["zo"] |= {"estimator": "nowhere:Estimator", "estimator_options": {"x": 1}}
    values["data"] |= {"task": "nowhere:TASK", "path": "../$UNSET/~"}
    values["train"] |= {"epochs": 1.0}
    config = config_from_dict(values, "run x", ["train.eval_batch_size=3"])
    assert (config.zo.estimator, config.data.path) == ("nowhere:Estimator", "../$UNSET/~")
    with pytest.raises(UserError, match=r"zo.estimator=nowhere:Estimator names no estimator"):
        check_training(config.model_copy(update={"train": config_with().train}))


class OwnLaw(LowRankLaw):
    most_probes = 3


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("zo.directions=8", 2),
        ("zo.directions=30 zo.noise_rank=1", 32),
        ("zo.directions=30 zo.noise_rank=1 zo.probes_per_pass=60", 60),
        (f"zo.directions=8 zo.law={__name__}:OwnLaw zo.noise_rank=2", 3),
    ],
)
def test_a_pass_runs_as_many_probes_as_the_law_says(words, found):
    config = config_with(*words.split())
    assert lezo_ds.config.probes_per_pass(config.zo) == found
    assert lezo_ds.config.make_law(config.zo).rank == config.zo.noise_rank


def test_epochs_are_steps_once_the_examples_are_counted():
    config = config_with("train.steps=null", "train.epochs=2.5", "zo.lr_schedule=linear")
    train = lezo_ds.config.with_steps(config, num_examples=100).train
    assert (train.steps, train.epochs) == (16, 2.5)  # 250 examples in batches of 16
    assert lezo_ds.config.with_steps(config_with(), num_examples=100) == config_with()


def test_a_batch_that_the_ranks_do_not_divide_is_refused_and_the_fix_works():
    config = config_with("zo.directions=4", "zo.probes_per_pass=4", "train.micro_batch_size=8")
    assert lezo_ds.config.num_passes(config) == 4
    with pytest.raises(UserError, match=r"size to one of 1, 2, 4, 8, or, .* use fewer ranks"):
        check_world(config_with(), 2)
    check_world(config_with("train.micro_batch_size=8"), 2)
    with pytest.raises(UserError, match=r"set train.batch_size=32 train.micro_batch_size=1, or"):
        check_world(config_with(), 32)
    check_world(config_with("train.batch_size=32", "train.micro_batch_size=1"), 32)


PATHS = [
    ("./mine.csv", "{here}/recipes/mine.csv", "{here}/mine.csv"),
    ("../models/tiny", "{here}/models/tiny", "{parent}/models/tiny"),
    ("mine.csv", "{here}/recipes/mine.csv", "mine.csv"),
    ("owner/name:train", "owner/name:train", "owner/name:train"),
    ("${DATA}x/$HOME", "/data/annx//people/ann", "/data/annx//people/ann"),
]
"""A path, and where it leads from a recipe and from the command line."""


def test_a_path_may_be_relative_to_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/people/ann")
    monkeypatch.setenv("DATA", "/data/ann")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.csv").touch()
    folder = {"here": tmp_path, "parent": tmp_path.parent}
    for path, in_recipe, on_command_line in PATHS:
        of_data = {**REQUIRED, "data": {"train": path}}
        recipe = config_from_dict(of_data, "recipe", folder=tmp_path / "recipes")
        assert recipe.data.train == in_recipe.format(**folder)
        assert config_with(f"data.train={path}").data.train == on_command_line.format(**folder)
    with pytest.raises(UserError, match="names an environment variable"):
        config_with("run_dir=$UNSET/x")


def test_a_shipped_recipe_is_valid_and_found_by_its_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (REPOSITORY / "launch" / "recipes").glob("*.yaml"):
        config = load_config(path.stem)
        check_training(config)
        assert config == load_config(path)
        assert lezo_ds.config.eval_every(config) <= config.train.steps
        load_ds_config(config.deepspeed, config.model.dtype, 2, config.train.micro_batch_size)
    config = load_config("paper-opt-13b-lora", ["data.task=copa", "zo.sparsity=0"])
    assert (config.data.task, config.peft.kind, config.train.steps) == ("copa", "lora", 20_000)
    with pytest.raises(UserError, match="did you mean demo"):
        load_config("demoo")


def test_the_help_has_every_key_and_integers_have_limits():
    text = "\n".join(map(lezo_ds.config.describe, (None, *SECTIONS)))
    for key, field in KEYS.items():
        assert re.search(rf"^{key} \(", text, re.M), key
        assert str(field.description).split()[0] in text
        words = expected(key)
        assert "integer" not in words or re.search(r"integer from \d+ to \d+", words), key
    with pytest.raises(UserError, match="did you mean train"):
        lezo_ds.config.describe("trian")


def test_the_page_lists_every_key_with_its_default():
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    shown = {}
    lines = r"^- (?:`(\w+)`: )?((?:.+\n)(?:  .+\n)*)"
    for section, text in re.findall(lines, page.partition("```")[0], re.M):
        for name, default in re.findall(r"`([a-z]\w+)(?:=([^`]*))?`", text):
            key = f"{section}.{name}" if section else name
            shown[key] = load_yaml(default) if default else None
    assert shown.keys() == KEYS.keys()
    for key, default in shown.items():
        own = None if KEYS[key].is_required() else default_of(key)
        assert (default or None) == (own or None), key
