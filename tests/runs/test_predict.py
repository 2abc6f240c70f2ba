"""Labels for new records, from any file, after a kill, by an export, its card, and a base model."""

from __future__ import annotations

import json
import shutil

import datasets
import pytest
import torch
import yaml
from commands import assert_one_error, run_forked, run_forked_well, wait_until
from own_data import VERBALIZERS, own_values, write_chat_model, write_tickets
from peft import PeftModel
from tiny_runs import write_model
from transformers import AutoConfig, AutoModelForCausalLM

from lezo_ds.data.records import read_records

pytestmark = pytest.mark.distributed
ODD = {"id": "8", "text": 'He said "no",\nthen {left};\r', "note": ""}
ASKED = {"prompt": "{text}\nThis is about", "chat_template": True, "system_prompt": "Be brief."}


def predict(*arguments, runner=run_forked_well, **options):
    return runner([*arguments, "train.eval_batch_size=2"], program="predict", **options)


def records_in(path):
    return list(read_records(str(path)))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run on tickets, its export, and new tickets without topics, labelled by the run."""
    directory = tmp_path_factory.mktemp("predict")
    model, tickets = (
        write_chat_model(directory / "base"),
        write_tickets(directory / "tickets.csv", 80),
    )
    data = {"train": str(tickets), "label_field": "topic", "labels": VERBALIZERS, "num_test": 20}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(own_values(model, **ASKED, **data)))
    run_forked_well(
        ["--config", directory / "recipe.yaml", f"run_dir={directory / 'run'}", "train.steps=4"]
    )
    run_forked_well(["--run", directory / "run", "--out", directory / "model"], program="export")
    new = [ODD, *({"id": r["id"], "text": r["text"], "note": "a;b"} for r in records_in(tickets))]
    table = datasets.Dataset.from_list(new)
    table.to_csv(directory / "new.csv", index=False)
    table.to_parquet(directory / "new.parquet")
    table.to_json(directory / "new.jsonl")
    (directory / "new.json").write_text(json.dumps(new))
    predict(
        "--run", directory / "run", directory / "new.jsonl", "--out", directory / "labels.jsonl"
    )
    return directory


@pytest.mark.parametrize("ending", ["csv", "json", "parquet"])
def test_an_export_labels_any_file_as_its_run_does_on_another_number_of_ranks(ending, root):
    new, out = root / f"new.{ending}", root / f"labels.{ending}"
    predict("--model", root / "model", new, "--out", out, num_ranks=2)
    labelled = records_in(out)
    assert [list(record.items())[:3] for record in labelled] == [
        [*r.items()] for r in records_in(new)
    ]
    found = [(r["predicted"], float(r["probability"])) for r in labelled]
    assert found == [(r["predicted"], r["probability"]) for r in records_in(root / "labels.jsonl")]
    assert {label for label, _ in found} <= {*VERBALIZERS}


def damaged_copy(directory, file, target):
    """Copy an export, and flip a bit of its last weight."""
    shutil.copytree(directory, target)
    data = bytearray((target / file).read_bytes())
    data[-1] ^= 4
    (target / file).write_bytes(data)
    return target


def test_a_flipped_bit_in_an_export_is_noticed(root, tmp_path):
    damaged = damaged_copy(root / "model", "model-00001.safetensors", tmp_path / "damaged")
    words = ["--model", damaged, root / "new.jsonl", "--out", tmp_path / "refused.jsonl"]
    refused = predict(*words, runner=run_forked)
    assert_one_error(refused, 2, f"{damaged} is damaged: model-00001.safetensors has changed")


def test_a_score_of_changed_records_is_said_to_be_of_others(root):
    tickets = root / "tickets.csv"
    run = ["--run", root / "run"]
    changed = "the test examples have changed since the run"
    assert changed not in run_forked_well(run, program="evaluate").err
    records = tickets.read_bytes()
    tickets.write_bytes(records.replace(b" (0", b" (1"))
    assert changed in run_forked_well(run, program="evaluate").err
    assert changed not in run_forked_well([*run, "data.seed=1"], program="evaluate").err
    tickets.write_bytes(records)


def assert_merged(command, base, adapter, merged):
    """Two ranks write what peft makes of the base and the adapter, but for the rounding of peft."""
    run_forked_well(command, program="export", num_ranks=2)
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert model.dtype == torch.bfloat16
    assert "added to the weights" in (merged / "README.md").read_text()
    tuned = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float()
    tuned = PeftModel.from_pretrained(tuned, adapter).merge_and_unload().state_dict()
    original = AutoModelForCausalLM.from_pretrained(base).state_dict()
    changed = set()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, tuned[name].bfloat16()), name
        if not torch.equal(weight, original[name].bfloat16()):
            changed.add(name.split(".")[-2])
    assert changed == {"q_proj", "fc1"}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_the_export_of_an_adapter_labels_and_scores_as_its_run(kind, root, tmp_path):
    keys = [f"peft.kind={kind}", "model.dtype=bf16", "zo.learning_rate=0.1", "train.steps=4"]
    if kind == "lora":
        keys += ["peft.lora_rank=2", "peft.lora_alpha=3", "peft.lora_targets=q_proj, fc1"]
    base, config = tmp_path / "base", ["--config", root / "recipe.yaml"]
    shutil.copytree(root / "base", base)
    run = ["--run", tmp_path / "run", "--step", "last"]
    run_forked_well([*config, f"run_dir={tmp_path / 'run'}", f"model.path={base}", *keys])
    export = ["--model", tmp_path / "adapter"]
    run_forked_well([*run, "--out", tmp_path / "adapter"], program="export")
    predict(*run, root / "new.jsonl", "--out", tmp_path / "run.jsonl")
    predict(*export, root / "new.jsonl", "--out", tmp_path / "export.jsonl", num_ranks=2)
    assert records_in(tmp_path / "export.jsonl") == records_in(tmp_path / "run.jsonl")
    assert "lezo-ds predict --model DIR" in (tmp_path / "adapter" / "README.md").read_text()
    merge = [*run, "--out", tmp_path / "merged", "--merge"]
    if kind == "lora":
        assert_merged(merge, base, tmp_path / "adapter", tmp_path / "merged")
    else:
        refused = run_forked(merge, program="export")
        assert_one_error(refused, 2, "has peft.kind=prefix; fix: remove --merge")
    moved = f"model.path={base.rename(tmp_path / 'moved')}"
    scores = [
        json.loads(run_forked_well([*words, "--json", moved], program="evaluate").out)
        for words in (run, [*export, *config])
    ]
    for name in ("num_examples", "score", "loss"):
        assert scores[0][name] == scores[1][name]
    asked = [*export, root / "new.jsonl", "--out", tmp_path / "refused.jsonl"]
    assert_one_error(predict(*asked, runner=run_forked), 2, f"model.path {base} is neither")
    file = next((tmp_path / "adapter").glob("*.safetensors")).name
    damaged = damaged_copy(tmp_path / "adapter", file, tmp_path / "damaged")
    refused = predict("--model", damaged, *asked[2:], runner=run_forked)
    assert_one_error(refused, 2, f"{damaged} is damaged: {file} has changed since")
    other = write_chat_model(tmp_path / "other")
    write_model(AutoConfig.from_pretrained(other), other, seed=1)
    refused = predict(*asked, f"model.path={other}", runner=run_forked)
    assert_one_error(refused, 2, f"adapter is not an adapter of {other} that")


def test_a_killed_run_continues_and_another_input_uses_none_of_its_chunks(root, tmp_path):
    asked = ["--model", root / "model", "--out", tmp_path / "l.jsonl"]
    own, out, other = root / "new.jsonl", tmp_path / "l.jsonl", tmp_path / "other.jsonl"
    other.write_text("".join(reversed(own.read_text().splitlines(keepends=True))))
    for command in ([*asked, other], [*asked, own, "data.system_prompt=Be kind."]):
        kill_after_a_chunk(root, tmp_path, own)
        predict(*command)
        assert str(KEPT) not in out.read_text()
        out.unlink()
    chunk = kill_after_a_chunk(root, tmp_path, own)
    predict(*asked, own)
    assert records_in(out) == with_kept(records_in(root / "labels.jsonl"))
    assert not chunk.parent.exists()
    assert_one_error(predict(*asked, own, runner=run_forked), 2, "l.jsonl exists")


def test_a_record_that_is_corrected_costs_no_chunk_but_its_own(root, tmp_path):
    lines = (root / "new.jsonl").read_text().splitlines(keepends=True)
    source = tmp_path / "tickets.jsonl"
    source.write_text("".join(lines))
    kill_after_a_chunk(root, tmp_path, source)
    lines[70] = lines[3]
    source.write_text("".join([*lines, lines[8]]))
    predict("--model", root / "model", source, "--out", tmp_path / "l.jsonl")
    expected = records_in(root / "labels.jsonl")
    expected[70] = expected[3]
    expected.append(expected[8])
    found = records_in(tmp_path / "l.jsonl")
    expected = with_kept(expected)
    for row, other in zip(found, expected, strict=True):
        # Other texts in a batch change the last bits.
        probability = pytest.approx(other["probability"], abs=2e-6)
        assert row == other | {"probability": probability}


KEPT = 7.25
"""A probability written into a finished chunk tells that the chunk was not made again."""


def with_kept(records):
    records[5] = {**records[5], "probability": KEPT}
    return records


def kill_after_a_chunk(root, folder, source):
    """Predict to l.jsonl, kill the process once it has a chunk, and mark and return that chunk."""

    def chunks():
        return list((folder / "l.jsonl.part").glob("chunk-0-*.json"))

    def kill(ranks):
        wait_until(chunks, ranks[0])
        ranks[0].kill()

    asked = ["--model", root / "model", source, "--out", folder / "l.jsonl"]
    assert predict(*asked, runner=run_forked, meanwhile=kill).code == -9
    (chunk,) = chunks()
    chunk.write_text(json.dumps(with_kept(json.loads(chunk.read_text()))))
    return chunk


def test_a_base_model_answers_a_question_and_a_conversation_alike(root, tmp_path):
    texts = ("Box 1?", "And 2?")
    rows = [{"text": text, "turns": [{"role": "user", "content": text}]} for text in texts]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["--model", root / "base", tmp_path / "asked.jsonl", "generation.max_new_tokens=5"]
    prompt, chat = (["--out", tmp_path / name] for name in ("prompt.jsonl", "chat.jsonl"))
    predict(*asked, *prompt, "data.prompt={text}", "data.chat_template=true")
    predict(*asked, *chat, "data.messages=turns", "generation.stop=[]")
    answers = records_in(chat[1])
    assert answers == records_in(prompt[1])
    assert [[*record] for record in answers] == [["text", "turns", "predicted"]] * 2


def test_each_label_has_its_probability_and_an_unsure_one_stays_empty(root, tmp_path):
    new, out = root / "new.csv", tmp_path / "labels.csv"
    predict("--model", root / "model", new, "--out", out, "--probabilities", "--threshold=0.9")
    known = {record["id"]: record for record in records_in(root / "labels.jsonl")}
    for record in records_in(out):
        shares = [float(record[f"probability_{label}"]) for label in sorted(VERBALIZERS)]
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert max(shares) == float(record["probability"]) < 0.9
        best = sorted(VERBALIZERS)[shares.index(max(shares))]
        assert (best, record["predicted"]) == (known[record["id"]]["predicted"], "")
    again = tmp_path / "again.csv"
    predict("--model", root / "model", new, "--out", again, "--threshold=0.1")
    assert all(record["predicted"] for record in records_in(again))


def test_each_row_of_a_table_has_its_own_in_its_encoding(root, tmp_path):
    new = tmp_path / "new.csv"
    new.write_text('id;text\n1;"a\nb"\n2;Grüße aus Köln\n', encoding="cp1252")
    out = tmp_path / "labels.csv"
    keys = ("data.separator=;", "data.encoding=cp1252")
    predict("--model", root / "model", new, "--out", out, *keys)
    records = list(read_records(str(out), ";", "cp1252"))
    assert [record["text"] for record in records] == ["a\nb", "Grüße aus Köln"]
    assert list(records[0]) == ["id", "text", "predicted", "probability"]


REFUSED = {
    "record 2: there is no column text": ('{"text": "a"}\n{"txt": "b"}\n', ()),
    "record 1: it has half of a character": ('{"text": "\\ud83d"}\n', ()),
    "has no records": ("", ()),
    "the records already have a field predicted": ('{"text": "a", "predicted": 1}\n', ()),
    "--probabilities and --threshold are about labels": ('{"text": "a"}\n', ("--probabilities",)),
    "1.5 is not a number from 0 to 1": ('{"text": "a"}\n', ("--threshold=1.5",)),
}


@pytest.mark.parametrize("expected", REFUSED)
def test_bad_input_is_one_line_that_names_the_row(expected, root, tmp_path):
    content, options = REFUSED[expected]
    (tmp_path / "n.jsonl").write_text(content)
    words = ["--model", root / "base", tmp_path / "n.jsonl", "data.prompt={text}:", *options]
    refused = predict(*words, "--out", tmp_path / "out.jsonl", runner=run_forked)
    assert_one_error(refused, 2, expected)


def test_an_export_is_scored_on_one_file_and_written_as_a_run(root, tmp_path):
    out = tmp_path / "scored"
    words = ["--model", root / "model", f"data.test={root / 'tickets.csv'}", "--out", out, "--json"]
    scores = json.loads(run_forked_well(words, program="evaluate").out)
    results = json.loads((out / "results.json").read_text())
    assert (results["test"], results["steps"]) == (scores["score"], 0)
    assert results["method"] == "zero-shot"
    assert scores["num_examples"] == 80
    (rows,) = (out / "predictions").iterdir()
    assert len(rows.read_text().splitlines()) == 80
    assert yaml.safe_load((out / "config.yaml").read_text())["data"]["prompt"] == ASKED["prompt"]
    refused = run_forked(words, program="evaluate")
    assert_one_error(refused, 2, "scored exists and is not an empty directory")
    refused = run_forked(["--model", root / "base"], program="evaluate")
    assert_one_error(refused, 2, "base names no task")
