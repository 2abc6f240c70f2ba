"""A chat template's values, from training to an export and to transformers' own pipeline."""

import json

import pytest
import yaml
from assets import change_json, read_lines, write_records
from commands import lezo, train
from own_data import COLORS, SWITCHED, own_values, write_chat_model, write_conversations
from run_ends import results_of
from transformers import AutoTokenizer, pipeline

pytestmark = pytest.mark.distributed
THOUGHT = "<think>\n\n</think>\n\n"


def test_a_model_that_was_trained_without_thoughts_does_not_think_after_its_export(tmp_path):
    model = write_chat_model(tmp_path / "base", SWITCHED)
    recipe, run, out = (tmp_path / name for name in ("recipe.yaml", "run", "out"))
    # As older tokenizers have several templates.
    named = [{"name": name, "template": SWITCHED} for name in ("default", "tool_use")]
    change_json(model / "tokenizer_config.json", chat_template=named)
    (model / "chat_template.jinja").unlink()
    # Such as that of a base model: the token that ends turns ends no text.
    (model / "generation_config.json").write_text('{"eos_token_id": 1}')
    chats = write_conversations(tmp_path / "chats.jsonl")
    values = own_values(model, train=str(chats), messages="turns")
    values["data"]["chat_template_kwargs"] = {"enable_thinking": False}
    values["generation"] = {"max_new_tokens": 8}
    recipe.write_text(yaml.safe_dump(values))
    train(recipe, run, "train.steps=4", num_ranks=2)
    assert results_of(run)["metric"] == "token_accuracy"
    (rows, *_) = sorted((run / "predictions").iterdir())
    # An answer is a row, with the token that ends its turn and the newline. A byte is a token.
    sizes = {f"{len(answer) + 2} tokens" for answer in ("Yes.", *COLORS)}
    assert {row["predicted"].split(" of ")[1] for row in read_lines(rows)} <= sizes
    lezo("export", "--run", run, "--out", out)

    turns = [{"role": "user", "content": "Box 0?"}]
    written = {"tokenize": False, "add_generation_prompt": True}
    base = AutoTokenizer.from_pretrained(model)
    asked = base.apply_chat_template(turns, enable_thinking=False, **written)
    exported = AutoTokenizer.from_pretrained(out)
    assert asked.endswith(THOUGHT)
    for tools in (None, [{"name": "f"}]):
        assert exported.apply_chat_template(turns, tools, **written) == asked
    thinking = exported.apply_chat_template(turns, enable_thinking=True, **written)
    assert thinking == asked.removesuffix(THOUGHT)

    settings = json.loads((out / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [1, exported.eos_token_id]}
    writer = pipeline("text-generation", model=str(out))
    answer = writer(turns, max_new_tokens=8, do_sample=False, return_full_text=False)
    write_records(tmp_path / "new.jsonl", [{"turns": turns}])
    lezo("predict", "--model", out, tmp_path / "new.jsonl", "--out", tmp_path / "p.jsonl")
    (predicted,) = read_lines(tmp_path / "p.jsonl")
    assert predicted["predicted"] == answer[0]["generated_text"].split("</s>")[0].strip()
