"""Labels for new records, from any file, after a kill, by an export, its card, and a base model."""

import json
import shutil

import datasets
import pytest
import torch
import yaml
from assets import read_lines
from commands import assert_refused, lezo, run_forked, scores_of, train, wait_until
from own_data import VERBALIZERS, own_values, write_chat_model, write_tickets
from peft import PeftModel
from run_ends import results_of
from tiny_runs import write_model
from transformers import AutoConfig, AutoModelForCausalLM

from lezo_ds.data.records import read_records

pytestmark = pytest.mark.distributed
ODD = {"id": "8", "text": 'He said "no",\nthen {left};\r', "note": ""}
ASKED = {"prompt": "{text}\nThis is about", "chat_template": True, "system_prompt": "Be brief."}
TWO = "train.eval_batch_size=2"


def predict(*arguments, **options):
    return lezo("predict", *arguments, TWO, **options)


def records_in(path):
    return list(read_records(str(path)))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run on tickets, its export, and new tickets without topics, labelled by the run."""
    directory = tmp_path_factory.mktemp("predict")
    recipe, run, new = (directory / name for name in ("recipe.yaml", "run", "new.jsonl"))
    model = write_chat_model(directory / "base")
    tickets = write_tickets(directory / "tickets.csv", 80)
    data = {"train": str(tickets), "label_field": "topic", "labels": VERBALIZERS, "num_test": 20}
    recipe.write_text(yaml.safe_dump(own_values(model, **ASKED, **data)))
    train(recipe, run, "train.steps=4")
    lezo("export", "--run", run, "--out", directory / "model")
    rows = [ODD, *({"id": r["id"], "text": r["text"], "note": "a;b"} for r in records_in(tickets))]
    table = datasets.Dataset.from_list(rows)
    table.to_csv(new.with_suffix(".csv"), index=False)
    table.to_json(new)
    predict("--run", run, new, "--out", directory / "labels.jsonl")
    return directory


def test_an_export_labels_another_file_as_its_run_does_on_another_number_of_ranks(root):
    new, out = root / "new.csv", root / "labels.csv"
    predict("--model", root / "model", new, "--out", out, num_ranks=2)
    labelled = records_in(out)
    rows = [list(record.items()) for record in records_in(new)]
    assert [list(record.items())[:3] for record in labelled] == rows
    found = [(r["predicted"], float(r["probability"])) for r in labelled]
    assert found == [(r["predicted"], r["probability"]) for r in records_in(root / "labels.jsonl")]
    assert {label for label, _ in found} <= {*VERBALIZERS}


def assert_a_flipped_bit_is_noticed(export, file, folder, new):
    damaged = shutil.copytree(export, folder / "damaged")
    data = bytearray((damaged / file).read_bytes())
    data[-1] ^= 4
    (damaged / file).write_bytes(data)
    words = ["--model", damaged, new, "--out", folder / "refused.jsonl"]
    assert_refused("predict", words, f"{damaged} is damaged: {file} has changed")


def test_a_flipped_bit_in_an_export_is_noticed(root, tmp_path):
    new = root / "new.jsonl"
    assert_a_flipped_bit_is_noticed(root / "model", "model-00001.safetensors", tmp_path, new)


def test_a_score_of_changed_records_is_said_to_be_of_others(root):
    tickets = root / "tickets.csv"
    run = ["--run", root / "run"]
    changed = "the test examples have changed since the run"
    assert changed not in lezo("evaluate", *run).err
    records = tickets.read_bytes()
    tickets.write_bytes(records.replace(b" (0", b" (1"))
    assert changed in lezo("evaluate", *run).err
    assert changed in lezo("evaluate", *run, "data.seed=0").err  # the run's own
    assert changed not in lezo("evaluate", *run, "data.seed=1").err
    tickets.write_bytes(records)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_the_export_of_an_adapter_labels_and_scores_as_its_run(kind, root, tmp_path):
    keys = [f"peft.kind={kind}", "model.dtype=bf16", "zo.learning_rate=0.1", "train.steps=4"]
    if kind == "lora":
        keys += ["peft.lora_rank=2", "peft.lora_alpha=3", "peft.lora_targets=q_proj, fc1"]
    adapter, recipe, new = tmp_path / "adapter", root / "recipe.yaml", root / "new.jsonl"
    base = shutil.copytree(root / "base", tmp_path / "base")
    train(recipe, tmp_path / "run", f"model.path={base}", *keys)
    run = ["--run", tmp_path / "run", "--step", "last"]
    lezo("export", *run, "--out", adapter)
    predict(*run, new, "--out", tmp_path / "run.jsonl")
    predict("--model", adapter, new, "--out", tmp_path / "export.jsonl", num_ranks=2)
    assert records_in(tmp_path / "export.jsonl") == records_in(tmp_path / "run.jsonl")
    assert "lezo-ds predict --model DIR" in (adapter / "README.md").read_text()
    merged = tmp_path / "merged"
    merge = [*run, "--out", merged, "--merge"]
    if kind == "lora":  # peft has its own rounding
        lezo("export", *merge, num_ranks=2)
        tuned = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float()
        expected = PeftModel.from_pretrained(tuned, adapter).merge_and_unload().state_dict()
        found = AutoModelForCausalLM.from_pretrained(merged).state_dict()
        assert all(torch.equal(found[name], expected[name].bfloat16()) for name in found)
    else:
        assert_refused("export", merge, "has peft.kind=prefix; fix: remove --merge")
    moved = f"model.path={base.rename(tmp_path / 'moved')}"
    of_run = scores_of(*run, moved)
    of_export = scores_of("--model", adapter, "--config", recipe, moved)
    for name in ("num_examples", "score", "loss"):
        assert of_run[name] == of_export[name]
    asked = ["--model", adapter, new, "--out", tmp_path / "refused.jsonl"]
    assert_refused("predict", asked, f"model.path {base} is neither")
    file = next(adapter.glob("*.safetensors")).name
    assert_a_flipped_bit_is_noticed(adapter, file, tmp_path, new)
    other = write_chat_model(tmp_path / "other")
    write_model(AutoConfig.from_pretrained(other), other, seed=1)
    words = [*asked, f"model.path={other}"]
    assert_refused("predict", words, f"adapter is not an adapter of {other} that")


def test_a_killed_run_continues_and_another_input_uses_none_of_its_chunks(root, tmp_path):
    own, out, other = root / "new.jsonl", tmp_path / "l.jsonl", tmp_path / "other.jsonl"
    asked = ["--model", root / "model", "--out", out]
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
    assert_refused("predict", [*asked, own], "l.jsonl exists")


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
    for row, other in zip(found, with_kept(expected), strict=True):
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

    asked = ["--model", root / "model", source, "--out", folder / "l.jsonl", TWO]
    assert run_forked(asked, "predict", meanwhile=kill).code == -9
    (chunk,) = chunks()
    chunk.write_text(json.dumps(with_kept(json.loads(chunk.read_text()))))
    return chunk


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
    "half is not a number from 0 to 1": ('{"text": "a"}\n', ("--threshold=half",)),
}


@pytest.mark.parametrize("expected", REFUSED)
def test_bad_input_is_one_line_that_names_the_row(expected, root, tmp_path):
    content, options = REFUSED[expected]
    (tmp_path / "n.jsonl").write_text(content)
    words = ["--model", root / "base", tmp_path / "n.jsonl", "data.prompt={text}:", *options]
    assert_refused("predict", [*words, "--out", tmp_path / "out.jsonl"], expected)


def test_an_export_is_scored_on_one_file_and_written_as_a_run(root, tmp_path):
    out = tmp_path / "scored"
    words = ["--model", root / "model", f"data.test={root / 'tickets.csv'}", "--out", out]
    scores = scores_of(*words)
    results = results_of(out)
    assert (results["test"], results["steps"]) == (scores["score"], 0)
    assert (results["method"], results["zero_shot"]) == ("exported model", None)
    assert scores["num_examples"] == 80
    (rows,) = (out / "predictions").iterdir()
    assert len(read_lines(rows)) == 80
    assert yaml.safe_load((out / "config.yaml").read_text())["data"]["prompt"] == ASKED["prompt"]
    assert_refused("evaluate", words, "scored exists and is not an empty directory")
    other = scores_of(*words[:3], "data.prompt=Of {text}:")
    assert other["by_label"].keys() == scores["by_label"].keys()
    assert_refused("evaluate", ["--model", root / "base"], "base names no task")
