"""Tasks that a recipe describes: what a record becomes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from lezo_ds.tasks.base import Example, Message
from lezo_ds.tasks.kinds import Classification

from lezo_ds.config import ZoConfig, config_from_dict, make_estimator
from lezo_ds.data.metrics import load_score
from lezo_ds.data.task_data import find_task
from lezo_ds.errors import UserError
from lezo_ds.zo.estimators import Spsa

BASE = {"run_dir": "run", "method": "zero_shot", "model": {"path": "model", "dtype": "fp32"}}
CLASSES = {
    "train": "t.csv",
    "prompt": "{text} is about",
    "label_field": "topic",
    "labels": ["bug", "billing"],
}
CHOICES = {
    "train": "t.csv",
    "prompt": "{text}\n",
    "label_field": "right",
    "choices": ["{a}", "{b}"],
}
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
    return task_of(data).survey([record]).example(record)


def plain(turns):
    return [turn._asdict() for turn in turns]


def test_a_map_gives_each_label_its_text_in_an_order_that_no_journal_can_change():
    labels = {"bug": "a fault of ours", "1": "money"}
    for given in (labels, dict(reversed(labels.items()))):
        example = example_of({"text": "It fails", "topic": 1}, **CLASSES | {"labels": given})
        assert (example.candidates, example.label) == ((" money", " a fault of ours"), 0)
        config = config_of(CLASSES | {"labels": given})
        recorded = json.loads(json.dumps(config.model_dump(), sort_keys=True))
        assert config_from_dict(recorded, "run") == config


@pytest.mark.parametrize(
    ("right", "labels", "label"),
    [(1, None, 1), ("1", None, 1), ("yes", None, 0), ("B", ["A", "B"], 1), ("", None, None)],
)
def test_the_right_choice_is_a_number_a_text_or_a_label(right, labels, label):
    record = {"text": "Is it?", "a": "yes", "b": "no", "options": ["yes", "no"], "right": right}
    for choices in (["{a}", "{b}"], ["{options}"]):
        example = example_of(record, **CHOICES | {"choices": choices, "labels": labels})
        assert (example.candidates, example.label) == (("yes", "no"), label)


def test_a_choice_whose_fields_are_empty_is_none_and_each_other_one_has_its_label():
    described = CHOICES | {"choices": ["(A) {a}", "(B) {b}", "(C) {c}"], "labels": ["A", "B"]}
    record = {"text": "Is it?", "a": "yes", "b": "no", "right": "B"}
    for nothing in (None, "", " "):
        example = example_of(record | {"c": nothing}, **described)
        assert (example.candidates, example.label) == (("(A) yes", "(B) no"), 1)
    with pytest.raises(UserError, match=r"gives 3 texts, and data\.labels has 2"):
        example_of(record | {"c": "so so"}, **described)


@pytest.mark.parametrize(
    ("answers", "references"),
    [("Rome", ("Rome",)), (["Rome ", "Roma"], ("Rome", "Roma")), ([], ())],
)
def test_every_answer_counts_and_the_first_is_trained_on(answers, references):
    example = example_of({"text": "Where?", "answers": answers}, **COMPLETION)
    assert example.references == references
    led = COMPLETION | {"completion": "So {answers}"}
    assert example_of({"text": "Where?", "answers": ""}, **led).label is None
    assert example.candidates == tuple(f" {answer}\n" for answer in references[:1])
    assert (example.label is None) == (not references)


def test_a_template_reads_nested_fields_and_nothing_but_the_record():
    prompt = "{a.b} {{x}} {n} {yes}:"
    record = {"a": {"b": "deep"}, "n": 2.5, "yes": True, "answers": "c"}
    assert example_of(record, **COMPLETION | {"prompt": prompt}).prompt == "deep {x} 2.5 true:"
    dotted = example_of({"a.b": "column", "answers": "c"}, **COMPLETION | {"prompt": "{a.b}"})
    assert dotted.prompt == "column"
    assert task_of(COMPLETION | {"prompt": "{text.__class__}"}).fields.keys() >= {"text.__class__"}


def test_a_conversation_ends_with_the_last_turn_of_the_assistant_and_may_get_a_system_prompt():
    task = task_of(CHAT | {"system_prompt": "Be kind."})
    example = task.example({"turns": [*plain(TURNS), {"role": "user", "content": "Bye"}]})
    assert (task.kind, task.metric) == ("chat", "token_accuracy")
    assert example.messages == (SYSTEM, *TURNS)
    assert (example.prompt, example.references, example.label) == ("Sure?", (" Yes \n",), 0)
    assert task.example({"turns": plain(TURNS[:1])}).label is None
    own = (Message("system", "Be brief."), *TURNS)
    assert task.example({"turns": plain(own)}).messages == own


def test_labels_of_the_same_text_are_one_class_with_the_label_that_is_the_text():
    labels = {"Bug": "bug", "bug": "bug", "buug": "bug", "a": "billing", "b": "billing"}
    task = task_of(CLASSES | {"labels": labels})
    examples = [task.example({"text": "x", "topic": label}) for label in labels]
    assert examples[0].candidates == (" bug", " billing")
    assert list(task.labels) == ["bug", "a"]
    found = [example.label for example in examples]
    assert found == [0, 0, 0, 1, 1]


def test_a_prompt_in_a_template_is_a_conversation_with_its_completion_or_for_a_reward():
    task = task_of(ANSWER | {"system_prompt": "Be kind."})
    example = task.example({"q": "Where?", "a": ["Rome", "Roma"]})
    assert example.messages == (SYSTEM, Message("user", "Where?"), Message("assistant", "Rome"))
    assert (example.references, task.kind, task.metric) == (("Rome", "Roma"), "generation", "f1")
    # A metric gets a deep copy of the example.
    assert load_score(task)(["Rome"], [example]) == 1.0
    task = task_of(ANSWER | {"completion": None}, train={"objective": "module:reward"})
    example = task.example({"q": "Where?"})
    assert (task.kind, task.metric, task.has_answers) == ("generation", "reward", False)
    assert example.messages == (Message("user", "Where?"),)


@pytest.mark.parametrize(
    ("asked", "answer", "gold"),
    [
        ("def f():\n", "    x = 1\n    return x\n", "    x = 1\n    return x\n"),
        ("def f():\n", "\n    pass", "    pass\n"),
        ("Where?\n", "Rome", "Rome\n"),
        ("Where?", "\n  Rome ", " Rome\n"),
    ],
)
def test_code_is_indented_after_a_prompt_that_ends_a_line(asked, answer, gold):
    task = task_of(ANSWER | {"chat_template": False})
    example = task.example({"q": asked, "a": [answer]})
    assert (example.candidates, example.references) == ((gold,), (answer.strip(),))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (CLASSES | {"prompt": "{text"}, "is not a template"),
        (CLASSES | {"prompt": "{text!r:>9}"}, "without the plain name of a field"),
        (CLASSES | {"labels": {"a": "x", "b": "x"}}, "two or more labels"),
        (
            CLASSES | {"labels": ["Bug", "billing", "bug"]},
            r"whatever its case \(not of its own: \['bug'\]\)",
        ),
        (COMPLETION | {"metric": "exact_mach"}, "did you mean exact_match"),
    ],
)
def test_keys_that_make_no_task_are_refused_before_any_file_is_read(data, message):
    with pytest.raises(UserError, match=message):
        task_of(data)


class Mine(Classification):
    def build_example(self, record):
        return Example(record["text"], (" a", " b"), 0)


MINE = Mine(name="mine", fields={"text": str})


def my_metric(predictions, examples):
    return 0.5


@dataclass(frozen=True)
class MyEstimator(Spsa):
    size: float = 1.0


def test_components_of_a_module_are_named_where_registered_ones_are():
    data = {"task": "test_own_tasks:MINE", "metric": "test_own_tasks:my_metric", "train": "t.csv"}
    task = task_of(data)
    assert task == replace(MINE, metric="test_own_tasks:my_metric")
    with pytest.raises(UserError, match="names no task: TypeError"):
        task_of({"task": "test_own_tasks:my_metric", "train": "t.csv"})
    zo = ZoConfig(estimator="test_own_tasks:MyEstimator", estimator_options={"size": 2.0})
    assert make_estimator(zo) == MyEstimator(perturbation_scale=1e-3, num_directions=1, size=2.0)
    with pytest.raises(UserError, match="names no estimator"):
        make_estimator(ZoConfig(estimator="test_own_tasks:MINE"))


@pytest.mark.parametrize(
    ("data", "objective", "written"),
    [
        (CHAT, "task", ([], 256)),
        (ANSWER, "task", ([], 256)),
        (ANSWER | {"max_length": 100}, "task", ([], 50)),
        (COMPLETION, "task", (None, 50)),
        (CLASSES | {"chat_template": True}, "task", (None, 50)),
        (CLASSES | {"chat_template": True}, "rewards:polite", ([], 256)),
    ],
)
def test_an_answer_in_a_chat_ends_at_the_end_of_its_turn(data, objective, written):
    config = config_of(data, train={"objective": objective})
    assert (config.generation.stop, config.generation.max_new_tokens) == written
    asked = config_of(data, generation={"stop": None, "max_new_tokens": 7})
    assert (asked.generation.stop, asked.generation.max_new_tokens) == (None, 7)


def test_a_run_of_0_4_in_a_chat_keeps_the_newline_that_ended_its_answers():
    values = config_of(ANSWER, generation={"stop": None, "max_new_tokens": 50}).model_dump()
    recorded = config_from_dict(values, "run")
    assert (recorded.generation.stop, recorded.generation.max_new_tokens) == (None, 50)
