"""The recipes that lezo-ds init writes."""

from __future__ import annotations

import copy
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from benchmark import answer_speeds
from datasets import ClassLabel, Dataset, Features, Value
from own_data import write_chat_model, write_tickets
from tiny_models import FAMILIES
from tiny_runs import write_model
from transformers import AutoTokenizer

from lezo_ds.cli import _Once, run_command
from lezo_ds.config import find_task, load_config
from lezo_ds.config.yaml_text import inline_yaml
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.tools import init
from lezo_ds.tools.columns import answers_have_lines, describe_task, read_records
from lezo_ds.tools.init import num_steps

REWARD = """
from lezo_ds import reward

@reward
def brevity(answers, records):
    return [1 / (1 + len(answer.split())) for answer in answers]
"""
TEXTS = [f"ticket number {number} says" for number in range(40)]
CLASSES = ["bug", "billing"] * 20


def records(**columns):
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def test_init_takes_the_only_columns_of_texts_and_labels():
    title, task = describe_task(records(id=list(range(40)), body=TEXTS, topic=CLASSES))
    assert title == "Classification of body by topic"
    assert task == {
        "prompt": "{body}\nTopic:",
        "label_field": "topic",
        "labels": ["billing", "bug"],
    }
    answers = [f"the answer is {number}" for number in range(60)]
    questions = records(question=[f"what is {number}" for number in range(60)], answer=answers)
    _, task = describe_task(questions, text="question", answer="answer", in_chat=True)
    assert task == {
        "prompt": "{question}\nAnswer:",
        "completion": "{answer}",
        "chat_template": True,
    }
    intents = [f"intent {number % 80}" for number in range(400)]
    _, task = describe_task(
        records(text=[f"say {number}" for number in range(400)], intent=intents)
    )
    assert task["label_field"] == "intent" and len(task["labels"]) == 80
    turns = [[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]] * 40
    assert describe_task(records(turns=turns, source=CLASSES))[1] == {"messages": "turns"}


def test_init_knows_the_usual_columns_of_questions_and_answers_and_keeps_their_input():
    texts = [f"text {number}" for number in range(40)]
    inputs = ["", "more"] * 20
    alpaca = records(instruction=texts, input=inputs, output=texts)
    _, task = describe_task(alpaca, in_chat=True)
    assert task == {
        "prompt": "{instruction}\n\n{input}\nOutput:",
        "completion": "{output}",
        "chat_template": True,
    }
    _, task = describe_task(alpaca, reward="judge:brevity", in_chat=True)
    assert task == {"prompt": "{instruction}\n\n{input}", "chat_template": True}
    without = records(instruction=texts, input=[""] * 40, output=texts)
    assert describe_task(without)[1]["prompt"] == "{instruction}\nOutput:"
    _, task = describe_task(records(prompt=texts, completion=texts, n=CLASSES))
    assert task == {"prompt": "{prompt}", "completion": "{completion}"}


TURNS = [[{"role": "user", "content": "hi"}]] * 40
ANSWERS = [[{"role": "assistant", "content": "yes"}]] * 40


def test_init_finds_the_texts_in_objects_with_answers():
    answers = [{"answer_start": [3], "text": [text]} for text in TEXTS]
    answers[0] = {"answer_start": [], "text": []}  # of a question without an answer
    rows = records(question=TEXTS, answers=answers)
    _, task = describe_task(rows, text="question", answer="answers")
    assert task["completion"] == "{answers.text}"


def test_init_takes_the_names_of_classes_that_a_data_set_stores(tmp_path, caplog):
    names = ["bad", "good", "unused"]
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    stored = Dataset.from_dict({"text": TEXTS, "label": [0, 1] * 20}, features=features)
    stored.to_parquet(tmp_path / "d.parquet")
    _, task = describe_task(read_records(str(tmp_path / "d.parquet"), "utf-8"))
    assert task["labels"] == {"0": "bad", "1": "good"}
    for broken in (b"[", b"[]", b'{"info": {"features": {"label": 1}}}', None):
        table = pa.table({"text": TEXTS, "label": [0, 1] * 20})
        table = table.replace_schema_metadata({b"huggingface": broken} if broken else None)
        pq.write_table(table, tmp_path / "e.parquet")
        _, task = describe_task(read_records(str(tmp_path / "e.parquet"), "utf-8"))
        assert task["labels"] == ["0", "1"]
    assert not caplog.messages


def test_labels_that_may_mean_none_are_named(caplog):
    for values, labels, missing in (
        (["good", "bad", "None", "good", "bad", "nan", "NA", "bad"], "NA None bad good", "NA None"),
        ([0, 1, 2, -1, 0, 1, 2, 0], "-1 0 1 2", "-1"),  # as SNLI marks what has no label
    ):
        caplog.clear()
        _, task = describe_task(records(text=TEXTS, label=values * 5))
        assert task["labels"] == labels.split()
        counted = sorted(message.partition(",")[0] for message in caplog.messages)
        assert counted == [f"5 records have the label {label}" for label in missing.split()]


def test_init_takes_turns_as_prompts_with_answers_or_a_reward():
    pairs = {"prompt": TURNS, "completion": ANSWERS}
    for columns in (pairs, pairs | {"completion": TEXTS}):
        _, task = describe_task(records(**columns), in_chat=True)
        expected = {"prompt": "{prompt}", "completion": "{completion}", "chat_template": True}
        assert task == expected
        with pytest.raises(
            UserError, match=r"prompt holds turns .* no chat template to write them"
        ):
            describe_task(records(**columns))
    _, task = describe_task(records(turns=TURNS, n=CLASSES), reward="a:b", in_chat=True)
    assert task == {"prompt": "{turns}", "chat_template": True}
    _, task = describe_task(records(turns=TURNS, reply=TEXTS), answer="reply", in_chat=True)
    assert (task["prompt"], task["completion"]) == ("{turns}", "{reply}")
    with pytest.raises(UserError, match=r"no conversation in turns has .* fix: .* --reward"):
        describe_task(records(turns=TURNS, n=CLASSES), in_chat=True)


COLORS = ("red", "blue", "green", "white")
LETTERS = {letter: [color] * 40 for letter, color in zip("ABCD", COLORS, strict=True)}
SHIFTED = [[*COLORS[n % 4 :], *COLORS[: n % 4]] for n in range(40)]
NUMBERS = [n * 7 % 4 for n in range(40)]
STRUCTS = [{"label": list("ABCD"), "text": texts} for texts in SHIFTED]
BY_LETTER = [dict(zip("ABCD", texts, strict=True)) for texts in SHIFTED]


@pytest.mark.parametrize(
    ("columns", "choices", "labels"),
    [
        ({"choices": SHIFTED, "answer": NUMBERS}, ["{choices}"], None),
        ({"words": SHIFTED, "answer": list(map(str, NUMBERS))}, ["{words}"], None),
        ({"endings": SHIFTED, "gold": COLORS * 10}, ["{endings}"], None),
        ({"choices": STRUCTS, "answerKey": ["ABCD"[n] for n in NUMBERS]}, ["{choices.text}"], None),
        ({"options": BY_LETTER, "cop": [n + 1 for n in NUMBERS]}, "options.", 1),
        (LETTERS | {"answer": ["ABCD"[n] for n in NUMBERS]}, "", "A"),
        (LETTERS | {"answer": ["abcd"[n] for n in NUMBERS[:36]] + ["1"] * 4}, "", "a"),
        (LETTERS | {"answer": [*COLORS * 9, "red", "red", "red", "2"]}, "", None),
        (
            {"option1": TEXTS, "option2": CLASSES, "answer": ["1", "2"] * 20},
            ["{option1}", "{option2}"],
            1,
        ),
        ({"opa": COLORS * 10, "opb": CLASSES, "opc": CLASSES, "n": NUMBERS}, None, None),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_init_finds_choices_and_which_is_right(columns, choices, labels, named):
    *_, right = columns
    questions = [f"question {n} of all" for n in range(40)]
    options = {"label": right} if named else {}
    if choices is None:  # n is no choice of three
        _, task = describe_task(records(question=questions, **columns), label="n")
        assert "choices" not in task
        return
    if isinstance(choices, str):
        choices = [f"{{{choices}{letter}}}" for letter in "ABCD"]
    first = {"question": questions}
    title, task = describe_task(records(**first, **columns), text="question", **options)
    expected = {"prompt": "{question}\nAnswer:", "label_field": right, "choices": choices}
    if labels is not None:
        number = len(choices) if len(choices) > 1 else 4
        expected["labels"] = (
            [1, 2, 3, 4] if labels == 1 else [chr(ord(labels) + n) for n in range(4)]
        )
        expected["labels"] = expected["labels"][:number]
    assert task == expected and title == f"Multiple choice: question, answered by {right}"


def test_init_says_what_to_do_with_choices_that_it_cannot_read(caplog):
    texts = [str(texts) for texts in SHIFTED]
    objects = [[{"label": "A", "text": text} for text in texts] for texts in SHIFTED]
    for column, kind in ((texts, "lists as texts"), (objects, "lists of objects")):
        with pytest.raises(UserError, match=f"choices has {kind}; fix: write lists of texts in"):
            describe_task(records(question=TEXTS, choices=column, answer=CLASSES), label="answer")
    two = records(question=TEXTS, choices=SHIFTED, answer=COLORS * 10, index=NUMBERS)
    with pytest.raises(UserError, match="hold the right choice: answer, index; fix: give --label"):
        describe_task(two)
    _, task = describe_task(records(text=TEXTS, choices=SHIFTED, topic=CLASSES), label="topic")
    assert task["labels"] == ["billing", "bug"]
    assert "choices may hold choices, and column topic does not say" in caplog.text
    tokens = [text.split() * 3 for text in TEXTS]
    _, task = describe_task(records(text=TEXTS, tokens=tokens, spam=[0, 1] * 20))
    assert task["labels"] == ["0", "1"]


def test_columns_of_lists_that_are_no_choices_change_nothing(caplog):
    lists = {"q: tags": [["x", "y"]] * 40, "answers": [["a", "b"]] * 40, "m": [{"k:": ["x"]}] * 40}
    _, task = describe_task(records(text=TEXTS, topic=CLASSES, **lists))
    assert task["labels"] == ["billing", "bug"] and not caplog.messages
    talk = [[*TURNS[0], *ANSWERS[0]]] * 40
    pairs = {"prompt": TEXTS, "completion": TEXTS}
    assert describe_task(records(messages=talk, **pairs))[1] == {"messages": "messages"}


def test_what_is_said_of_data_is_shown_once():
    once = _Once()
    shown = []
    for name in ("lezo_ds.data.tables", "lezo_ds.data.splits", "lezo_ds.runs", "lezo_ds.runs"):
        line = logging.LogRecord(name, logging.INFO, "", 0, "%d records", (3,), None)
        shown.append(once.filter(line))
    assert shown == [True, False, True, True]


def test_answers_of_several_lines_are_found():
    rows = records(q=TEXTS, a=["one\n"] * 39 + ["- one\n- two"])
    task = {"prompt": "{q}", "completion": "{a}"}
    assert answers_have_lines(rows, task) and not answers_have_lines(rows[:39], task)
    assert answers_have_lines([{}, {"a": ["x", "- one\n- two"]}], task)
    assert not answers_have_lines(rows, {"prompt": "{q}", "labels": ["a", "b"]})


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"prompt": TEXTS, "chosen": TEXTS, "rejected": TEXTS},
            {},
            "one of two answers, and no objective learns from pairs; fix: .* --answer chosen",
        ),
        ({"chosen": TURNS, "rejected": TURNS}, {}, "from pairs; fix: .* remove this column"),
        (
            {"turns": [[{"role": "user", "text": "Hi"}]] * 40},
            {},
            "content of turn 1 of field turns is null, not text; fix: write a text under its key",
        ),
        (
            {"prompt": TEXTS, "completion": TEXTS, "label": [True, False] * 20},
            {},
            "column label says which answers are good, .*; fix: keep the records of good answers",
        ),
        (
            {"a": TEXTS, "b": TEXTS, "c": CLASSES},
            {},
            "several columns hold texts: a, b; fix: give --text",
        ),
        (
            {"a": TEXTS, "b": CLASSES, "c": CLASSES},
            {},
            "few different values: b, c; fix: give --label",
        ),
        (
            {"a": TEXTS, "b": CLASSES},
            {"label": "c"},
            "--label c is not a column; fix: use one of a, b",
        ),
        (
            {"a": TEXTS, "b": TEXTS},
            {"label": "b"},
            "40 different labels in 40 records; fix: .* --answer b",
        ),
        ({"a": TEXTS[:3], "b": CLASSES[:3]}, {}, "3 records are too few .*; fix: add records"),
        (
            {"a|b": TEXTS[:3]},
            {},
            "one column only, 'a|b'; fix: add one with labels .* separate them by commas",
        ),
        (
            {"a": TEXTS, "b": [None, ""] * 20},
            {"label": "b"},
            "all 40 records lack a label: the column b is empty; fix: fill it in",
        ),
        (
            {"a": TEXTS, "b}": CLASSES, "{c": TEXTS},
            {"text": "{c", "label": "b}"},
            "no template can name the column '{c'; fix: rename it",
        ),
    ],
)
def test_init_asks_for_the_columns_that_are_not_clear(columns, options, message):
    with pytest.raises(UserError, match=message):
        describe_task(records(**columns), **options)


@pytest.mark.parametrize(
    "name",
    ["a{b}", "q: part", "a.b", "two words", "ü-ß", "1st", "class", 'say "x"', "it's", "a\\nb"],
)
def test_a_column_of_any_name_becomes_a_recipe_that_reads_it(name, tmp_path):
    for text, label in ((name, "topic"), ("text", name)):
        _, task = describe_task(records(**{text: TEXTS, label: CLASSES}))
        task |= {"train": "t.csv", "max_length": 64}
        lines = "".join(f"  {key}: {inline_yaml(value)}\n" for key, value in task.items())
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(
            "run_dir: r\nmodel: {path: m, dtype: fp32}\nmethod: zero_shot\ndata:\n" + lines
        )
        example = find_task(load_config(recipe).data).example({text: "T", label: "bug"})
        assert example.prompt.startswith("T\n") and example.label == 1


def test_labels_that_are_numbers_with_a_point_are_found():
    _, task = describe_task(records(body=TEXTS, stars=[1.0, 0.0] * 20, n=list(range(40))))
    assert (task["label_field"], task["labels"]) == ("stars", ["0", "1"])
    gaps = [0.5, float("nan"), None, 1.5] * 10
    assert describe_task(records(body=TEXTS, stars=gaps))[1]["labels"] == ["0.5", "1.5"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a b", "label": "x"}] * 3 + [["a b"]] * 9, "9 of 12 rows of .* are no records"),
        ([{"a;b": text} for text in TEXTS], "one column only, 'a;b'"),
        ([{"text": text, "label": ""} for text in TEXTS], "no column holds few different values"),
    ],
)
def test_init_names_what_is_wrong_with_a_file_before_it_counts(
    rows, message, tmp_path, monkeypatch
):
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(UserError, match=message):
        describe_task(read_records(str(tmp_path / "t.jsonl"), "utf-8"))


def test_init_names_a_directory_and_an_empty_file(tmp_path):
    (tmp_path / "t.csv").touch()
    for name, message in (
        ("", r"which is not a file; fix: name a file that ends in .*csv"),
        ("t.csv", "t.csv has no records; fix: fill the file"),
    ):
        with pytest.raises(UserError, match=message):
            read_records(str(tmp_path / name), "utf-8")


def test_init_writes_labels_with_characters_that_yaml_escapes(tmp_path, monkeypatch):
    classes = ("a\x7f b", "c\x80d \u061c e 😀")
    init_tickets(monkeypatch, tmp_path, classes)
    config = load_config(tmp_path / "recipe.yaml")
    assert set(config.data.labels) == set(classes)
    assert len(load_task_data(config).train.examples) == 24


def described_labels(labels, **options):
    texts = [f"ticket number {number} says" for number in range(len(labels))]
    return describe_task(records(body=texts, topic=labels), label="topic", **options)[1]["labels"]


def test_labels_that_differ_in_case_are_one_and_near_ones_are_named_with_counts(caplog):
    labels = 30 * ["bug"] + 3 * ["Bug"] + 27 * ["Rechnung"] + 2 * ["Rechnng"]
    assert described_labels(labels) == {
        "Bug": "bug",
        "Rechnng": "Rechnng",
        "Rechnung": "Rechnung",
        "bug": "bug",
    }
    assert caplog.messages == [
        "3 records with the label Bug count as bug",
        "the label Rechnng (2 records) is almost Rechnung (27 records); to count it as that, add "
        "--label-map 'Rechnng=Rechnung'",
    ]
    caplog.clear()
    mapped = described_labels(labels, label_map={"Rechnng": "rechnung", "bug": "a fault"})
    assert mapped["Rechnng"] == mapped["Rechnung"] == "Rechnung"
    assert (mapped["Bug"], mapped["bug"]) == ("Bug", "a fault")
    assert not any("almost" in message for message in caplog.messages)
    with pytest.raises(UserError, match="topic has no label Rechnug; fix: did you mean Rechn"):
        described_labels(labels, label_map={"Rechnug": "Rechnung"})
    with pytest.raises(UserError, match=r"topic has no two labels, only .'bug'.; fix: add records"):
        described_labels(40 * ["bug"])


def test_init_writes_a_recipe_that_a_run_can_start_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "LONG_STEP", 1e9)  # on a machine with other work, steps are long
    write_chat_model(tmp_path / "model")
    write_tickets(tmp_path / "tickets.csv")

    def recipe(*words):
        monkeypatch.setattr(sys, "argv", ["init", *words])
        run_command("init")

    for method, kept in (
        ("evolution-strategies", ("evolution-strategies", "fixed", False, 6)),
        ("fzoo", ("fzoo", "fixed", True, 15)),
        ("mezo", ("spsa", "uniform", False, 1)),
    ):
        recipe("model", "tickets.csv", "--out", f"{method}.yaml", "--method", method)
        config = load_config(tmp_path / f"{method}.yaml")
        zo, train = config.zo, config.train
        assert (zo.estimator, zo.layer_policy, zo.only_blocks, zo.directions) == kept
        assert (config.data.label_field, config.data.chat_template) == ("topic", True)
        num_steps_of = 1000 if method == "mezo" else 100
        assert (config.run_dir, train.steps) == ("runs/tickets", num_steps_of)
        assert "180 train, 60 dev, 60 test" in capsys.readouterr().out
    recipe("model", "tickets.csv", "--out", "new/folder/r.yaml")
    config = load_config(tmp_path / "new/folder/r.yaml")
    assert config.data.label_field == "topic"
    assert (config.zo.estimator, config.zo.examples_per_direction) == ("evolution-strategies", 1)
    again, swapped = "model tickets.csv --out mezo.yaml", "tickets.csv model"
    for words, message in ((again, "exists"), (swapped, "init model tic")):
        with pytest.raises(UserError, match=message):
            recipe(*words.split())
    rows = ['"the\ntopic","a\ntext"', *map(",".join, zip(CLASSES, TEXTS, strict=True))]
    (tmp_path / "my: table #2.csv").write_text("\n".join(rows))
    recipe("model", "my: table #2.csv", "--out", "odd.yaml")
    assert load_config(tmp_path / "odd.yaml").run_dir == "runs/my: table #2"
    (tmp_path / "bare.csv").write_text("\n".join(rows[1:]))
    with pytest.raises(UserError, match="bug is also a value in its column; fix: add a first row"):
        recipe("model", "bare.csv", "--out", "bare.yaml")
    (tmp_path / "cases.csv").write_text("\n".join([*rows, "Bug,x", "buug,y"]))
    cases = ["model", "cases.csv", "--out", "cases.yaml", "--label", "the\ntopic"]
    recipe(*cases, "--label-map", "buug=bug")
    labels = load_config(tmp_path / "cases.yaml").data.labels
    assert labels == {"Bug": "bug", "billing": "billing", "bug": "bug", "buug": "bug"}
    (tmp_path / "excel.csv").write_text("\n".join([*rows, "bug,Grüße"]), encoding="cp1252")
    with pytest.raises(UserError, match="--encoding cp1252"):
        recipe("model", "excel.csv", "--out", "excel.yaml")
    recipe("model", "excel.csv", "--out", "excel.yaml", "--encoding", "cp1252")
    assert load_config(tmp_path / "excel.yaml").data.encoding == "cp1252"
    (tmp_path / "judge_of_init.py").write_text(REWARD)
    recipe(
        "model",
        "tickets.csv",
        "--reward",
        "judge_of_init:brevity",
        "--text",
        "text",
        "--out",
        "own.yaml",
    )
    text = (tmp_path / "own.yaml").read_text()
    assert "  stop: []  # [] is the end of" in text and "  max_new_tokens: 128\n" in text
    small = ["generation.max_new_tokens=3", "data.max_length=128", "zo.directions=8"]
    config = load_config(tmp_path / "own.yaml", small)
    assert (config.data.prompt, config.train.objective) == ("{text}", "judge_of_init:brevity")
    speeds = answer_speeds(config, rounds=1)
    assert "384 tokens, 8 probes" in speeds and all(name in speeds for name in ("generate", "ours"))
    assert [num_steps(records) for records in (30, 1667, 100_000)] == [100, 310, 1000]


def init_tickets(monkeypatch, directory, classes, *words):
    """Write a recipe for a table of 40 tickets of these classes, and return its text."""
    monkeypatch.chdir(directory)
    if not (directory / "model").exists():
        write_chat_model(directory / "model")
    rows = [f"{text},{classes[number % 2]}" for number, text in enumerate(TEXTS)]
    (directory / "own.csv").write_text("\n".join(["text,topic", *rows]))
    monkeypatch.setattr(sys, "argv", ["init", "model", "own.csv", *words])
    run_command("init")
    return (directory / "recipe.yaml").read_text()


def test_a_reward_has_a_population_whatever_name_it_is_asked_by(tmp_path, monkeypatch):
    monkeypatch.setattr(init, "LONG_STEP", 1e9)  # on a machine with other work, steps are long
    (tmp_path / "judge_of_init.py").write_text(REWARD)
    reward = ["--reward", "judge_of_init:brevity", "--text", "text"]
    by_default = init_tickets(monkeypatch, tmp_path, ("bug", "billing"), *reward)
    assert load_config(tmp_path / "recipe.yaml").zo.examples_per_direction == 2
    (tmp_path / "recipe.yaml").unlink()
    asked = [*reward, "--method", "evolution-strategies"]
    assert init_tickets(monkeypatch, tmp_path, ("bug", "billing"), *asked) == by_default


def add_tokens(directory, *tokens):
    """Let a model whose tokens are bytes have these tokens as well, instead of rare bytes."""
    file = write_chat_model(directory) / "tokenizer.json"
    changed = json.loads(file.read_text())
    vocabulary = changed["model"]["vocab"]
    for rare, token in zip("\u00ff\u00fe\u00fd", tokens, strict=False):
        vocabulary[token] = vocabulary.pop(rare)
    pattern = "|".join([*tokens, "."])
    changed["pre_tokenizer"]["pretokenizers"][1]["pattern"] = {"Regex": pattern}
    file.write_text(json.dumps(changed))


def test_init_scores_labels_by_a_token_that_means_something(tmp_path, monkeypatch):
    add_tokens(tmp_path / "model", "def", "rech")
    for classes, labels in (
        (("defekt", "rechnung"), {"defekt": "def", "rechnung": "rech"}),
        (("Abt. defekt", "Abt. rechnung"), {"Abt. defekt": "def", "Abt. rechnung": "rech"}),
        (("bug", "billing"), ["billing", "bug"]),
        (("defekt", "lob"), ["defekt", "lob"]),
        (("a", "b"), ["a", "b"]),
        (("ärger", "lob"), ["lob", "ärger"]),
    ):
        (tmp_path / "recipe.yaml").unlink(missing_ok=True)
        text = init_tickets(monkeypatch, tmp_path, classes)
        config = load_config(tmp_path / "recipe.yaml")
        assert config.data.labels == labels
        assert ("by a token of each" in text) == isinstance(labels, dict)
        lengths = load_task_data(config).train.encoded[0].option_lengths
        if isinstance(labels, dict):
            assert lengths == (1, 1)
        fits_head = "fit-head --run runs/own --out runs/own-fitted" in text
        assert fits_head == (max(lengths) == 1)


@pytest.mark.parametrize(
    ("label", "tokens", "text"),
    [
        ("billing", ["b", "ill", "ing"], ""),
        ("billing", ["bill", "ing"], "bill"),
        ("IT support", ["IT", "sup"], "IT"),
        ("feature request", ["re", "request"], "request"),
        ("unpaid", ["paid"], ""),
    ],
)
def test_a_label_is_shortened_to_a_word_or_to_three_letters_that_begin_one(label, tokens, text):
    assert init.shortened_label(label, tokens) == text


def test_init_keeps_whole_labels_if_a_token_is_one_after_a_space_only(tmp_path, monkeypatch):
    """ " lob" is one token. The prompt ends with a line break, after which "lob" is three."""
    add_tokens(tmp_path / "model", "\u0120lob", "def")
    text = init_tickets(monkeypatch, tmp_path, ("Abt. lob", "Abt. defekt"))
    config = load_config(tmp_path / "recipe.yaml")
    assert config.data.labels == ["Abt. defekt", "Abt. lob"] and "by a token" not in text


def test_init_makes_a_step_smaller_that_would_take_long_and_names_what_would_be_faster(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(init, "LONG_STEP", 1e-9)
    monkeypatch.setattr("lezo_ds.tools.dry_run.LONG_STEP", 1e-9)
    text = init_tickets(monkeypatch, tmp_path, ("bug", "billing"))
    config = load_config(tmp_path / "recipe.yaml")
    assert config.train.batch_size == 4
    ways = "labels of one token each (a map in data.labels), fewer examples"
    assert "# A step takes about 0 s here; with 16 examples" in text
    captured = capsys.readouterr()
    assert f"faster        {ways}" in captured.out and "measuring" in captured.err
    init_tickets(
        monkeypatch, tmp_path, ("bug", "billing"), "--method", "fzoo", "--out", "fzoo.yaml"
    )
    config = load_config(tmp_path / "fzoo.yaml")
    assert (config.train.batch_size, config.zo.directions) == (4, 7)


@pytest.mark.parametrize(
    ("full_step", "examples", "directions", "shown"),
    [
        (9, 16, 15, None),
        (20, 8, 15, "takes about 10 s here; .* it would take 20 s"),
        (40, 4, 15, "takes about 10 s here; .* it would take 40 s"),
        (80, 4, 7, "takes about 10 s here; .* it would take 80 s"),
        (800, 4, 7, "takes about 100 s here; .* it would take 800 s"),
    ],
)
def test_init_takes_the_largest_step_that_is_not_long(
    full_step, examples, directions, shown, tmp_path, monkeypatch
):
    """The smallest step, which is measured, has an eighth of the full one's examples and probes."""
    monkeypatch.setattr(init, "measured_step", lambda *_: full_step / 8)
    text = init_tickets(monkeypatch, tmp_path, ("bug", "billing"), "--method", "fzoo")
    config = load_config(tmp_path / "recipe.yaml")
    assert (config.train.batch_size, config.zo.directions) == (examples, directions)
    assert "A step takes" not in text if shown is None else re.search(shown, text)


def write_family(directory, family, **changes):
    """Write a tiny model of a family whose tokens are bytes."""
    tokenizer = AutoTokenizer.from_pretrained(write_chat_model(directory / "bytes"))
    config = copy.deepcopy(FAMILIES[family][0])
    config.update(changes | {"vocab_size": len(tokenizer)})
    tokenizer.save_pretrained(write_model(config, directory / "model"))


def test_init_perturbs_all_tokens_of_a_model_whose_contexts_cannot_be_read_apart(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(init, "LONG_STEP", 1e-9)
    of_length = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    write_family(tmp_path, "llama", rope_parameters=of_length)
    text = init_tickets(monkeypatch, tmp_path, ("bug", "billing"))
    config = load_config(tmp_path / "recipe.yaml")
    assert (config.train.batch_size, config.zo.directions) == (4, 6)
    assert "with 16 examples and all directions" in text


def test_init_uses_fzoo_for_labels_if_the_model_has_experts(tmp_path, monkeypatch, caplog):
    write_family(tmp_path, "qwen3_moe")
    init_tickets(monkeypatch, tmp_path, ("bug", "billing"))
    assert load_config(tmp_path / "recipe.yaml").zo.estimator == "fzoo"
    (message,) = [text for text in caplog.messages if "uses fzoo" in text]
    assert message.startswith("the recipe uses fzoo, because zo.noise_rank perturbs plain products")
    (tmp_path / "recipe.yaml").unlink()
    with pytest.raises(UserError, match="perturbs plain products only"):
        init_tickets(monkeypatch, tmp_path, ("bug", "billing"), "--method", "evolution-strategies")


def test_init_that_is_stopped_leaves_no_recipe(tmp_path, monkeypatch):
    def stop(*_):
        assert not (tmp_path / "recipe.yaml").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as stopping:
        stopping.setattr(init, "measured_step", stop)
        with pytest.raises(KeyboardInterrupt):
            init_tickets(stopping, tmp_path, ("bug", "billing"))
    assert not (tmp_path / "recipe.yaml").exists()
    assert init_tickets(monkeypatch, tmp_path, ("bug", "billing"))


@pytest.fixture
def init_on_gpus(tmp_path, monkeypatch, capsys):
    """A function that writes a recipe where there are GPUs, and returns it with what is printed."""
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "model")
    write_tickets(tmp_path / "tickets.csv")
    monkeypatch.setattr(init.distributed, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(init, "dry_run", lambda _, num_gpus, **__: [f"a plan for {num_gpus} GPUs"])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)  # it counts emulation

    def write(number, gigabytes, *words, capability=(9, 0), **changes):
        memory = SimpleNamespace(total_memory=int(gigabytes * 2**30))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
        monkeypatch.setattr(sys, "argv", ["init", "model", "tickets.csv", *words])
        file = tmp_path / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        run_command("init")
        return load_config(tmp_path / "recipe.yaml"), capsys.readouterr().out

    return write


OPT_30B = {
    "hidden_size": 7168,
    "word_embed_proj_dim": 7168,
    "ffn_dim": 4 * 7168,
    "num_hidden_layers": 48,
    "num_attention_heads": 56,
    "vocab_size": 50272,
    "max_position_embeddings": 256,
}


def test_init_knows_what_eight_gpus_multiply_and_that_each_can_hold_a_small_model(init_on_gpus):
    config, printed = init_on_gpus(8, 16, capability=(7, 5))
    assert (config.model.dtype, config.deepspeed) == ("fp16", "zero3_fp16")
    assert (config.partition_size, config.tensor_parallel) == (1, None)
    assert "is written; next: deepspeed --num_gpus 8" in printed


@pytest.mark.parametrize(
    ("gpus", "gigabytes", "method", "keys"),
    [
        (4, 39.4, "lezo", (4, "fp32_master")),
        (4, 22.5, "lezo", (4, "stochastic")),
        (4, 39.4, "fzoo", (4, "fp32_master")),
        (2, 79.1, "mezo", (2, "fp32_master")),
    ],
)
def test_init_splits_opt_30b_as_its_page_says(gpus, gigabytes, method, keys, init_on_gpus):
    config, _ = init_on_gpus(gpus, gigabytes, "--method", method, **OPT_30B)
    assert (config.tensor_parallel, config.zo.update_precision) == keys
    assert (config.model.dtype, config.partition_size) == ("fp16", None)
    if method != "fzoo":
        assert config.zo.perturbation_scale == 1e-3


def test_init_says_that_a_model_does_not_fit_and_what_would(init_on_gpus, tmp_path):
    config, printed = init_on_gpus(1, 22.5, "--method", "lezo", **OPT_30B)
    assert config.deepspeed == "zero3_cpu_offload"
    expected = "It does not fit: a rank needs .* GiB of a GPU's 22.5, .*; take more GPUs, or set"
    assert re.search(f"recipe.yaml is written. {expected} model.bits=4 peft.kind=lora", printed)
    assert re.search(f"# {expected}", (tmp_path / "recipe.yaml").read_text())


def test_init_takes_bf16_with_a_larger_scale_only_where_fp16_is_too_narrow(
    init_on_gpus, monkeypatch
):
    monkeypatch.setattr(init, "_BEYOND_FP16", {"opt"})
    config, _ = init_on_gpus(1, 80, "--method", "lezo")
    assert (config.model.dtype, config.zo.perturbation_scale) == ("bf16", 5e-3)
    Path("recipe.yaml").unlink()
    config, _ = init_on_gpus(1, 80, "--method", "lezo", capability=(7, 5))
    assert config.model.dtype == "fp16"
