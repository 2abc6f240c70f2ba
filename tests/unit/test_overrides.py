"""Recipe keys as options of a command."""

from __future__ import annotations

import pytest

from lezo_ds.config.overrides import as_overrides
from lezo_ds.config.schema import SCHEMA


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--seed 3", "seed=3"),
        ("--seed=-3", "seed=-3"),
        ("--seed -3", "seed=-3"),
        ("--zo.learning_rate 1e-6 --out x", "zo.learning_rate=1e-6 --out x"),
        ("seed=1 --seed 2 --config c seed=3", "seed=1 seed=2 --config c seed=3"),
        ("--train.packed false a", "train.packed=false a"),
        ("--train.packed No a", "train.packed=No a"),
        ("--train.packed --dry-run", "train.packed=true --dry-run"),
        ("--train.packed seed=1", "train.packed=true seed=1"),
        ("--train.packed", "train.packed=true"),
        ("--zo.update_rule_options.weight_decay 0.1", "zo.update_rule_options.weight_decay=0.1"),
        ("--zo.sparsty 1", "zo.sparsty=1"),  # the strict reader names the nearest key
        ("--no.such=1", "no.such=1"),
        ("--seed --dry-run", "--seed --dry-run"),  # argparse refuses it
        ("--seed", "--seed"),
        ("--zo 1 --local_rank=1 --ds-config x", "--zo 1 --local_rank=1 --ds-config x"),
        ("-h -- x", "-h -- x"),
    ],
)
def test_options_that_are_keys_become_overrides_and_no_others_do(given, expected):
    assert as_overrides(given.split()) == expected.split()


@pytest.mark.parametrize("key", SCHEMA.keys)
def test_every_key_is_an_option(key):
    assert as_overrides([f"--{key}", "no", "x"]) == as_overrides([f"--{key}=no", "x"]) == [f"{key}=no", "x"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--grid a=1 --seed 2 b=3 --list", "seed=2 b=3 --grid a=1 --list"),
        ("x=1 --grid a=1 b=2 --seed 2 --seed 3", "x=1 seed=2 seed=3 --grid a=1 b=2"),
        ("--grid a=1 --list --seed 2", "--grid a=1 --list seed=2"),
        ("--grid=a=1 --seed 2", "seed=2 --grid=a=1"),
    ],
)
def test_an_option_that_takes_a_list_does_not_take_keys(given, expected):
    assert as_overrides(given.split(), ["--grid"]) == expected.split()
