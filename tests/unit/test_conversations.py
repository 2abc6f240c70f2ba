"""Conversations as users have them: tools, system prompts, parts, Arrow's nulls, TRL's layout."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lezo_ds.tasks.base import ArrowRecord
from lezo_ds.tasks.conversations import find_tools, read_messages
from lezo_ds.tasks.custom import Description, make_task
from own_data import PLAIN, own_values, write_byte_model, write_chat_model
from transformers import AutoTokenizer

from lezo_ds.config import config_from_dict
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError

TEMPLATE = "{% if tools %}{{ '<s>tools ' + (tools | tojson) + '</s>' }}{% endif %}" + PLAIN.replace(
    "turn['content'] +",
    "turn['content'] + (turn.tool_calls | tojson if turn.tool_calls else '') +",
)


def tool(name, *arguments):
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [tool("weather", "city"), tool("sum", "a", "b")]
CALLS = [call("weather", city="Oslo"), call("sum", a="1", b="2")]


def record(number, **others):
    turns = [
        {"role": "user", "content": f"Cold {number}?"},
        {"role": "assistant", "content": "", "tool_calls": [CALLS[number % 2]]},
        {"role": "tool", "content": "-3"},
        {"role": "assistant", "content": f"Yes, {number}."},
    ]
    return {"turns": turns, **others}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    plain = PLAIN.replace("turn['content']", "(turn['content'] if turn.role != 'system' else '')")
    return {
        "tools": write_chat_model(root / "tools", TEMPLATE),
        "no tools or system": write_chat_model(root / "plain", plain),
        "no template": write_byte_model(root / "bytes"),
    }


def load(model, path, rows=(), **data):
    if rows:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = {"messages": "turns"} if "prompt" not in data else {"chat_template": True}
    values = own_values(model, train=str(path), **described | data) | {"run_dir": "none"}
    values["data"]["max_length"] = 2048
    config_file = model / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return load_task_data(config_from_dict(values, "test"))


def read_and_learned(data):
    """Return the text of each example, and that of its learned tokens."""
    texts = []
    for encoded in data.train.encoded:
        (sequence,) = encoded.sequences
        learned = [sequence[place] for place in encoded.targets(0)]
        texts.append((data.tokenizer.decode(sequence), data.tokenizer.decode(learned)))
    return texts


def test_definitions_of_tools_are_read_from_json(models, tmp_path):
    rows = [record(number) for number in range(10)]
    expected = load(
        models["tools"], tmp_path / "a.jsonl", [{**row, "tools": TOOLS} for row in rows]
    )
    in_json = json.dumps(TOOLS)
    found = load(models["tools"], tmp_path / "b.jsonl", [{**row, "tools": in_json} for row in rows])
    assert read_and_learned(found) == read_and_learned(expected)
    assert read_and_learned(found)[0][0].startswith("tools [{")


@pytest.mark.parametrize("tools", ["a hammer", {"name": "weather"}, [1], "[1]"])
def test_a_field_of_tools_without_definitions_is_refused(tools, models, tmp_path):
    rows = [record(number, tools=tools) for number in range(10)]
    with pytest.raises(UserError, match=r"field tools is .*, not a list of definitions of tools"):
        load(models["tools"], tmp_path / "a.jsonl", rows)
    asked = [{**row, "asked": row.pop("turns")[:1], "answer": "Yes."} for row in rows]
    with pytest.raises(UserError, match=r"field tools is .*, not a list of definitions of tools"):
        load(models["tools"], tmp_path / "b.jsonl", asked, prompt="{asked}", completion="{answer}")


def test_nulls_that_arrow_fills_in_are_not_read(models, tmp_path):
    written = json.dumps([record(number, tools=TOOLS) for number in range(10)], sort_keys=True)
    rows = json.loads(written)  # with its keys in the order of older versions of pyarrow
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    stored = pq.read_table(tmp_path / "data.parquet").to_pylist()
    assert stored[0]["turns"][1]["tool_calls"][0]["function"]["arguments"]["a"] is None
    expected = load(models["tools"], tmp_path / "data.jsonl", rows)
    assert read_and_learned(load(models["tools"], tmp_path / "data.parquet")) == read_and_learned(
        expected
    )
    assert read_messages(ArrowRecord(stored[0]), "turns") == read_messages(rows[0], "turns")
    assert find_tools(ArrowRecord(stored[0])) == TOOLS


def test_a_null_that_a_json_file_has_is_read():
    turns = [{"role": "assistant", "content": None, "tool_calls": [call("weather", city=None)]}]
    (turn,) = read_messages({"turns": turns}, "turns")
    assert turn.others["tool_calls"][0]["function"]["arguments"] == {"city": None}
    assert turn.content == ""


def test_predict_reads_tools_and_system_prompts_as_training_does(models, tmp_path):
    task = make_task(Description(messages="turns"))
    row = record(0, tools=json.dumps(TOOLS), system="Be brief.")
    asked = task.unanswered().example(row)
    assert [turn.content for turn in asked.messages[:2]] == ["Be brief.", "Cold 0?"]
    assert asked.messages[:-1] == task.example(row).messages[:-1]
    call_turn = {"from": "function_call", "value": json.dumps({"name": "weather"})}
    spoken = {"from": "gpt", "value": "Let me look."}
    for answer in ([spoken, call_turn], [call_turn, call_turn]):
        row = {"turns": [{"from": "human", "value": "Cold?"}, *answer]}
        assert task.unanswered().example(row).messages[:-1] == (("user", "Cold?", 1, {}),)


def test_a_system_field_is_the_system_turn_unless_the_conversation_has_one(models, tmp_path):
    own = Description(messages="turns", system_prompt="Be kind.")
    task = make_task(own)
    for row, expected in (
        (record(0, system="Be brief."), "Be brief."),
        (record(0, system_prompt="Be brief."), "Be brief."),
        (record(0, system=" "), "Be kind."),
        (record(0), "Be kind."),
    ):
        assert task.example(row).messages[0] == ("system", expected, 1, {})
    row = record(0, system="Be brief.")
    row["turns"].insert(0, {"role": "system", "content": "Be right."})
    assert task.example(row).messages[0].content == "Be right."


def test_a_field_in_the_system_prompt_is_refused(models, tmp_path):
    rows = [record(number, tone="kind") for number in range(10)]
    load(models["tools"], tmp_path / "a.jsonl", rows, system_prompt='Write {"tone": 1}.')
    with pytest.raises(
        UserError, match=r"system_prompt is no template, and has \{tone\}; fix: put"
    ):
        load(models["tools"], tmp_path / "a.jsonl", rows, system_prompt="Be {tone}.")


def test_what_the_template_does_not_write_is_named_with_its_number(models, tmp_path, caplog):
    rows = [record(number) for number in range(10)]
    for row in rows:
        row["turns"] = [row["turns"][0] | {"name": "Ann"}, row["turns"][3]]
    for row in rows[:7]:
        row |= {"tools": TOOLS, "system": "Be brief.", "history": [["Hi", "Hello"]]}
    data = load(models["no tools or system"], tmp_path / "a.jsonl", rows, num_dev=1, num_test=1)
    count = sum("tools" in example.record for example in data.train.examples)
    for name in ("tools", "system", "history"):
        naming = [text for text in caplog.messages if f"does not read {name}," in text]
        assert len(naming) == 1  # the other splits have it, too
        message = f"the model does not read {name}, which {count} of 8 records have"
        assert caplog.messages.count(message) == 1
    assert "the model does not read name, which 8 of 8 records have" in caplog.messages
    caplog.clear()
    load(
        models["tools"], tmp_path / "b.jsonl", [record(number, tools=TOOLS) for number in range(9)]
    )
    assert "does not read" not in caplog.text


def test_columns_of_a_conversation_that_a_prompt_leaves_out_are_named(models, tmp_path, caplog):
    rows = [
        {
            "instruction": f"Add {n}",
            "input": f"{n} and 1",
            "output": str(n + 1),
            "system": "Be kind",
        }
        for n in range(10)
    ]
    load(models["tools"], tmp_path / "a.jsonl", rows, prompt="{instruction}", completion="{output}")
    assert "the model does not read input, which 6 of 6 records have" in caplog.messages
    assert "the model does not read system, which 6 of 6 records have" in caplog.messages
    assert "instruction" not in caplog.text


@pytest.mark.parametrize("key", ["content", "value"])
def test_a_content_may_be_a_list_of_parts_with_text(key):
    parts = [{"type": "text", "text": "Where "}, {"type": "text", "text": "is it?", "image": None}]
    turns = [{"role": "user", key: parts}, {"role": "assistant", key: ["There"]}]
    messages = read_messages({"turns": turns}, "turns")
    assert [turn.content for turn in messages] == ["Where is it?", "There"]
    turns[0][key] = [*parts, {"type": "image", "url": "a.png"}]
    with pytest.raises(
        UserError, match="turn 1 of field turns has a part that is not text: 'image'"
    ):
        read_messages({"turns": turns}, "turns")


def test_a_text_may_be_under_either_key():
    for turn in ({"content": None, "value": "Hi"}, {"content": "Hi", "value": None}):
        (message,) = read_messages({"turns": [{"role": "user", **turn}]}, "turns")
        assert message.content == "Hi"


def test_openais_earlier_key_of_a_call_is_a_call():
    turn = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "sum", "arguments": "{}"},
    }
    (message,) = read_messages({"turns": [turn]}, "turns")
    assert message.others["tool_calls"][0]["function"]["name"] == "sum"


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("Assistant", "assistant"),
        ("USER", "user"),
        ("bing", "assistant"),
        ("model", "assistant"),
        ("human", "user"),
        ("observation", "tool"),
        ("tool_response", "tool"),
        ("developer", "developer"),
        ("IPython", "IPython"),
    ],
)
def test_roles_have_the_names_of_templates(role, expected):
    (turn,) = read_messages({"turns": [{"from": role, "value": "Hi"}]}, "turns")
    assert turn.role == expected


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
def test_a_turn_may_say_that_it_is_not_learned(key):
    turns = [
        {"role": "assistant", "content": "Hi", key: value} for value in (0, 1, False, True, None)
    ]
    are_trained = [turn.is_trained for turn in read_messages({"turns": turns}, "turns")]
    assert are_trained == [False, True, False, True, True]


FUNCTION = {"name": "sum", "arguments": {"a": "1"}}


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "function_call", "value": json.dumps(FUNCTION)},
        {"role": "tool_call", "content": json.dumps(FUNCTION)},
        {"role": "assistant", "content": None, "tool_calls": [FUNCTION]},
        {"role": "assistant", "tool_calls": json.dumps([call("sum", a="1")])},
        {"role": "assistant", "content": "", "function_call": FUNCTION},
    ],
)
def test_a_call_in_any_layout_is_one(turn):
    (message,) = read_messages({"turns": [turn]}, "turns")
    calls = [{"type": "function", "function": FUNCTION}]
    assert message == ("assistant", "", 1, {"tool_calls": calls})


def test_calls_of_adjacent_turns_are_one_turn():
    one, two = ({"name": name, "arguments": {"a": 1}} for name in ("sum", "half"))
    roles = [
        ("assistant", "I add."),
        ("tool_call", json.dumps(one)),
        ("tool_call", json.dumps(two)),
    ]
    roles += [("tool_response", "1"), ("tool_call", json.dumps(two))]
    turns = [{"role": role, "content": content} for role, content in roles]
    first, tool, last = read_messages({"turns": turns}, "turns")
    assert (first.content, tool.content, last.content) == ("I add.", "1", "")
    assert [call["function"] for call in first.others["tool_calls"]] == [one, two]
    assert [call["function"] for call in last.others["tool_calls"]] == [two]


def test_a_call_that_is_no_json_stays_text():
    (message,) = read_messages({"turns": [{"from": "function_call", "value": "sum(1)"}]}, "turns")
    assert message == ("assistant", "sum(1)", 1, {})


def test_a_key_of_a_turn_goes_to_the_template_or_is_named(tmp_path, caplog):
    template = PLAIN.replace("turn['content'] +", "turn['content'] + (turn.mood or '') +")
    model = write_chat_model(tmp_path / "model", template)
    rows = [record(number) for number in range(10)]
    for row in rows:
        row["turns"] = [row["turns"][0], row["turns"][3] | {"mood": " Cheers", "thought": "So so"}]
    data = load(model, tmp_path / "a.jsonl", rows, num_dev=1, num_test=1)
    assert {learned[-7:] for _, learned in read_and_learned(data)} == {" Cheers"}
    assert "the model does not read thought, which 8 of 8 records have" in caplog.messages
    assert "does not read mood" not in caplog.text


def test_an_answer_that_repeats_its_prompt_asks_it_once():
    task = make_task(Description(prompt="{prompt}", completion="{chosen}", chat_template=True))
    whole = [{"role": "user", "content": "Where?"}, *ANSWER]
    for prompt in ("Where?", whole[:1]):
        example = task.example({"prompt": prompt, "chosen": whole})
        assert [turn.content for turn in example.messages] == ["Where?", "There"]
        assert [turn.is_trained for turn in example.messages] == [False, True]


PROMPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Where?"},
]
ANSWER = [{"role": "assistant", "content": "There"}]


@pytest.mark.parametrize("completion", [ANSWER, "There"])
def test_trls_prompt_and_completion_are_a_conversation_whose_answer_is_learned(
    completion, models, tmp_path
):
    rows = [{"prompt": PROMPT, "completion": completion}] * 10
    data = load(
        models["tools"], tmp_path / "a.jsonl", rows, prompt="{prompt}", completion="{completion}"
    )
    backend = AutoTokenizer.from_pretrained(models["tools"])
    text, learned = read_and_learned(data)[0]
    whole = backend.apply_chat_template([*PROMPT, *ANSWER], tokenize=False)
    assert learned == "There"
    special = ("<s>", "</s>")
    for token in special:
        whole = whole.replace(token, "")
    assert text == whole.rstrip("\n")
    question = backend.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
    assert list(data.test.prompts[0]) == question
    assert data.train.examples[0].references == ("There",)


def test_answers_that_are_calls_cannot_be_scored_and_are_counted(models, tmp_path, caplog):
    calling = [{"role": "assistant", "content": "", "tool_calls": [CALLS[0]]}]
    for completion, is_named in ((calling, True), (ANSWER, False)):
        caplog.clear()
        rows = [{"prompt": PROMPT, "completion": completion}] * 10
        path = tmp_path / "a.jsonl"
        load(models["tools"], path, rows, prompt="{prompt}", completion="{completion}")
        assert ("2 of 2 right answers to score are calls of tools" in caplog.text) is is_named


def test_all_answers_to_a_prompt_of_turns_are_right():
    task = make_task(Description(prompt="{prompt}", completion="{answers}", chat_template=True))
    for prompt in (PROMPT, "Where?"):
        example = task.example({"prompt": prompt, "answers": ["", " There", "Over there "]})
        assert (example.candidates, example.label) == (("There",), 0)
        assert example.references == ("There", "Over there")


def test_a_whole_conversation_that_ends_with_its_prompt_has_no_answer():
    task = make_task(Description(prompt="{prompt}", completion="{chosen}", chat_template=True))
    assert task.example({"prompt": PROMPT, "chosen": PROMPT}).label is None


def test_a_prompt_of_turns_is_asked_without_an_answer():
    task = make_task(Description(prompt="{prompt}", chat_template=True))
    example = task.example({"prompt": PROMPT})
    assert [turn.content for turn in example.messages] == [turn["content"] for turn in PROMPT]
    assert (example.label, example.prompt, task.has_answers) == (None, "Where?", False)


@pytest.mark.parametrize(
    ("model", "fix"),
    [("tools", "set data.chat_template=true"), ("no template", "use a model with a chat template")],
)
def test_turns_without_a_template_are_refused_with_a_fix_that_helps(model, fix, models, tmp_path):
    rows = [{"prompt": PROMPT, "completion": ANSWER}] * 10
    keys = {"prompt": "{prompt}", "completion": "{completion}", "chat_template": False}
    with pytest.raises(UserError, match=r"^field prompt or completion has lists of turns") as error:
        load(models[model], tmp_path / "a.jsonl", rows, **keys)
    assert str(error.value).count("; fix: ") == 1 and f"; fix: {fix}" in str(error.value)


def test_fields_that_the_recipe_leaves_out_are_named_without_a_template(models, tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"instruction": f"Add {n}", "output": f"{n}", "system": "Be kind"} for n in range(10)]
    rows = [row | {"tools": TOOLS, "id": n, "note": ""} for n, row in enumerate(rows)]
    keys = {"prompt": "{instruction}", "completion": "{output}", "chat_template": False}
    load(models["no template"], tmp_path / "a.jsonl", rows, **keys)
    for name in ("system", "tools"):
        message = f"the model does not read {name}, which 6 of 6 records have"
        assert caplog.messages.count(message) == 1
    assert "fields that the recipe leaves out (records): id (6)" in caplog.messages
    assert "note" not in caplog.text and "does not read instruction" not in caplog.text


def test_conversations_without_answers_are_pointed_to_a_prompt(models, tmp_path):
    rows = [{"turns": PROMPT[:2]}] * 10
    with pytest.raises(UserError, match=r"if a reward judges .* data.prompt=\{turns\} and"):
        load(models["tools"], tmp_path / "a.jsonl", rows)
