"""A chat template's values, from training to an export and to transformers' own pipeline."""

from __future__ import annotations

import json

import pytest
import yaml
from commands import run_forked_well
from own_data import COLORS, SWITCHED, conversation, own_values, write_chat_model
from run_ends import results_of
from transformers import AutoTokenizer, pipeline

from lezo_ds.data.records import read_records

pytestmark = pytest.mark.distributed
THOUGHT = "<think>\n\n</think>\n\n"


def test_a_model_that_was_trained_without_thoughts_does_not_think_after_its_export(tmp_path):
    model = write_chat_model(tmp_path / "base", SWITCHED)
    # As older tokenizers have several templates.
    settings = json.loads((model / "tokenizer_config.json").read_text())
    names = ("default", "tool_use")
    settings["chat_template"] = [{"name": name, "template": SWITCHED} for name in names]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").unlink()
    # Such as that of a base model: the token that ends turns ends no text.
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": 1}')
    rows = [{"turns": conversation(number)} for number in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = own_values(model, train=str(tmp_path / "chats.jsonl"), messages="turns")
    values["data"]["chat_template_kwargs"] = {"enable_thinking": False}
    values["generation"] = {"max_new_tokens": 8}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    run = tmp_path / "run"
    train = ["--config", tmp_path / "recipe.yaml", f"run_dir={run}", "train.steps=4"]
    run_forked_well(train, num_ranks=2)
    assert results_of(run)["metric"] == "token_accuracy"
    (rows, *_) = sorted((run / "predictions").iterdir())
    # An answer is a row, with the token that ends its turn and the newline. A byte is a token.
    sizes = {f"{len(answer) + 2} tokens" for answer in ("Yes.", *COLORS)}
    assert {row["predicted"].split(" of ")[1] for row in map(json.loads, rows.open())} <= sizes
    run_forked_well(["--run", run, "--out", tmp_path / "out"], program="export")

    turns = conversation(0)[:1]
    written = {"tokenize": False, "add_generation_prompt": True}
    asked = AutoTokenizer.from_pretrained(model).apply_chat_template(
        turns, enable_thinking=False, **written
    )
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert asked.endswith(THOUGHT)
    for tools in (None, [{"name": "f"}]):
        assert exported.apply_chat_template(turns, tools, **written) == asked
    thinking = exported.apply_chat_template(turns, enable_thinking=True, **written)
    assert thinking == asked.removesuffix(THOUGHT)

    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [1, exported.eos_token_id]}
    writer = pipeline("text-generation", model=str(tmp_path / "out"))
    answer = writer(turns, max_new_tokens=8, do_sample=False, return_full_text=False)
    (tmp_path / "new.jsonl").write_text(json.dumps({"turns": turns}) + "\n")
    words = ["--model", tmp_path / "out", tmp_path / "new.jsonl", "--out", tmp_path / "p.jsonl"]
    run_forked_well(words, program="predict")
    (predicted,) = read_records(str(tmp_path / "p.jsonl"))
    assert predicted["predicted"] == answer[0]["generated_text"].split("</s>")[0].strip()
