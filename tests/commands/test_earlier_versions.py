"""Runs of version 0.1.0: they resume, replay and export to the same weights."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from assets import REPOSITORY
from commands import assert_refused, python, run_well

from lezo_ds.journal import read_journal
from lezo_ds.zo.records import StepRecord

FIXTURE = REPOSITORY / "tests" / "fixtures" / "run-0.1.0"
NUM_STEPS = 6

pytestmark = pytest.mark.distributed


def digest_of(directory):
    return json.loads((directory / "lezo_manifest.json").read_text())["digest"]


@pytest.fixture
def old(tmp_path):
    """The run of 0.1.0, its model and data: 6 steps in bf16, stochastic, two directions, two passes."""
    return shutil.copytree(FIXTURE, tmp_path / "old")


@pytest.fixture
def arguments(old):
    """Today's words for the recipe of that run."""
    values = yaml.safe_load((old / "recipe.yaml").read_text())
    assert values["zo"].pop("forward") == "two_pass"
    values["zo"]["probes_per_pass"] = 1
    values |= {"run_dir": str(old / "run"), "deepspeed": None}
    values["model"]["path"], values["data"]["path"] = str(old / "model"), str(old / "data")
    (old / "today.yaml").write_text(yaml.safe_dump(values))
    return ["--config", old / "today.yaml"]


def command(name, *arguments):
    return [python()[0], str(REPOSITORY / "launch" / f"{name}.py"), *map(str, arguments)]


def test_the_journal_is_read():
    header, records = read_journal(FIXTURE / "run" / "journal.jsonl")
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert header.libraries["lezo_ds"] == "0.1.0"
    assert [record.step for record in steps] == list(range(NUM_STEPS))
    assert all(len(record.projected_grads) == 2 and record.layer_weights == () for record in steps)


def test_a_finished_run_is_exported_and_goes_on(old, arguments):
    """No snapshot is left: the weights are replayed from the journal, and the digests are those of 0.1.0."""
    recorded = json.loads((old / "run" / "results.json").read_text())["weights_digest"]
    model = f"model.path={old / 'model'}"
    run_well(command("export", "--run", old / "run", "--step", NUM_STEPS, "--out", old / "model-6", model))
    assert digest_of(old / "model-6") == recorded
    before = (old / "run" / "journal.jsonl").read_bytes()
    run_well(python(*arguments))
    results = json.loads((old / "run" / "results.json").read_text())
    assert (results["weights_digest"], results["steps"]) == (recorded, NUM_STEPS)
    assert (old / "run" / "journal.jsonl").read_bytes() == before
    run_well(python(*arguments, f"train.steps={NUM_STEPS + 2}"))
    _, records = read_journal(old / "run" / "journal.jsonl")
    assert sum(isinstance(record, StepRecord) for record in records) == NUM_STEPS + 2
    assert (old / "run" / "journal.jsonl").read_bytes().startswith(before)


def test_a_pack_is_exported(old):
    recorded = json.loads((old / "run" / "results.json").read_text())["weights_digest"]
    pack, out = old / "pack.tar.gz", old / "unpacked"
    run_well(
        command("export", "--pack", pack, "--step", NUM_STEPS, "--out", out, f"model.path={old / 'model'}")
    )
    assert digest_of(out) == recorded


def test_another_number_of_directions_is_refused(old, arguments):
    assert_refused(python(*arguments, "zo.directions=4"), "config zo.directions", "expected: 2")
