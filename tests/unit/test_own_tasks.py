"""Tasks that a recipe describes: what a record becomes, and what is refused."""

from __future__ import annotations

import json

import pytest

from lezo_ds.config import config_from_dict, config_to_dict, find_task
from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Example, Message, Task

BASE = {"run_dir": "run", "method": "zero_shot", "model": {"path": "model", "dtype": "fp32"}}
CLASSES = {
    "train": "t.csv",
    "prompt": "{text} is about",
    "label_field": "topic",
    "labels": ["bug", "billing"],
}
CHOICES = {"train": "t.csv", "prompt": "{text}\n", "label_field": "right", "choices": ["{a}", "{b}"]}
COMPLETION = {"train": "t.csv", "prompt": "{text}\nAnswer:", "completion": "{answers}"}
CHAT = {"train": "t.jsonl", "messages": "turns"}
ANSWER = {"train": "t.jsonl", "prompt": "{q}", "completion": "{a}", "chat_template": True}
TURNS = (Message("user", "Sure?"), Message("assistant", " Yes \n"))
SYSTEM = Message("system", "Be kind.")


def config_of(data, **values):
    return config_from_dict({**BASE, **values, "data": data}, "recipe.yaml")


def task_of(data, **values):
    return find_task(config_of(data, **values).data)


def example_of(record, **data):
    return task_of(data).build_example(record, 3)


def plain(turns):
    return [turn._asdict() for turn in turns]


def test_a_list_of_labels_is_what_the_prompt_is_continued_with():
    record = {"text": "It fails", "topic": "bug "}  # spreadsheets hide spaces
    assert example_of(record, **CLASSES) == Example(
        "It fails is about", (" bug", " billing"), 0, 3, null_prompt=" is about"
    )


def test_a_map_gives_each_label_its_text_in_an_order_that_no_journal_can_change():
    labels = {"bug": "a fault of ours", "1": "money"}
    for given in (labels, dict(reversed(labels.items()))):
        example = example_of({"text": "It fails", "topic": 1}, **CLASSES | {"labels": given})
        assert (example.candidates, example.label) == ((" money", " a fault of ours"), 0)
        config = config_of(CLASSES | {"labels": given})
        recorded = json.loads(json.dumps(config_to_dict(config), sort_keys=True))
        assert config_from_dict(recorded, "run", recorded=True) == config


@pytest.mark.parametrize(
    ("right", "labels", "label"),
    [(1, None, 1), ("1", None, 1), ("yes", None, 0), ("B", ["A", "B"], 1), ("", None, None)],
)
def test_the_right_choice_is_a_number_a_text_or_a_label(right, labels, label):
    record = {"text": "Is it?", "a": "yes", "b": "no", "options": ["yes", "no"], "right": right}
    for choices in (["{a}", "{b}"], ["{options}"]):
        example = example_of(record, **CHOICES | {"choices": choices, "labels": labels})
        assert (example.candidates, example.label) == (("yes", "no"), label)


@pytest.mark.parametrize(
    ("answers", "references"), [("Rome", ("Rome",)), (["Rome ", "Roma"], ("Rome", "Roma")), ([], ())]
)
def test_every_answer_counts_and_the_first_is_trained_on(answers, references):
    example = example_of({"text": "Where?", "answers": answers}, **COMPLETION)
    assert example.references == references
    assert example.candidates == tuple(f" {answer}\n" for answer in references[:1])
    assert (example.label is None) == (not references)


def test_a_template_reads_nested_fields_and_nothing_but_the_record():
    prompt = "{a.b} {{x}} {n} {yes}:"
    record = {"a": {"b": "deep"}, "n": 2.5, "yes": True, "answers": "c"}
    assert example_of(record, **COMPLETION | {"prompt": prompt}).prompt == "deep {x} 2.5 true:"
    assert (
        example_of({"a.b": "column", "answers": "c"}, **COMPLETION | {"prompt": "{a.b}"}).prompt == "column"
    )
    assert task_of(COMPLETION | {"prompt": "{text.__class__}"}).fields.keys() >= {"text.__class__"}


def test_a_conversation_ends_with_the_last_turn_of_the_assistant_and_may_get_a_system_prompt():
    task = task_of(CHAT | {"system_prompt": "Be kind."})
    example = task.build_example({"turns": [*plain(TURNS), {"role": "user", "content": "Bye"}]}, 4)
    assert (task.kind, task.metric) == ("chat", "token_accuracy")
    assert example.messages == (SYSTEM, *TURNS)
    assert (example.prompt, example.references, example.label) == ("Sure?", (" Yes \n",), 0)
    assert task.build_example({"turns": plain(TURNS[:1])}, 4).label is None
    own = (Message("system", "Be brief."), *TURNS)
    assert task.build_example({"turns": plain(own)}, 4).messages == own


def test_a_prompt_in_a_template_is_a_conversation_with_its_completion_or_for_a_reward():
    task = task_of(ANSWER | {"system_prompt": "Be kind."})
    example = task.build_example({"q": "Where?", "a": ["Rome", "Roma"]}, 0)
    assert example.messages == (SYSTEM, Message("user", "Where?"), Message("assistant", "Rome"))
    assert (example.references, task.kind, task.metric) == (("Rome", "Roma"), "generation", "f1")
    task = task_of(ANSWER | {"completion": None}, train={"objective": "module:reward"})
    example = task.build_example({"q": "Where?"}, 0)
    assert (task.kind, task.metric, task.has_answers) == ("generation", "reward", False)
    assert example.messages == (Message("user", "Where?"),)


MINE = Task("mine", None, None, "classification", {"text": str}, lambda r, i: Example(r["text"], (), 0, i))


def test_a_task_and_a_metric_of_a_module_are_imported():
    data = {"task": "test_own_tasks:MINE", "metric": "test_own_tasks:plain", "train": "t.csv"}
    task = task_of(data)
    assert (task.build_example, task.metric) == (MINE.build_example, "test_own_tasks:plain")
    with pytest.raises(UserError, match="does not name a task: TypeError"):
        task_of({"task": "test_own_tasks:plain", "train": "t.csv"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (CLASSES | {"prompt": "no field"}, "names no field of the records"),
        (CLASSES | {"prompt": "{text"}, "is not a template"),
        (CLASSES | {"prompt": "{text!r:>9}"}, "without the plain name of a field"),
        (CLASSES | {"labels": {"a": "x", "b": "x"}}, "two or more labels"),
        (CLASSES | {"labels": None}, "does not say what the model shall answer"),
        (CLASSES | {"label_field": None}, "data.label_field is missing"),
        (CLASSES | {"train": None}, "data.train"),
        (CLASSES | {"path": "data"}, "data.path"),
        (CLASSES | {"task": "sst2"}, "data.task=sst2"),
        (CHOICES | {"labels": {"A": "x", "B": "y"}}, "is a map, not a list"),
        (COMPLETION | {"label_field": "x"}, "data.completion and data.label_field cannot be set together"),
        (COMPLETION | {"metric": "exact_mach"}, "did you mean exact_match"),
        (CHAT | {"prompt": "{q}"}, "data.messages and data.prompt cannot be set together"),
        (CHAT | {"metric": "f1"}, "data.metric=f1 does not fit a task of the kind chat"),
        (
            ANSWER | {"completion": None, "label_field": "a", "labels": ["x", "y"]},
            "does not go with data.labels",
        ),
        (ANSWER | {"chat_template": False, "system_prompt": "x"}, "data.system_prompt needs"),
    ],
)
def test_keys_that_make_no_task_are_refused_before_any_file_is_read(data, message):
    with pytest.raises(UserError, match=message):
        task_of(data)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ("[]", r"field turns is '\[\]', not a list"),
        ([{"from": "human", "value": "Hi"}], "turn 1 of field turns is .* without role and content"),
        ([*plain(TURNS), {"role": "tool", "content": "3"}], "turn 3 .* has the role 'tool'"),
        ([*plain(TURNS), {"role": "system", "content": "3"}], "turn 3 .* has the role 'system'"),
        ([{"role": "user", "content": [{"text": "x"}]}], "the content of turn 1 .* not text"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "turn 1 .* a call of a tool, not text"),
        ([{"role": "assistant", "content": " \n"}], "turn 1 of field turns is the assistant's and is empty"),
    ],
)
def test_a_bad_conversation_is_refused(turns, message):
    with pytest.raises(UserError, match=message):
        task_of(CHAT).build_example({"turns": turns}, 0)
