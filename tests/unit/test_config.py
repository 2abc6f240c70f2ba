import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lezo_ds.config import (
    RESUME_MAY_DIFFER,
    RunConfig,
    ZoConfig,
    check_world,
    config_from_dict,
    config_to_dict,
    describe,
    load_config,
    num_dropped,
)
from lezo_ds.config.keys import Choices, Option, OptionsOf, Schema
from lezo_ds.config.reading import flatten_sections, read
from lezo_ds.errors import UserError

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "launch" / "recipes" / "demo.yaml"
REQUIRED = {
    "run_dir": "runs/x",
    "model": {"path": "facebook/opt-1.3b", "dtype": "bf16"},
    "zo": {"learning_rate": 1e-6, "sparsity": 0.75},
    "train": {"steps": 100, "eval_every": 10},
    "deepspeed": "ds_configs/zero3_cpu.json",
}


def config_with(*overrides: str, tmp_path: Path) -> RunConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(REQUIRED))
    return load_config(path, overrides)


def message_of(*overrides: str, tmp_path: Path) -> str:
    with pytest.raises(UserError) as caught:
        config_with(*overrides, tmp_path=tmp_path)
    return str(caught.value)


def assert_whole(message: str) -> None:
    """What, got, expected and fix are all there, and no text is empty."""
    what, *parts = re.split(r"; (?=(?:got|expected|fix): )", message)
    assert what
    assert [part.split(": ")[0] for part in parts] == ["got", "expected", "fix"], message
    assert all(part.partition(": ")[2] for part in parts), message


def leaf_keys(values: dict, prefix: str = "") -> set[str]:
    keys = set()
    for name, value in values.items():
        keys |= leaf_keys(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name}
    return keys


def keys_of_a_run() -> set[str]:
    return leaf_keys(config_to_dict(config_from_dict(REQUIRED, "test")))


# Recipes and overrides


def test_overrides_change_a_recipe_and_the_last_of_a_key_counts():
    overrides = ["train.steps=5", "zo.num_dropped_layers=3", "zo.sparsity=null", "train.steps=7", "seed=4"]
    config = load_config(RECIPE, overrides)
    assert (config.train.steps, config.zo.num_dropped_layers, config.zo.sparsity, config.seed) == (
        7,
        3,
        None,
        4,
    )
    assert config.train.eval_every == load_config(RECIPE, []).train.eval_every


def test_a_run_can_be_given_by_overrides_alone():
    overrides = "run_dir=r model.path=m model.dtype=fp32 zo.learning_rate=0 zo.sparsity=0 train.steps=1"
    config = load_config(None, [*overrides.split(), "train.eval_every=1", "deepspeed=d.json"])
    assert config.zo == ZoConfig(learning_rate=0.0, sparsity=0.0)
    assert isinstance(config.zo.learning_rate, float)
    assert config.data.task == "sst2"


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.e-6", "+1e-6", "1.0e-6", "0.000001", "'1e-6'"])
def test_a_float_may_be_written_without_a_point(text, tmp_path):
    assert config_with(f"zo.learning_rate={text}", tmp_path=tmp_path).zo.learning_rate == 1e-6
    recipe = tmp_path / "float.yaml"
    recipe.write_text(yaml.safe_dump(REQUIRED).replace("learning_rate: 1.0e-06", f"learning_rate: {text}"))
    assert load_config(recipe, []).zo.learning_rate == 1e-6


def test_text_that_looks_like_a_number_stays_text(tmp_path):
    assert config_with("run_dir=1e6", "model.path='2024'", tmp_path=tmp_path).run_dir == "1e6"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{text}", "{text}"),
        ("{text} It is", "{text} It is"),
        ("Review: {text} #1, [a] ", "Review: {text} #1, [a] "),
        ("'{text}: '", "{text}: "),
        ('"Really" {text}', '"Really" {text}'),
        ('"{text}\\nIt is"', "{text}\nIt is"),
        ("{text}\nIt is", "{text}\nIt is"),
    ],
)
def test_a_text_on_the_command_line_needs_no_quotes_but_those_of_the_shell(given, expected, tmp_path):
    keys = ["data.task=custom", "data.train=t.csv", "data.labels=a,b", "data.label_field=c"]
    found = config_with(*keys, f"data.prompt={given}", tmp_path=tmp_path).data.prompt
    assert found == expected


def test_a_text_without_quotes_may_look_like_anything(tmp_path):
    assert config_with("run_dir=2024-01-01", "model.path=5", tmp_path=tmp_path).model.path == "5"
    assert config_with("data.path=null", tmp_path=tmp_path).data.path is None


def test_a_line_break_that_would_become_a_backslash_is_refused(tmp_path):
    message = message_of("data.prompt={text}\\nIt is", tmp_path=tmp_path)
    assert "data.prompt on the command line has a backslash and an n" in message
    assert_whole(message)


def test_an_equals_sign_in_a_value_is_kept(tmp_path):
    assert config_with("run_dir=runs/lr=1", tmp_path=tmp_path).run_dir == "runs/lr=1"


def test_an_empty_section_takes_its_defaults():
    assert config_from_dict(REQUIRED | {"data": None}, "test") == config_from_dict(REQUIRED, "test")


# Errors


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("zo.sparsity=1.5", "got: 1.5; expected: a number 0 to 1 or null"),
        ("zo.sparsity=.nan", "got: 'nan'"),
        ("zo.sparsity=true", "got: True"),
        ("zo.learning_rate=-1", "expected: a number at least 0"),
        ("zo.learning_rate=.inf", "got: 'inf'"),
        ("zo.learning_rate=fast", "got: 'fast'"),
        ("zo.learning_rate=null", "got: null"),
        ("zo.perturbation_scale=0", "expected: a number above 0"),
        ("zo.num_dropped_layers=-1", "expected: a whole number at least 0 or null"),
        ("zo.num_dropped_layers=2", "expected: exactly one of the two"),
        ("zo.sparsity=null", "got: zo.sparsity=null, zo.num_dropped_layers=null"),
        ("zo.update_precision=fp32_mister", "did you mean fp32_master?"),
        ("zo.estimator=both", "expected: one of spsa, one-sided"),
        ("train.steps=0", "got: 0; expected: a whole number at least 1"),
        ("train.steps=10.0", "got: 10.0"),
        ("train.steps=true", "got: True"),
        ("train.steps=", "got: null"),
        ("train.micro_batch_size=5", "set train.micro_batch_size to one of 1, 2, 4, 8, 16"),
        ("data.task=SST3", "did you mean sst2?"),
        ("data.num_train=0", "a whole number at least 1 or null"),
        ("data.seed=4294967296", "0 to 4294967295"),
        ("seed=-1", "0 to 18446744073709551615"),
        ("model.dtype=float16", "expected: one of fp32, bf16, fp16; fix: set model.dtype to one of these"),
        ("run_dir=null", "got: null; expected: text"),
    ],
)
def test_a_wrong_value_is_refused(override, expected, tmp_path):
    message = message_of(override, tmp_path=tmp_path)
    assert expected in message
    assert_whole(message)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sede=1", "did you mean seed?"),
        ("zo.sparcity=0.5", "did you mean zo.sparsity?"),
        ("trian.steps=5", "did you mean train.steps?"),
        ("train.learning_rate=1", "did you mean zo.learning_rate?"),
        ("learning_rate=1", "did you mean zo.learning_rate?"),
        ("train.setps=5", "did you mean train.steps?"),
        ("train.steps.more=5", "did you mean train.steps?"),
        ("xyzzy=1", "expected: one of run_dir, seed, method, partition_size, deepspeed; fix: remove it"),
        ("train=5", "train in"),
        ("data=null", "is a section, not a value"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(override, expected, tmp_path):
    message = message_of(override, tmp_path=tmp_path)
    assert expected in message
    assert_whole(message)


@pytest.mark.parametrize(
    "argument",
    [
        *("steps", "=5", "--steps=5", "train..steps=5", "train.steps=[1, 2]", "zo={sparsity: 1}", "seed=@"),
        *("seed=2001-99-99", "seed=!!int x", "seed=&a [*a]"),
    ],
)
def test_an_argument_that_is_no_override_is_refused(argument, tmp_path):
    message = message_of(argument, tmp_path=tmp_path)
    assert argument in message or argument.split("=", 1)[1] in message
    assert_whole(message)


LAUGHS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 10)
)
"""Ten lines that stand for billions of values."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("zo: {sparcity: 1}", "did you mean zo.sparsity?"),
        ("train: 5", "train in"),
        ("seed: 1\nseed: 2", "repeated key seed"),
        ("train: {steps: 1}\nzo: {sparsity: 0}\ntrain: {eval_every: 1}", "repeated key train"),
        ("train: {steps: 1, steps: 2}", "repeated key train.steps"),
        ("train.steps: 1\ntrain: {steps: 2}", "repeated key train.steps"),
        ("a: b: c", "is not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("", "holds no keys"),
        ("seed: " + "[" * 5000, "is not valid YAML; got: RecursionError"),
        ("seed: &a [*a]", "is not valid YAML; got: nested too deeply"),
        ("&a {b: *a}", "is not valid YAML; got: nested too deeply"),
        (LAUGHS, "is not valid YAML; got: more than 10000 values"),
        ("seed: " + "9" * 5000, "is not valid YAML; got: ValueError: Exceeds the limit"),
        ("run_dir: 2001-99-99", "is not valid YAML; got: ValueError: month"),
        ("seed: !!timestamp x", "is not valid YAML; got: AttributeError"),
        (f"zo: {{learning_rate: {'1' * 400}}}", "zo.learning_rate in"),
        ('run_dir: "a\\0b"', "got: 'a\\x00b'; expected: text; fix: remove null characters"),
        ('run_dir: "\\ud800"', "got: '\\ud800'; expected: text; fix: remove null characters"),
        ("run_dir: 5", 'got: 5; expected: text; fix: write it in quotes: "5"'),
        ("run_dir: 2024-01-01", "expected: text"),
        ("seed: {}", "seed in"),
        ("zo: {estimator: {}}", "zo.estimator in"),
        ("- seed", "holds no keys"),
        ("1: 2", "unknown key"),
        ("seed: 1", "missing in"),
    ],
)
def test_a_broken_recipe_is_refused(text, expected, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(path, [])
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert_whole(str(caught.value))


def test_a_recipe_that_is_not_text_or_not_there_is_refused(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xff")
    for path in (binary, tmp_path, tmp_path / "absent.yaml"):
        with pytest.raises(UserError, match="cannot read") as caught:
            load_config(path, [])
        assert_whole(str(caught.value))


def test_every_missing_key_is_named_at_once():
    with pytest.raises(UserError) as caught:
        load_config(None, ["run_dir=r"])
    assert "missing in the command line: model.path, model.dtype;" in str(caught.value)
    assert_whole(str(caught.value))


@pytest.mark.parametrize("method", ["lezo", "mezo"])
@pytest.mark.parametrize("key", ["zo.learning_rate", "train.steps"])
def test_zeroth_order_training_needs_a_learning_rate_and_steps(key, method, tmp_path):
    message = message_of(f"{key}=null", f"method={method}", tmp_path=tmp_path)
    assert f"{key}; got: null; expected: a" in message
    assert f"with method {method}" in message


@pytest.mark.parametrize("method", ["adamw", "zero_shot", "icl"])
def test_other_methods_need_neither(method):
    values = {"run_dir": "r", "method": method, "model": REQUIRED["model"]}
    assert config_from_dict(values, "test").train.steps is None


@pytest.mark.parametrize(("estimator", "least"), [("fzoo", 4), ("evolution-strategies", 2)])
def test_an_estimator_that_compares_directions_needs_enough_of_them(estimator, least, tmp_path):
    few, enough = ((f"zo.estimator={estimator}", f"zo.directions={n}") for n in (least - 1, least))
    message = message_of(*few, tmp_path=tmp_path)
    assert f"got: zo.directions={least - 1}; expected: at least {least}; fix: set zo.directions=8" in message
    assert config_with(*enough, tmp_path=tmp_path).zo.directions == least


@pytest.mark.parametrize(
    ("rule", "option", "expected"),
    [
        (
            "sgd-weight-decay",
            "weight_decay=-0.01",
            "got: -0.01; expected: at least 0; fix: set zo.update_rule",
        ),
        ("sgd-momentum", "momentum=1.0", "got: 1.0; expected: 0 to 1, 1 excluded"),
        ("sgd-momentum", "momentum=-0.1", "got: -0.1; expected: 0 to 1"),
        ("sgd-momentum", "window=0", "got: 0; expected: at least 1"),
    ],
)
def test_an_option_of_an_update_rule_out_of_range_is_refused(rule, option, expected, tmp_path):
    options = (f"zo.update_rule={rule}", f"zo.update_rule_options.{option}")
    assert expected in message_of(*options, tmp_path=tmp_path)


def test_mezo_is_sparsity_0_and_refuses_any_other():
    values = {**REQUIRED, "method": "mezo", "zo": {"learning_rate": 1e-6}}
    assert config_from_dict(values, "test").zo.sparsity == 0
    with pytest.raises(UserError, match=r"drops no transformer blocks; got: zo.sparsity=0.75"):
        config_from_dict({**REQUIRED, "method": "mezo"}, "test")


# Plain dicts, help


@given(
    learning_rate=st.floats(0, 1),
    sparsity=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    num_train=st.none() | st.integers(1, 10**6),
    path=st.text(st.characters(codec="ascii", exclude_characters="\0~$"), min_size=1),
)
def test_a_config_survives_dicts_and_yaml(learning_rate, sparsity, seed, num_train, path):
    values = REQUIRED | {"zo": {"learning_rate": learning_rate, "sparsity": sparsity}, "seed": seed}
    values |= {"data": {"num_train": num_train}, "run_dir": path}
    config = config_from_dict(values, "test")
    assert (config.zo.learning_rate, config.seed, config.data.num_train) == (learning_rate, seed, num_train)
    text = yaml.safe_dump(config_to_dict(config))
    assert config_from_dict(yaml.safe_load(text), "text") == config
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config))), "json") == config


def test_a_config_cannot_be_changed():
    config = config_from_dict(REQUIRED, "test")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.zo.sparsity = 0.0


def test_the_help_describes_every_key():
    blocks = dict(re.findall(r"^(\S+): (.+\n(?: .+\n?)+)", describe(), re.MULTILINE))
    assert blocks.keys() == keys_of_a_run()
    assert blocks["zo.perturbation_scale"].startswith("a number above 0; default 0.001\n    Perturbation")
    assert blocks["model.path"].startswith("text; required\n")
    assert blocks["data.mezo_details"].startswith("true or false; default false\n")
    assert all(len(line) <= 100 for line in describe().splitlines())


def test_keys_that_may_differ_on_resume_exist():
    assert keys_of_a_run() >= RESUME_MAY_DIFFER


# Components that are registered by name, and their options

SHAPES = {"circle": {"radius": 1.0}, "Box": {"width": 2, "filled": False, "color": "red"}, "point": {}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    shape: Annotated[str, Choices(SHAPES)] = "circle"
    """Name of the shape."""

    options: Annotated[Mapping[str, Option], OptionsOf("shape", SHAPES.__getitem__)] = dataclasses.field(
        default_factory=dict
    )
    """Its options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    drawing: Drawing


PAGE = Schema(Page)


def drawing(values):
    return read(PAGE, flatten_sections(PAGE, values), "test").drawing


def test_a_component_has_all_its_options_those_not_given_by_default():
    assert drawing({}) == Drawing(options={"radius": 1.0})
    assert drawing({"drawing": {"shape": "box", "options": {"width": 3}}}) == Drawing(
        shape="Box", options={"width": 3, "filled": False, "color": "red"}
    )
    assert drawing({"drawing": {"shape": "point", "options": None}}).options == {}
    assert read(PAGE, {"drawing.options.radius": "2e-1"}, "test").drawing.options == {"radius": 0.2}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"shape": "boxx"}, "did you mean Box?"),
        ({"shape": "cube"}, "expected: one of circle, Box, point"),
        ({"options": {"radios": 2.0}}, "did you mean drawing.options.radius?"),
        (
            {"options": {"width": 2}},
            "got: drawing.options.width, with drawing.shape=circle; expected: one of radius",
        ),
        ({"shape": "point", "options": {"x": 1}}, "none: it has no options"),
        ({"shape": "Box", "options": {"width": 2.5}}, "drawing.options.width in test is not valid; got: 2.5"),
        (
            {"shape": "Box", "options": {"filled": 1}},
            "true or false; fix: set drawing.options.filled=false",
        ),
        ({"options": 5}, "expected: options of drawing.shape"),
    ],
)
def test_a_component_or_option_that_is_not_registered_is_refused(values, expected):
    with pytest.raises(UserError) as caught:
        drawing({"drawing": values})
    assert expected in str(caught.value)
    assert_whole(str(caught.value))


def test_what_is_registered_later_can_be_chosen(monkeypatch):
    monkeypatch.setitem(SHAPES, "star", {"points": 5})
    assert drawing({"drawing": {"shape": "STAR"}}) == Drawing(shape="star", options={"points": 5})


LIGHT = (
    "lezo_ds.command_line",
    "lezo_ds.config",
    "lezo_ds.recipes",
    "lezo_ds.tasks",
    "lezo_ds.errors",
    "lezo_ds.zo.updates",
)


@pytest.mark.parametrize("module", LIGHT)
def test_what_a_wrong_key_needs_imports_no_heavy_library(module):
    heavy = "{'torch', 'deepspeed', 'transformers', 'datasets', 'numpy', 'pandas'} & sys.modules.keys()"
    script = f"import sys, {module}; assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


# Ranks and layers


@pytest.mark.parametrize(("micro", "world_size"), [(16, 1), (8, 2), (4, 2), (4, 4), (1, 16)])
def test_a_batch_that_micro_batches_and_ranks_divide_is_taken(micro, world_size, tmp_path):
    config = config_with(f"train.micro_batch_size={micro}", tmp_path=tmp_path)
    check_world(config, world_size)


@pytest.mark.parametrize(
    ("world_size", "fix"),
    [
        (2, "set train.micro_batch_size to one of 1, 2, 4, 8"),
        (8, "set train.micro_batch_size to one of 1, 2"),
        (3, "set train.batch_size=18 train.micro_batch_size=6, or use fewer ranks"),
        (32, "set train.batch_size=32 train.micro_batch_size=1, or use fewer ranks"),
    ],
)
def test_a_batch_that_the_ranks_do_not_divide_is_refused_and_the_fix_works(world_size, fix, tmp_path):
    config = config_with(tmp_path=tmp_path)
    with pytest.raises(UserError) as caught:
        check_world(config, world_size)
    assert str(caught.value).endswith(f"fix: {fix}")
    assert_whole(str(caught.value))
    sizes = [int(size) for size in re.findall(r"\d+", fix)]
    batch, micros = (sizes[0], sizes[1:]) if "batch_size=" in fix else (16, sizes)
    for micro in micros:
        overrides = (f"train.batch_size={batch}", f"train.micro_batch_size={micro}")
        check_world(config_with(*overrides, tmp_path=tmp_path), world_size)


def test_dropped_layers_come_from_the_share_or_the_number():
    assert num_dropped(ZoConfig(learning_rate=0.0, sparsity=0.75), 24) == 18
    assert num_dropped(ZoConfig(learning_rate=0.0, num_dropped_layers=24), 24) == 24
    with pytest.raises(UserError, match=r"got: 25; expected: 0 to 24") as caught:
        num_dropped(ZoConfig(learning_rate=0.0, num_dropped_layers=25), 24)
    assert_whole(str(caught.value))
