"""What lezo-ds init guesses from files of many shapes."""

from __future__ import annotations

import datasets
import pytest

from lezo_ds.config import DataConfig, find_task
from lezo_ds.data.tables import read_source
from lezo_ds.errors import UserError
from lezo_ds.tools.first_recipe.columns import read_columns
from lezo_ds.tools.first_recipe.guess import guess_task
from lezo_ds.tools.first_recipe.recipe import _label_names, _other_files

NUM_RECORDS = 60
STARS = {"1": "terrible", "2": "bad", "3": "okay", "4": "good", "5": "great"}
SENTENCES = tuple(
    f"{who} {does} the {thing} on {day}"
    for who in ("My sister", "The driver", "Nobody", "Our teacher")
    for does in ("lost", "returned", "painted", "sold", "broke")
    for thing in ("car", "red bicycle", "house")
    for day in ("Monday",)
)
"""60 different sentences."""


def table(**fields):
    """Return records whose fields are functions of their number, or lists that are repeated."""
    return [
        {name: value(row) if callable(value) else value[row % len(value)] for name, value in fields.items()}
        for row in range(NUM_RECORDS)
    ]


def sentence(row):
    return SENTENCES[row]


def other_sentence(row):
    return f"It is said that {SENTENCES[(7 * row + 3) % NUM_RECORDS]}"


def long_text(row):
    return " ".join(SENTENCES[(row + i) % NUM_RECORDS] + "." for i in range(40))


def guessed(records, label=None, names=None):
    columns, _ = read_columns(records)
    return guess_task(columns, label=label, names=names)


def test_names_with_dots_and_labels_with_spaces_after_them_are_read():
    guess = guessed(table(**{"ticket.text": sentence, "ticket.topic": ["billing", "bug", "billing", "bug "]}))
    assert guess.data == {
        "prompt": "{ticket.text}\nTopic:",
        "label_field": "ticket.topic",
        "labels": ["billing", "bug"],
    }


def test_tickets_are_a_classification_and_their_ids_are_not_read():
    guess = guessed(table(id=str, text=sentence, topic=["billing", "bug", "shipping"]))
    assert guess.data == {
        "prompt": "{text}\nTopic:",
        "label_field": "topic",
        "labels": ["billing", "bug", "shipping"],
    }
    assert "topic is the label: 3 different values in 60 records: billing (20)" in guess.reasons[0]


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"topic": ["a", "b"], "text": sentence}, "topic"),
        ({"text": sentence, "lang": ["en", "de"], "sentiment": ["bad", "good"]}, "sentiment"),
        ({"text": sentence, "split": ["train", "test"], "stance": ["for", "against"]}, "stance"),
        ({"label": [0, 1], "label_text": ["ham", "spam"], "text": sentence}, "label_text"),
        ({"text": sentence, "year": [2001, 2002], "kind": ["long", "short"]}, "kind"),
        ({"text": sentence, "user_id": ["u1", "u2"], "isUrgent": ["no", "yes"]}, "isUrgent"),
        ({"text": sentence, "fault": ["Broken on arrival", "Late delivery"], "channel": ["a", "b"]}, "fault"),
    ],
)
def test_a_label_is_found_among_other_fields_of_few_values(fields, label):
    assert guessed(table(**fields)).data["label_field"] == label


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"text": sentence, "url": lambda row: f"https://example.org/{row}"}, "{text}"),
        ({"text": sentence, "created": lambda row: f"2024-01-{row % 28 + 1:02} 10:00:00"}, "{text}"),
        ({"summary of it": sentence, "body": long_text}, "{body}"),
        ({"agent reply": other_sentence, "subject": sentence, "body": long_text}, "S: {subject} B: {body}"),
        ({"premise": sentence, "hypothesis": other_sentence}, "P: {premise} H: {hypothesis}"),
        ({"notes": long_text, "heading": sentence}, "{notes}"),
        ({"q": lambda row: {"text": sentence(row), "lang": "en"}}, "{q.text}"),
        ({"文章": lambda row: f"今天的天气{'很' * (row % 9 + 1)}好我们去第{row}个公园"}, "{文章}"),
        ({"word": lambda row: f"word{row}"}, "{word}"),
    ],
)
def test_the_text_is_found_among_other_fields(fields, prompt):
    found = guessed(table(**fields, label=["a", "b"])).data["prompt"]
    if prompt[1] == ":":
        titles = [line.split(": ") for line in found.splitlines()[:-1]]
        found = " ".join(f"{title[0]}: {field}" for title, field in titles) + "\nAnswer:"
        assert found == f"{prompt}\nAnswer:"
    else:
        assert found == f"{prompt}\nCategory:"


def test_text_that_is_not_shown_is_named():
    guess = guessed(table(body=long_text, agent_reply=other_sentence, topic=["a", "b"]))
    assert guess.data["prompt"] == "{body}\nTopic:"
    assert "More text that the prompt could show: {agent_reply}." in guess.reasons


@pytest.mark.parametrize(
    ("field", "values", "labels", "cue"),
    [
        ("spam", [True, False], {"false": "no", "true": "yes"}, "Spam (yes or no)"),
        ("is_spam", ["True", "False"], {"False": "no", "True": "yes"}, "Is spam (yes or no)"),
        ("is_spam", [0, 1], {"0": "no", "1": "yes"}, "Is spam"),
        ("stars", [1, 2, 3, 4, 5], STARS, "Stars"),
        ("label", ["0", "1", "2"], {"0": "0", "1": "1", "2": "2"}, "Category"),
        ("label", ["10", "9"], {"9": "9", "10": "10"}, "Category"),
        ("intent", ["card_lost", "top_up"], {"card_lost": "card lost", "top_up": "top up"}, "Intent"),
        ("topic", ["a_b", "a b"], ["a b", "a_b"], "Topic"),
    ],
)
def test_labels_get_texts_that_a_model_knows(field, values, labels, cue):
    guess = guessed(table(text=sentence, **{field: values}))
    assert guess.data["labels"] == labels
    assert guess.data["prompt"] == f"{{text}}\n{cue}:"
    numbers = field == "label"
    assert ("WRITE A WORD FOR EACH NUMBER" in guess.notes["labels"]) == numbers


def test_uneven_labels_are_scored_by_macro_f1_and_missing_ones_are_counted():
    guess = guessed(table(text=sentence, topic=[*["most"] * 8, "few", None]))
    assert guess.data["metric"] == "macro_f1"
    assert "6 records have no label and are left out." in guess.reasons


@pytest.mark.parametrize(
    ("fields", "data"),
    [
        (
            {"prompt": sentence, "completion": other_sentence},
            {"prompt": "{prompt}", "completion": "{completion}"},
        ),
        (
            {"instruction": sentence, "input": other_sentence, "output": long_text, "category": ["a", "b"]},
            {
                "prompt": "Instruction: {instruction}\nInput: {input}\nOutput:",
                "completion": "{output}",
            },
        ),
        (
            {
                "context": long_text,
                "question": sentence,
                "answers": lambda row: {"text": [f"the car {row}", "a car"], "answer_start": [1, 2]},
            },
            {
                "prompt": "Context: {context}\nQuestion: {question}\nAnswers:",
                "completion": "{answers.text}",
            },
        ),
        (
            {"article": long_text, "highlights": sentence},
            {"prompt": "{article}\nHighlights:", "completion": "{highlights}"},
        ),
    ],
)
def test_a_prompt_and_a_completion_are_generation(fields, data):
    assert guessed(table(id=str, **fields)).data == data


def test_an_answer_of_few_values_is_a_label():
    data = guessed(table(passage=long_text, question=sentence, answer=[True, False])).data
    assert (data["label_field"], data["labels"]) == ("answer", {"false": "no", "true": "yes"})
    assert data["prompt"] == "Passage: {passage}\nQuestion: {question}\nAnswer (yes or no):"


def four(row):
    return [f"the {thing} {row}" for thing in ("car", "house", "dog", "bird")]


@pytest.mark.parametrize(
    ("fields", "data"),
    [
        (
            {"question": sentence, "choices": four, "answer": [0, 1, 2, 3]},
            {"choices": ["{choices}"], "label_field": "answer"},
        ),
        (
            {
                "question": sentence,
                "choices": lambda row: {"text": four(row), "label": ["A", "B", "C", "D"]},
                "answerKey": ["A", "B", "C", "D"],
            },
            {
                "choices": ["{choices.text}"],
                "label_field": "answerKey",
                "labels": ["A", "B", "C", "D"],
            },
        ),
        (
            {"premise": sentence, "choice1": other_sentence, "choice2": long_text, "label": ["0", "1"]},
            {"choices": ["{choice1}", "{choice2}"], "label_field": "label"},
        ),
        (
            {"question": sentence, "A": other_sentence, "B": long_text, "right": ["1", "2"]},
            {"choices": ["{A}", "{B}"], "label_field": "right", "labels": ["1", "2"]},
        ),
        (
            {"question": sentence, "options": lambda row: ["cat", "dog"], "pet": ["dog", "cat"]},
            {"choices": ["{options}"], "label_field": "pet"},
        ),
    ],
)
def test_choices_are_multiple_choice(fields, data):
    found = dict(guessed(table(**fields)).data)
    assert found.pop("prompt").endswith("\nAnswer:")
    assert found == data


def test_pairs_of_sentences_are_no_choices():
    data = guessed(table(sentence1=sentence, sentence2=other_sentence, label=["0", "1"])).data
    assert data["prompt"] == "Sentence1: {sentence1}\nSentence2: {sentence2}\nAnswer:"
    assert "choices" not in data


def test_messages_are_a_chat():
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    assert guessed(table(id=str, messages=lambda row: turns)).data == {"messages": "messages"}


def test_the_user_may_name_the_label():
    records = table(text=sentence, topic=["a", "b"], team=["x", "y", "z"], reply=other_sentence)
    assert guessed(records).data["label_field"] == "topic"
    assert guessed(records, label="team").data["label_field"] == "team"
    assert guessed(records, label="reply").data["completion"] == "{reply}"
    with pytest.raises(
        UserError, match=r"--label names no field of the file; got: tem; expected: one of text, "
    ):
        guessed(records, label="tem")


@pytest.mark.parametrize(
    "fields",
    [{"text": sentence}, {"id": str, "price": lambda row: row / 7}, {"label": ["a", "b"]}, {"text": [""]}],
    ids=["text alone", "numbers", "label alone", "empty"],
)
def test_a_file_without_a_task_is_refused_with_its_fields(fields):
    with pytest.raises(
        UserError, match="the file does not show which field the model shall learn to write; got: "
    ):
        guessed(table(**fields))


def test_names_that_no_template_takes_are_told():
    columns, unusable = read_columns(table(**{"a:b": sentence, "text ": sentence, "text": sentence}))
    assert [column.name for column in columns] == ["text"]
    assert unusable == ["a:b", "text "]


def test_parquet_files_name_their_numbered_labels(tmp_path):
    path = tmp_path / "train.parquet"
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["sad", "joyful_mood"])}
    )
    datasets.Dataset.from_list(table(text=sentence, label=[0, 1]), features=features).to_parquet(path)
    records = [record for _, record in read_source("DATA", str(path))]
    data = guessed(records, names=_label_names(str(path))).data
    assert data["labels"] == {"0": "sad", "1": "joyful mood"}


def test_files_of_other_splits_are_found_by_their_names(tmp_path):
    for name in ("train-own.csv", "val-own.csv", "test-own.csv", "test.csv"):
        (tmp_path / name).touch()
    assert _other_files(str(tmp_path / "train-own.csv")) == {
        "validation": str(tmp_path / "val-own.csv"),
        "test": str(tmp_path / "test-own.csv"),
    }
    assert _other_files(str(tmp_path / "test.csv")) == {}


@pytest.mark.parametrize(
    "records",
    [
        table(text=sentence, topic=["a", "b", None]),
        table(question=sentence, choices=four, answer=[0, 1, 2, 3]),
        table(prompt=sentence, completion=other_sentence),
    ],
    ids=["classification", "multiple choice", "generation"],
)
def test_a_guess_builds_the_example_of_every_record(records):
    task = find_task(DataConfig(task="custom", train="x.jsonl", **guessed(records).data))
    examples = [task.build_example(record, row) for row, record in enumerate(records)]
    assert all(example.candidates and sentence(row) in example.prompt for row, example in enumerate(examples))
