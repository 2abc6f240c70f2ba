"""What a label is, whatever writes it, and how the label of a choice is meant."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal

import pytest
from lezo_ds.tasks.custom import Description, make_task
from lezo_ds.tasks.labels import Labels, label_text

from lezo_ds.errors import UserError

TOPICS = Description(prompt="{text}", label_field="topic", labels=["0", "1"])
CHOICES = Description(prompt="{text}", label_field="right", choices=["{options}"])


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ((0, 0.0, "0", "0.0", [0], -0.0, " 0 ", Decimal("0.00")), "0"),
        ((-1, "-1.0"), "-1"),
        ((True, "true", [True]), "true"),
        (("caf\u00e9", "cafe\u0301 "), "caf\u00e9"),
        (("007",), "007"),  # a code
        (("very good", " very\u00a0good", "very  good", "very\tgood\u200b"), "very good"),
        ((2.5, "2.5"), "2.5"),
        ((None, math.nan, "NaN", "", "  ", []), None),
    ],
)
def test_a_label_has_one_spelling(values, label):
    assert {label_text("topic", value) for value in values} == {label}


def test_a_recipe_may_write_its_labels_in_any_spelling_and_its_own_counts_first():
    for names in (["0", "1"], ["0.0", "1.0"]):
        assert [Labels(names).find("y", value) for value in (0, 1.0, "1", None)] == [0, 1, 1, None]
    assert Labels(["nan", "other"]).find("name", "nan") == 0
    assert Labels(["True", "False"]).find("y", "false") == 1
    with pytest.raises(
        UserError, match=r"'0', which is none of .* data.labels=\{0: bad, 1: good\}"
    ):
        Labels(["bad", "good"]).find("label", 0)
    with pytest.raises(UserError, match=r"is \['a', 'b'\], not text or a number"):
        Labels(["a", "b"]).find("label", ["a", "b"])


@pytest.mark.parametrize("labels", [["0", "0.0"], ["caf\u00e9", "cafe\u0301"], ["True", "true"]])
def test_one_label_in_two_spellings_is_no_two_classes(labels):
    with pytest.raises(UserError, match="a text of its own"):
        make_task(Description(prompt="{text}", label_field="topic", labels=labels))


def test_labels_that_are_merged_are_named_once_with_their_numbers(caplog):
    values = [0, 0.0, "0", 1, 0.0, None, [1], {"odd": 1}]
    make_task(TOPICS).survey([{"topic": value} for value in values] + [{}])
    assert caplog.messages == ["in field topic, these are one label (records): '0' (2), '0.0' (2)"]


def labels_of(rows, description=CHOICES):
    """Return the index that each row (options, right) is read as, once all are known."""
    records = [{"text": "x", "options": options, "right": right} for options, right in rows]
    task = make_task(description).survey(records)
    return [task.example(record).label for record in records]


COLORS = ["red", "blue", "green"]


def test_all_records_decide_whether_labels_are_numbers_or_texts():
    numbers = [
        (["3", "0", "2", "1"], "2"),
        (["7", "9", "5", "2"], "0"),
        (["4", "6", "8", "9"], "3"),
    ]
    assert labels_of(numbers) == [2, 0, 3]
    texts = [(["3", "0", "2", "1"], "2"), (["7", "9", "5", "2"], "5"), (["4", "6", "8", "9"], "4")]
    assert labels_of(texts) == [2, 2, 0]
    integers = [([12, 3, 1], 3), ([7, 9, 5], 5), ([4, 6, 1], 1)]
    assert labels_of(integers) == [1, 2, 2]
    assert labels_of([(COLORS, "red"), (COLORS, "green"), (COLORS, None)]) == [0, 2, None]


@pytest.mark.parametrize("odd", ["1", 1, "B", "pink"])
@pytest.mark.parametrize("usual", ["red", 2, "2"])
def test_a_record_whose_label_is_read_in_another_way_than_others_is_refused(usual, odd):
    rows = [(COLORS, usual)] * 9 + [(COLORS, "blue" if str(odd) == "1" and usual != "red" else odd)]
    with pytest.raises(UserError, match=r"one of the choices|the number of a choice") as error:
        labels_of(rows)
    assert repr(str(rows[-1][1])) in str(error.value)


@pytest.mark.parametrize(
    ("right", "names"),
    [
        ([1, 2, 3], "[1, 2, 3]"),
        (["1", "3", "3"], "[1, 2, 3]"),
        (["A", "C", "B"], '["A", "B", "C"]'),
        (["b", "c", "b"], '["a", "b", "c"]'),
        (["(B)", "(C)", "(A)"], '["(A)", "(B)", "(C)"]'),
        (["A.", "B.", "C."], '["A.", "B.", "C."]'),
    ],
)
def test_choices_that_are_not_numbered_from_0_are_refused_with_the_labels_that_read_them(
    right, names
):
    with pytest.raises(UserError) as error:
        labels_of([(COLORS, each) for each in right])
    assert str(error.value).endswith(f"; fix: set data.labels={names}")


def test_a_list_of_choices_that_is_stored_as_text_is_no_choice_of_one_text():
    task = make_task(Description(prompt="{q}", label_field="right", choices=["{options}"]))
    record = {"q": "Which?", "options": "['red', 'blue']", "right": "A"}
    surveyed = task.survey([record] * 9)
    with pytest.raises(UserError, match=r"not two or more texts; fix: store lists as lists"):
        surveyed.example(record)


def test_labels_that_may_be_meant_in_two_ways_are_named(caplog):
    assert labels_of([(COLORS, 1), (COLORS, 2)]) == [1, 2]
    assert labels_of([(["1", "0"], "1"), (["0", "1"], "1")]) == [0, 1]
    assert labels_of([([1, 0], 1), ([0, 1], 0)]) == [1, 0]
    begin, either, integers = caplog.messages
    assert "no record has the number 0" in begin and "set data.labels=[1, 2, 3]" in begin
    assert either.startswith("1 labels in field right may be the number") and "[0, 1]" in either
    assert integers.endswith("taken for numbers; to take them for texts, write them as strings")


@pytest.mark.parametrize("none", [None, ""])
def test_a_record_may_have_fewer_choices_than_others(none):
    keys = {"prompt": "{q}", "label_field": "right", "choices": ["{a}", "{b}", "{c}"]}
    task = make_task(Description(**keys, labels=["A", "B", "C"]))
    example = task.example({"q": "Which?", "a": "red", "b": "blue", "c": none, "right": "B"})
    assert (example.candidates, example.label) == ((" red", " blue"), 1)
    with pytest.raises(UserError, match="not two or more texts"):
        task.example({"q": "Which?", "a": "red", "b": none, "c": "blue", "right": "A"})


def test_names_that_records_give_their_choices_come_first():
    """As in ARC, of which some records have digits, and with names in another order."""
    rows = [("ABCD", "B", 1), ("1234", "3", 2), ("CADB", "A", 1), ([1, 2, 3, 4], 4, 3)]
    records = [
        {"text": "x", "of": {"text": ["red", "1", "2", "3"], "label": list(names)}, "right": right}
        for names, right, _ in rows
    ]
    for labels in (None, ["A", "B", "C", "D"]):
        described = Description(
            prompt="{text}", label_field="right", choices=["{of.text}"], labels=labels
        )
        task = make_task(described).survey(records)
        assert [task.example(each).label for each in records] == [index for *_, index in rows]
        asked = replace(task.unanswered().example(records[2]), record=records[2])
        assert task.unanswered().names(asked) == ["C", "A", "D", "B"]  # what predict writes
    records[0]["of"]["label"] = ["A", "A", "B"]  # no name for each
    assert task.example(records[0]).label == 1


def test_the_text_of_a_choice_may_have_another_case_unless_two_have_it():
    assert labels_of([(COLORS, "RED"), (COLORS, "Green "), (COLORS, "blue")]) == [0, 2, 1]
    assert labels_of([(["Us", "us"], "us"), (["Us", "us"], "Us")]) == [1, 0]


def test_an_answer_without_a_field_is_refused():
    with pytest.raises(UserError, match=r"data.completion='\{\{answer\}\}' names no field"):
        make_task(Description(prompt="{text}", completion="{{answer}}"))


def test_a_prompt_that_shows_the_answer_is_refused():
    for prompt, answer in (
        ("{text} {topic}", {"label_field": "topic", "labels": ["a", "b"]}),
        ("{text}", {"label_field": "text", "choices": ["{a}", "{b}"]}),
        ("{text}", {"completion": "{text}"}),
    ):
        with pytest.raises(UserError, match=r"shows the answer: .*; fix: remove \{(topic|text)\}"):
            make_task(Description(prompt=prompt, **answer))


def test_one_of_the_choices_may_be_the_field_with_the_answer():
    choices = ["{distractor1}", "{correct_answer}", "{distractor2}"]
    task = make_task(
        Description(prompt="{question}", choices=choices, label_field="correct_answer")
    )
    record = {
        "question": "Which gas do plants take in?",
        "correct_answer": "carbon dioxide",
        "distractor1": "oxygen",
        "distractor2": "helium",
    }
    example = task.survey([record]).example(record)
    assert example.candidates == (" oxygen", " carbon dioxide", " helium")
    assert example.label == 1
    assert task.question(record).candidates == example.candidates


def test_answers_to_which_a_gap_has_given_a_point_are_named(caplog):
    task = make_task(Description(prompt="{text}", completion="{answer}"))
    for answers, is_named in (
        ([21.0, None, 7.0], True),
        (["21.0", "", "7.0"], True),
        ([2, 7.0], False),
    ):
        caplog.clear()
        task.survey([{"answer": answer} for answer in answers])
        assert len(caplog.messages) == is_named
        assert not is_named or caplog.messages[0].startswith("all 2 answers are whole numbers")


def test_dates_and_times_are_texts():
    task = make_task(Description(prompt="{on} {at}", label_field="topic", labels=["0", "1"]))
    record = {"on": date(2024, 2, 29), "at": datetime(2024, 2, 29, 12, 30), "topic": 1}
    assert task.example(record).prompt == "2024-02-29 2024-02-29 12:30:00"
    assert label_text("topic", date(2024, 2, 29)) == "2024-02-29"


def test_a_record_whose_prompt_has_no_text_is_refused():
    task = make_task(Description(prompt="{a}\n{b}:", label_field="topic", labels=["0", "1"]))
    assert task.example({"a": " ", "b": 0, "topic": 1}).prompt == " \n0:"
    with pytest.raises(UserError, match="no text is in a, b; fix: fill it in"):
        task.example({"a": " ", "b": "", "topic": 1})
    with pytest.raises(UserError, match="field a is nan, not text or a number"):
        task.example({"a": math.nan, "b": "x", "topic": 1})
