"""Labels for new records, from any file, after a kill, by an export, its card, a run and a base model."""

from __future__ import annotations

import json
import re

import datasets
import pytest
import yaml
from commands import assert_one_error, run_forked, run_forked_well, wait_until
from own_data import VERBALIZERS, own_values, write_chat_model, write_tickets

from lezo_ds.data.tables import read_file

pytestmark = pytest.mark.distributed
ODD = {"id": "8", "text": 'He said "no",\nthen {left};\r', "note": ""}
ASKED = {"prompt": "{text}\nThis is about", "chat_template": True, "system_prompt": "Be brief."}


def predict(*arguments, runner=run_forked_well, **options):
    return runner([*arguments, "train.eval_batch_size=2"], program="predict", **options)


def records_in(path):
    return [record for _, record in read_file(path)]


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
    table.to_csv(directory / "new.CSV", index=False)
    table.to_parquet(directory / "new.parquet")
    table.to_json(directory / "new.jsonl")
    (directory / "new.json").write_text(json.dumps(new))
    predict(
        "--run", directory / "run", directory / "new.jsonl", "--out", directory / "labels.jsonl"
    )
    return directory


@pytest.mark.parametrize("ending", ["CSV", "json", "parquet"])
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


def test_the_program_in_the_card_finds_the_same_probabilities(root):
    (program,) = re.findall(
        r"```python\n(.*?)```", (root / "model" / "README.md").read_text(), re.DOTALL
    )
    for record in records_in(root / "labels.jsonl")[:3]:
        first = f"DIR, record = {str(root / 'model')!r}, {record!r}"
        exec(re.sub(r"DIR, record = .*", lambda _: first, program), values := {})  # noqa: B023
        best = max(values["probabilities"], key=values["probabilities"].get)
        assert best == record["predicted"]
        assert values["probabilities"][best] == pytest.approx(record["probability"], abs=2e-6)


def test_a_killed_run_continues_and_another_input_is_refused(root, tmp_path):
    asked = ["--model", root / "model", "--out", tmp_path / "l.jsonl"]
    own, part = root / "new.jsonl", tmp_path / "l.jsonl.part"

    def kill(ranks):
        wait_until((part / "0.json").is_file, ranks[0])
        ranks[0].kill()

    assert predict(*asked, own, runner=run_forked, meanwhile=kill).code == -9
    first = (part / "0.json").stat()
    (tmp_path / "other.jsonl").write_text(own.read_text() * 2)
    refused = predict(*asked, tmp_path / "other.jsonl", runner=run_forked)
    assert_one_error(refused, 2, "is of another input, model or setting")
    assert (part / "0.json").stat() == first
    predict(*asked, own)
    assert (tmp_path / "l.jsonl").read_bytes() == (root / "labels.jsonl").read_bytes()
    assert not part.exists()
    assert_one_error(predict(*asked, own, runner=run_forked), 2, "l.jsonl exists")


def test_a_base_model_answers_a_question_and_a_conversation_alike(root, tmp_path):
    lines = [
        {"text": text, "turns": [{"role": "user", "content": text}]}
        for text in ("Box 1?", "And 2?")
    ]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = [
        "--model",
        root / "base",
        tmp_path / "asked.jsonl",
        "generation.max_new_tokens=5",
        "--out",
    ]
    predict(*asked, tmp_path / "prompt.jsonl", "data.prompt={text}", "data.chat_template=true")
    predict(*asked, tmp_path / "chat.jsonl", "data.messages=turns")
    answers = records_in(tmp_path / "chat.jsonl")
    assert answers == records_in(tmp_path / "prompt.jsonl")
    assert [[*record] for record in answers] == [["text", "turns", "predicted"]] * 2


BAD = {
    "record 2 (FILE line 2) has no field text": '{"text": "a"}\n{"txt": "b"}\n',
    "has no records": "",
    "record 1 (FILE line 1) has a field predicted already": '{"text": "a", "predicted": 1}\n',
}


@pytest.mark.parametrize("expected", BAD)
def test_bad_input_is_one_line_that_names_the_row(expected, root, tmp_path):
    file, keys = tmp_path / "n.jsonl", ("data.prompt={text}:", "--out", tmp_path / "out.jsonl")
    file.write_text(BAD[expected])
    refused = predict("--model", root / "base", file, *keys, runner=run_forked)
    assert_one_error(refused, 2, expected.replace("FILE", str(file)))
