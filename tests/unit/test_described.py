"""Tasks that a recipe describes: what a record becomes, and what is refused."""

import json
import math
from decimal import Decimal

import pytest

from lezo_ds.config import config_from_dict
from lezo_ds.data.described import find_task
from lezo_ds.data.turns import find_tools
from lezo_ds.errors import UserError

CLASSES = {"prompt": "{text} is about", "label_field": "topic", "labels": ["bug", "billing"]}
CHOICES = {"prompt": "{text}\n", "label_field": "right", "choices": ["{a}", "{b}"]}
LIST = CHOICES | {"choices": ["{options}"]}
COMPLETION = {"prompt": "{text}\nAnswer:", "completion": "{answers}"}
CHAT = {"messages": "turns"}
IN_CHAT = {"prompt": "{text}", "completion": "{answers}", "chat_template": True}
ASKED = {"role": "user", "content": "Sure?"}
ANSWERED = {"role": "assistant", "content": " Yes \n"}
SYSTEM = {"role": "system", "content": "Be kind."}
BROKEN_CALL = {"function": {"name": "f", "arguments": "{"}}


def config_of(data):
    model = {"path": "model", "dtype": "fp32"}
    values = {"run_dir": "run", "model": model, "data": {"train": "t.jsonl", **data}}
    return config_from_dict(values, "recipe.yaml")


def task_of(data):
    return find_task(config_of(data).data)


def example_of(record, **data):
    return task_of(data).example(record)


def refusal_of(record, **data):
    with pytest.raises(UserError) as error:
        example_of(record, **data)
    return str(error.value)


@pytest.mark.parametrize(
    ("value", "label"),
    [("0", "0"), (0, "0"), (1.0, "1.0"), (Decimal("1.10"), "1.10"), (True, "True"), ("nan", "nan")],
)
def test_a_label_is_what_str_writes(value, label):
    names = ["0", "1.0", "1.1", "1.10", "True", "nan"]
    described = CLASSES | {"labels": names}
    assert example_of({"text": "x", "topic": value}, **described).label == names.index(label)


@pytest.mark.parametrize("value", [None, math.nan, ""])
def test_no_value_is_no_label_whatever_the_other_fields_hold(value):
    for data in (CLASSES, LIST | {"label_field": "topic"}):
        record = {"text": "x", "options": ["a", "b"], "topic": value}
        assert example_of(record, **data).label is None
    assert example_of({"text": None, "topic": value}, **CLASSES).label is None


@pytest.mark.parametrize(
    "texts", [["bug", "bug "], ["1", "\uff11"], ["\u2764", "\u2764\ufe0f"], ["bug\xa0", "bug"]]
)
def test_labels_that_look_alike_are_refused_unless_a_map_makes_them_one(texts):
    with pytest.raises(UserError, match="texts that look alike"):
        task_of(CLASSES | {"labels": texts})
    labels = dict.fromkeys(texts, "same") | {"other": "another"}
    for text in texts:
        example = example_of({"text": "x", "topic": text}, **CLASSES | {"labels": labels})
        assert example.candidates[example.label] == " same"


def test_a_label_that_the_recipe_lacks_is_refused_with_the_one_that_is_meant():
    message = refusal_of({"text": "x", "topic": "biling"}, **CLASSES)
    assert "`topic` is 'biling', which is" in message and "did you mean billing" in message
    assert "not a text or a number" in refusal_of({"text": "x", "topic": ["bug"]}, **CLASSES)


def test_a_map_gives_each_label_its_text_in_an_order_that_no_journal_can_change():
    labels = {"bug": "a fault of ours", "1": "money"}
    for given in (labels, dict(reversed(labels.items()))):
        example = example_of({"text": "It fails", "topic": 1}, **CLASSES | {"labels": given})
        assert (example.candidates, example.label) == ((" money", " a fault of ours"), 0)
        config = config_of(CLASSES | {"labels": given})
        recorded = json.loads(json.dumps(config.model_dump(), sort_keys=True))
        assert config_from_dict(recorded, "run") == config


def test_labels_of_the_same_text_are_one_class_with_the_label_that_is_the_text():
    task = task_of(CLASSES | {"labels": {"a bug": "bug", "bug": "bug", "billing": "money"}})
    assert list(task.labels) == ["bug", "billing"]
    for label in ("a bug", "bug"):
        example = task.example({"text": "x", "topic": label})
        assert example.gold_texts == (" bug",)


RIGHT = [(1, None, 1), ("1", None, 1), ("yes", None, 0), ("", None, None)]
RIGHT += [("B", ["A", "B"], 1), (2, ["1", "2"], 1)]


@pytest.mark.parametrize(("right", "labels", "label"), RIGHT)
def test_the_right_choice_is_an_index_from_0_a_text_or_a_label(right, labels, label):
    record = {"text": "Is it?", "a": "yes", "b": "no", "options": ["yes", "no"], "right": right}
    for choices in (["{a}", "{b}"], ["{options}"]):
        example = example_of(record, **CHOICES | {"choices": choices, "labels": labels})
        assert (example.candidates, example.label) == (("yes", "no"), label)


def test_names_beside_the_texts_come_first_as_in_arc():
    described = CHOICES | {"choices": ["{choices.text}"]}
    task = task_of(described)
    for names, right, label in ((["A", "B"], "B", 1), (["1", "2"], "1", 0), ([1, 2], 2, 1)):
        record = {"text": "x", "choices": {"text": ["red", "blue"], "label": names}, "right": right}
        example = task.example(record)
        assert example.label == label
        assert list(task.names(example)) == list(map(str, names))
    labeled = task_of(described | {"labels": ["x", "y"]})
    example = labeled.example({**record, "right": "y"})
    assert (example.label, labeled.names(example)) == (1, ["x", "y"])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"options": ["a", "b"], "right": "A"}, "is 'A', which does not name one choice"),
        ({"options": ["a", "b"], "right": 2}, "is '2', which does not name one choice"),
        ({"options": ["1", "0"], "right": "1"}, "is '1', which does not name one choice"),
        ({"options": "['a', 'b']", "right": 0}, "store lists in .jsonl or .parquet"),
        ({"options": ["a"], "right": 0}, "not two or more texts"),
        ({"options": ["a", " "], "right": 0}, "not two or more texts"),
        ({"options": ["a", None], "right": 0}, "column `options` is null, not a text"),
    ],
)
def test_a_choice_that_may_be_another_is_refused(record, message):
    assert message in refusal_of({"text": "x", **record}, **LIST)


def test_a_record_may_have_fewer_choices_than_others():
    described = CHOICES | {"choices": ["{a}", "{b}", "{c}"], "labels": ["A", "B", "C"]}
    record = {"text": "Is it?", "a": "yes", "b": "no", "right": "B"}
    for nothing in (None, "", " "):
        for third in ("{c}", "No: {c}"):
            choices = ["{a}", "{b}", third]
            example = example_of(record | {"c": nothing}, **described | {"choices": choices})
            assert (example.candidates, example.label) == (("yes", "no"), 1)
    message = refusal_of(record | {"c": None, "right": "C"}, **described)
    assert "an index from 0, or one of A, B, C" in message
    message = refusal_of(record | {"c": "maybe"}, **described | {"labels": ["A", "B"]})
    assert "only 2 of 3 choices have a label" in message


def test_a_template_reads_nested_fields_and_nothing_but_the_record():
    record = {"a": {"b": "deep"}, "n": 2.5, "yes": True, "answers": "c", "d.e": "column"}
    example = example_of(record, **COMPLETION | {"prompt": "{a.b} {{x}} {n} {yes} {d.e}:"})
    assert example.prompt == "deep {x} 2.5 True column:"
    for prompt in ("{a.__class__}", "{missing}"):
        assert "there is no column" in refusal_of(record, **COMPLETION | {"prompt": prompt})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (COMPLETION | {"prompt": "no field"}, "does not name a column"),
        (COMPLETION | {"prompt": "{te{x}t}"}, "rename a column whose name has braces"),
        (COMPLETION | {"prompt": "{text"}, "is not a template"),
        (COMPLETION | {"prompt": "{text} {answers}"}, "shows the answer: it has answers, too"),
        (CLASSES | {"prompt": "{text} {topic}"}, "shows the answer: it has topic, too"),
        (CLASSES | {"labels": {"a": "yes", "b": "yes"}}, "fewer than two labels"),
        (CLASSES | {"completion": "{a}"}, "are of three kinds of tasks"),
        (COMPLETION | {"label_field": "topic"}, "are of three kinds of tasks"),
        (CLASSES | {"labels": None}, "data.label_field needs data.labels or data.choices"),
        (CHAT | {"prompt": "{text}"}, "are of three kinds of tasks"),
        (CLASSES | {"system_prompt": "Be kind."}, "data.system_prompt needs a chat template"),
    ],
)
def test_a_description_that_makes_no_task_is_refused_before_a_record_is_read(data, message):
    with pytest.raises(UserError, match=message):
        task_of(data)


EMPTY = [(" ", "column `text` is empty"), (None, "column `text` is empty")]
EMPTY += [(math.nan, "column `text` is nan"), (["a"], "not a text or a number")]


@pytest.mark.parametrize(("text", "message"), EMPTY)
def test_a_prompt_without_a_text_is_refused(text, message):
    for data in (COMPLETION, IN_CHAT, CLASSES):
        assert message in refusal_of({"text": text, "answers": "a", "topic": "bug"}, **data)


@pytest.mark.parametrize(
    ("answers", "references"),
    [("Rome", ("Rome",)), (["Rome ", "Roma"], ("Rome", "Roma")), ([], ()), ("", ()), (None, ())],
)
def test_every_answer_counts_and_the_first_is_trained_on(answers, references):
    example = example_of({"text": "Where?", "answers": answers}, **COMPLETION)
    assert example.references == references
    assert example.candidates == tuple(f" {answer}\n" for answer in references[:1])
    assert (example.label is None) == (not references)
    if not references and answers != []:  # what is around an answer is none
        framed = COMPLETION | {"completion": "It is {answers}."}
        assert example_of({"text": "Where?", "answers": answers}, **framed).label is None


def test_code_is_indented_after_a_prompt_that_ends_a_line():
    record = {"text": "def f():", "answers": "\n    return 1  \n"}
    code = example_of(record, **COMPLETION | {"prompt": "{text}\n"})
    assert code.candidates == ("    return 1\n",)
    assert example_of(record, **COMPLETION).candidates == (" return 1\n",)


def test_a_conversation_ends_with_the_last_learned_turn_and_may_get_a_system_prompt():
    record = {"turns": [ASKED, ANSWERED, {"role": "user", "content": "Bye"}]}
    example = example_of(record, **CHAT, system_prompt="Be kind.")
    assert example.messages == (SYSTEM, ASKED, ANSWERED)
    assert (example.learned, example.prompt, example.references) == ((2,), "Sure?", (" Yes \n",))
    own = {"role": "developer", "content": "Be brief."}
    example = example_of({"turns": [own, ASKED, ANSWERED]}, **CHAT, system_prompt="Be kind.")
    assert example.messages[0] == own
    assert example_of({"turns": [ASKED]}, **CHAT).label is None


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_turns_of_sharegpt_and_openai_are_one_and_some_are_context(mark):
    shared = [{"from": "human", "value": "Sure?"}, {"from": "gpt", "value": " Yes \n", **mark}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Su"}, "re?"]}, ANSWERED]
    example = example_of({"turns": shared + parts}, **CHAT)
    assert example.messages == (ASKED, ANSWERED) * 2
    assert example.learned == (3,)


def test_nulls_that_arrow_fills_in_are_not_read():
    call = {"function": {"name": "f", "arguments": {"x": 1, "y": None}}, "id": None}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    example = example_of({"turns": [{**ASKED, "tool_calls": None}, turn]}, **CHAT)
    plain = {"function": {"name": "f", "arguments": {"x": 1}}}
    assert example.messages == (ASKED, {"role": "assistant", "content": "", "tool_calls": [plain]})
    call["function"]["arguments"] = '{"x": 1}'
    assert example_of({"turns": [ASKED, turn]}, **CHAT).messages == example.messages


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ('[{"role": "user", "content": "a"}]', "store lists in .jsonl or .parquet, not as text"),
        ([], "not a list of turns"),
        ([{"content": "a"}], "turn 1 in column `turns` is {'content': 'a'}, without a role"),
        ([ASKED, {**ANSWERED, "weight": 0.5}], "the weight of turn 2 .* is not 0 or 1"),
        ([ASKED, {**ANSWERED, "content": " "}], "turn 2 .* is the assistant's and is empty"),
        ([{"role": "user", "text": "a"}], "the content of turn 1 .* is null, not a text"),
        ([{**ASKED, "content": 5}], "the content of turn 1 .* is 5, not a text"),
        ([{**ASKED, "content": [{"type": "image_url"}]}], "no images or sounds are read"),
        ([{**ANSWERED, "tool_calls": [BROKEN_CALL]}], "a call in turn 1 .* that are not JSON"),
        ([{**ANSWERED, "tool_calls": '[{"name": "f"}]'}], "a call in turn 1 .* is '.', not an obj"),
        (
            [{**ANSWERED, "tool_calls": [{"function": {"tool": "f"}}]}],
            "with the name of a function",
        ),
    ],
)
def test_turns_that_cannot_be_read_are_refused_by_number(turns, message):
    with pytest.raises(UserError, match=message):
        example_of({"turns": turns}, **CHAT)


def test_definitions_of_tools_are_a_list_or_json_of_one_without_nulls_and_variables_are_none():
    tools = [{"name": "f", "parameters": {"a": None, "b": 1}}]
    plain = [{"name": "f", "parameters": {"b": 1}}]
    for value in (tools, json.dumps(tools)):
        assert find_tools({"tools": value}) == plain
    for none in (None, "", []):
        assert find_tools({"tools": none}) is None
    for wrong in ("hammer", [1], {"a": 1}):
        with pytest.raises(UserError, match=r"column `tools` .*, or rename the column"):
            find_tools({"tools": wrong})
    with pytest.raises(UserError, match=r"set data\.chat_template_kwargs"):
        find_tools({"chat_template_kwargs": {"enable_thinking": False}})


def test_a_prompt_in_a_template_is_a_conversation_with_its_completion():
    record = {"text": "Sure?", "answers": [" Yes \n", "Yeah"]}
    example = example_of(record, **IN_CHAT, system_prompt="Be kind.")
    answered = {"role": "assistant", "content": "Yes"}
    assert (example.messages, example.learned) == ((SYSTEM, ASKED, answered), (2,))
    assert example.references == ("Yes", "Yeah")
    example = example_of({"text": "Sure?"}, prompt="{text}", chat_template=True)
    assert (example.messages, example.learned, example.label) == ((ASKED,), (), None)


def test_trls_prompt_and_completion_of_turns_are_a_conversation():
    data = IN_CHAT | {"prompt": "{prompt}", "completion": "{completion}"}
    record = {"prompt": [SYSTEM, ASKED], "completion": [ANSWERED]}
    assert "add data.chat_template" in refusal_of(record, **data | {"chat_template": False})
    example = example_of(record, **data)
    assert (example.messages, example.learned) == ((SYSTEM, ASKED, ANSWERED), (2,))
    assert (example.prompt, example.references) == ("Sure?", ("Yes",))
    completion = [{**ANSWERED, "weight": 0}, ASKED, ANSWERED, ASKED]
    example = example_of(record | {"completion": completion}, **data)
    assert (example.learned, example.references) == ((4,), ("Yes",))
    for name in record:  # as a table has them
        for text in (json.dumps(record[name]), str(record[name])):
            message = refusal_of(record | {name: text}, **data)
            assert "store lists in .jsonl or .parquet" in message


def test_an_answer_that_trls_kto_marks_as_bad_is_refused():
    record = {"text": "Where?", "answers": "Rome"}
    for bad in (False, "False"):  # as JSON and a table have it
        assert "marks a bad answer" in refusal_of(record | {"label": bad}, **COMPLETION)
    assert example_of(record | {"label": True}, **COMPLETION).label == 0
    reads_it = COMPLETION | {"completion": "{label}"}
    assert example_of(record | {"label": False}, **reads_it).label == 0


def test_records_without_answers_are_read_for_the_model_to_answer():
    for data, record in (
        (CLASSES, {"text": "x"}),
        (LIST, {"text": "x", "options": ["a", "b"]}),
        (COMPLETION, {"text": "x"}),
        (IN_CHAT, {"text": "x"}),
        (CHAT, {"turns": [ASKED]}),
        (CHAT, {"turns": [ASKED, ANSWERED]}),
    ):
        example = task_of(data).unanswered().example(record)
        assert (example.label, example.references, example.learned) == (None, (), ())
        assert example.messages in ((), (ASKED,), ({"role": "user", "content": "x"},))
