"""Which runs can be continued: what must be the same as in the header of their records."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from assets import REPOSITORY

import lezo_ds
from lezo_ds.config import RESUME_MAY_DIFFER, config_from_dict, config_to_dict, may_differ_on_resume
from lezo_ds.data.packing import DEALING
from lezo_ds.errors import UserError
from lezo_ds.journal import Header
from lezo_ds.runs import first_order_run
from lezo_ds.runs.header import assert_same_run
from lezo_ds.zo.schedules import SCHEDULES

OURS = lezo_ds.__version__
VALUES = {
    "run_dir": "runs/x",
    "model": {"path": "facebook/opt-1.3b", "dtype": "bf16"},
    "zo": {"learning_rate": 1e-6, "sparsity": 0.75},
    "train": {"steps": 100},
}
INPUTS = {
    "model_config": {"act": "relu", "rope": {"theta": 1e4}},
    "data_fingerprints": {"train": "a", "dev": "b"},
}


def header(*overrides):
    """Return the header of a run with these values of some keys."""
    values = config_to_dict(config_from_dict(VALUES, "the test", overrides))
    del values["run_dir"]
    return Header(
        noise_version=1,
        model_fingerprint="a1b2",
        parameter_table_hash="c3d4",
        config={**values, "tokenizer": "e5", **INPUTS},
        libraries={"lezo_ds": OURS},
    )


RECORDED = header()


def inputs(**changes):
    return replace(RECORDED, config={**RECORDED.config, **changes})


def check(ours, recorded=RECORDED, may_differ=RESUME_MAY_DIFFER):
    assert_same_run(recorded=recorded, ours=ours, run_dir="runs/x", may_differ=may_differ)


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (
            replace(RECORDED, noise_version=3),
            "the noise version differs from the journal's; got: 3; expected: 1",
        ),
        (
            replace(RECORDED, model_fingerprint="ff"),
            "the model fingerprint differs .* got: 'ff'; expected: 'a1b2'",
        ),
        (
            replace(RECORDED, parameter_table_hash="ee"),
            "the parameter table differs .* got: 'ee'; expected: 'c3d4'",
        ),
        (
            inputs(model_config={"act": "relu", "rope": {"theta": 1e6}}),
            "rope.theta in facebook/opt-1.3b/config.json differs .* got: 1000000.0; expected: 10000.0",
        ),
        (
            inputs(data_fingerprints={"train": "a", "dev": "c"}),
            "the fingerprint of the dev split of sst2 in the hub differs .* got: 'c'; expected: 'b'",
        ),
        (header("train.batch_size=32"), "config train.batch_size differs .* got: 32; expected: 16"),
    ],
    ids=["noise", "model", "parameters", "model config", "data", "config"],
)
def test_the_first_item_that_differs_is_refused_with_both_values(ours, message):
    with pytest.raises(UserError, match=f"{message}; fix: "):
        check(ours)


def test_a_refusal_names_both_versions_of_the_package():
    old = replace(RECORDED, noise_version=2, libraries={"lezo_ds": "0.0.9"})
    message = (
        rf"noise version differs from the journal's \(written by lezo_ds 0\.0\.9, this is {re.escape(OURS)}\)"
    )
    with pytest.raises(UserError, match=message):
        check(RECORDED, recorded=old)


def test_what_an_earlier_version_did_not_record_is_said_to_be_unchecked(caplog):
    old = {name: value for name, value in RECORDED.config.items() if name not in INPUTS}
    check(RECORDED, recorded=replace(RECORDED, config=old, libraries={"lezo_ds": "0.1.0"}))
    unchecked = sorted(message for message in caplog.messages if "unchecked" in message)
    assert unchecked == [
        "whether the data has changed is unchecked, because lezo_ds 0.1.0 did not record it",
        "whether the model's config.json has changed is unchecked, because lezo_ds 0.1.0 did not record it",
    ]


def test_the_page_lists_every_key_that_may_differ():
    page = (REPOSITORY / "docs" / "reliability.md").read_text()
    _, _, section = page.partition("## What may change when a run resumes\n")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE))
    assert rows.keys() == RESUME_MAY_DIFFER
    not_with_adamw = {key for key, text in rows.items() if "not with `method=adamw`" in text}
    assert not_with_adamw == RESUME_MAY_DIFFER - first_order_run.RESUME_MAY_DIFFER_FIRST_ORDER


def test_keys_that_may_differ_and_library_versions_may_differ(caplog):
    check(header("train.steps=300", "train.keep_snapshots=9"))
    assert caplog.messages == []
    check(replace(RECORDED, libraries={"lezo_ds": OURS, "torch": "2.14.0"}))
    assert caplog.messages == ["torch was absent when the journal was started and is '2.14.0' now"]


def test_another_processor_may_resume_with_a_warning_unless_the_first_is_not_recorded(caplog):
    ours = replace(RECORDED, arithmetic={"processor": "H200", "TF32": "off"})
    check(ours)
    assert caplog.messages == []
    check(ours, recorded=replace(RECORDED, arithmetic={"processor": "H100", "TF32": "off"}))
    assert caplog.messages == ["processor was 'H100' when the journal was started and is 'H200' now"]


@pytest.mark.parametrize("arithmetic", [{}, {"processor": "H100"}])
def test_a_run_whose_examples_were_not_dealt_may_resume_with_a_warning(arithmetic, caplog):
    ours = replace(RECORDED, arithmetic={"processor": "H100", **DEALING})
    check(ours, recorded=replace(RECORDED, arithmetic=arithmetic))
    (name,) = DEALING
    assert caplog.messages == [f"{name} was absent when the journal was started and is 'version 1' now"]
    check(ours, recorded=ours)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_number_of_steps_may_differ_unless_the_learning_rate_depends_on_it(schedule):
    key = f"zo.lr_schedule={schedule}"
    may_differ = may_differ_on_resume(config_from_dict(VALUES, "the test", [key]))
    longer = header(key, "train.steps=300")
    if schedule == "constant":
        check(longer, header(key), may_differ)
    else:
        with pytest.raises(UserError, match=r"config train.steps differs .* got: 300; expected: 100"):
            check(longer, header(key), may_differ)
    check(header(key, "train.patience=7"), header(key), may_differ)
