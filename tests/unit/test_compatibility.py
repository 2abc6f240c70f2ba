"""Configurations that earlier, and later, versions recorded."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import lezo_ds
from lezo_ds.config import RESUME_MAY_DIFFER, config_from_dict, config_to_dict
from lezo_ds.config.compatibility import OLD_KEYS, OldKey, recorded_config
from lezo_ds.config.schema import SCHEMA
from lezo_ds.errors import UserError
from lezo_ds.journal import Header
from lezo_ds.runs.header import assert_same_run, config_of

VALUES = {
    "run_dir": "runs/x",
    "model": {"path": "facebook/opt-1.3b", "dtype": "bf16"},
    "zo": {"learning_rate": 1e-6, "sparsity": 0.75},
    "train": {"steps": 100},
}
TODAY = config_from_dict(VALUES, "test")
OURS = lezo_ds.__version__
MISSING = object()


def recorded(**sections):
    """Return what the first version would have recorded, with changes to its sections."""
    values = config_to_dict(TODAY)
    values["zo"]["noise"] = "exact"
    for name, keys in sections.items():
        changed = {**values[name], **keys}
        values[name] = {key: value for key, value in changed.items() if value is not MISSING}
    return values


def read(values, written_by="0.1.0"):
    return recorded_config(values, "run runs/x", written_by)


def message_of(values, written_by="0.1.0"):
    with pytest.raises(UserError) as caught:
        read(values, written_by)
    return str(caught.value)


def test_what_the_first_version_recorded_is_read():
    assert read(recorded()) == TODAY
    assert read(config_to_dict(TODAY), OURS) == TODAY


def test_a_missing_key_gets_its_default():
    assert read(recorded(zo={"directions": MISSING}, train={"packed": MISSING})) == TODAY


def test_a_removed_key_that_asked_for_what_is_gone_is_refused():
    message = message_of(recorded(zo={"noise": "fast"}))
    assert f"run runs/x was written by lezo_ds 0.1.0 and cannot be read by lezo_ds {OURS};" in message
    assert message.endswith("got: zo.noise=fast; expected: zo.noise=exact; fix: use lezo_ds 0.1.0")


def test_a_renamed_key_and_its_values_are_mapped(monkeypatch):
    monkeypatch.setitem(OLD_KEYS, "zo.passes", OldKey("zo.estimator", {1: "spsa", 2: "one-sided"}))
    monkeypatch.setitem(OLD_KEYS, "zo.eps", OldKey("zo.perturbation_scale", {}))
    old = recorded(zo={"estimator": MISSING, "passes": 2, "perturbation_scale": MISSING, "eps": 0.5})
    zo = read(old).zo
    assert (zo.estimator, zo.perturbation_scale) == ("one-sided", 0.5)


def test_a_key_of_a_later_version_is_refused_and_both_versions_are_named():
    message = message_of(recorded(train={"warp": 9}), written_by="9.0.0")
    assert f"was written by lezo_ds 9.0.0 and cannot be read by lezo_ds {OURS};" in message
    assert "got: train.warp=9" in message
    assert message.endswith("fix: use lezo_ds 9.0.0")
    assert "by another version of lezo_ds" in message_of(recorded(train={"warp": 9}), written_by=None)


def test_every_old_key_is_gone_and_its_replacement_exists():
    assert not OLD_KEYS.keys() & SCHEMA.keys.keys()
    assert {old.new for old in OLD_KEYS.values()} - {None} <= SCHEMA.keys.keys()


# Resumption


def header(config, version):
    return Header(
        noise_version=1,
        model_fingerprint="a1b2",
        parameter_table_hash="c3d4",
        config={key: value for key, value in config.items() if key != "run_dir"} | {"tokenizer": "e5"},
        libraries={"lezo_ds": version},
    )


def check(old, changes=()):
    ours = header(config_to_dict(config_from_dict(VALUES, "test", changes)), OURS)
    assert_same_run(header(old, "0.1.0"), ours, "runs/x", RESUME_MAY_DIFFER)


def test_a_run_of_an_earlier_version_is_continued_though_keys_came_and_went():
    check(recorded(zo={"max_skipped_steps": MISSING}))
    check(recorded(), ["train.steps=200"])


def test_a_key_that_an_earlier_version_did_not_have_must_have_its_default():
    name = f"config zo.max_skipped_steps differs .*written by lezo_ds 0.1.0, this is {re.escape(OURS)}"
    with pytest.raises(UserError, match=f"{name}.*got: 3; expected: 10"):
        check(recorded(zo={"max_skipped_steps": MISSING}), ["zo.max_skipped_steps=3"])


def test_another_tokenizer_or_model_is_refused():
    ours = header(config_to_dict(TODAY), OURS)
    tokenizer = {**ours.config, "tokenizer": "ff"}
    for changed in (replace(ours, model_fingerprint="ff"), replace(ours, config=tokenizer)):
        with pytest.raises(UserError, match="differs from the journal's"):
            assert_same_run(ours, changed, "runs/x", RESUME_MAY_DIFFER)


def test_the_config_of_a_header_is_that_of_the_run_where_it_lies_now():
    config = config_of(header(recorded(), "0.1.0"), "elsewhere", ["model.path=local"])
    assert config == replace(TODAY, run_dir="elsewhere", model=replace(TODAY.model, path="local"))
