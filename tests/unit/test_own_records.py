"""Tasks that a recipe describes: what a record becomes, how files are read and split, and what is refused."""

from __future__ import annotations

import json
import logging

import pytest
from lezo_ds.data.records import MAX_CHARACTERS, load_own_splits
from own_data import write_tickets

from lezo_ds.config import config_from_dict, config_to_dict, find_task
from lezo_ds.data.tables import read_source
from lezo_ds.errors import HubError, UserError
from lezo_ds.tasks.base import Example
from lezo_ds.tasks.metrics import METRICS, find_metric, macro_f1

BASE = {"run_dir": "run", "method": "zero_shot", "model": {"path": "model", "dtype": "fp32"}}
CLASSES = {
    "train": "t.csv",
    "prompt": "{text} is about",
    "label_field": "topic",
    "labels": ["bug", "billing"],
}
CHOICES = {"train": "t.csv", "prompt": "{text}\n", "label_field": "right", "choices": ["{a}", "{b}"]}
COMPLETION = {"train": "t.csv", "prompt": "{text}\nAnswer:", "completion": "{answers}"}


def config_of(data, *overrides):
    return config_from_dict({**BASE, "data": data}, "recipe.yaml", overrides)


def task_of(**data):
    return find_task(config_of(data).data)


def example_of(record, **data):
    return task_of(**data).build_example(record, 3)


def splits_of(path, data=CLASSES, **settings):
    return load_own_splits(task_of(**data | {"train": str(path)}), str(path), **settings)


def write_csv(path, *lines):
    path.write_text("text,topic\n" + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


# What a record becomes.


def test_a_list_of_labels_is_what_the_prompt_is_continued_with():
    assert example_of({"text": "It fails", "topic": "bug"}, **CLASSES) == Example(
        prompt="It fails is about",
        candidates=(" bug", " billing"),
        label=0,
        index=3,
        null_prompt=" is about",
    )


def test_a_map_gives_each_label_its_text_in_an_order_that_no_journal_can_change():
    labels = {"bug": "a fault of ours", "1": "money"}
    for given in (labels, dict(reversed(labels.items()))):
        example = example_of({"text": "It fails", "topic": 1}, **CLASSES | {"labels": given})
        assert (example.candidates, example.label) == ((" money", " a fault of ours"), 0)


def test_a_text_follows_white_space_without_another_space():
    data = CLASSES | {"prompt": "{text}\n", "labels": ["bug", "billing"]}
    assert example_of({"text": "It fails", "topic": "bug"}, **data).candidates == ("bug", "billing")


@pytest.mark.parametrize(
    ("right", "labels", "label"),
    [(1, None, 1), ("1", None, 1), ("yes", None, 0), ("B", ["A", "B"], 1), ("", None, None)],
)
def test_the_right_choice_is_a_number_a_text_or_a_label(right, labels, label):
    record = {"text": "Is it?", "a": "yes", "b": "no", "right": right}
    example = example_of(record, **CHOICES, labels=labels)
    assert (example.candidates, example.label) == (("yes", "no"), label)


def test_choices_may_be_one_field_with_a_list():
    record = {"text": "Is it?", "options": ["yes", "no", "maybe"], "right": "maybe"}
    example = example_of(record, **CHOICES | {"choices": ["{options}"]})
    assert (example.candidates, example.label) == (("yes", "no", "maybe"), 2)


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
    assert task_of(**COMPLETION | {"prompt": "{text.__class__}"}).fields.keys() >= {"text.__class__"}


# Files.


RECORDS = [{"text": f"text {i}, 007", "topic": ("bug", "billing")[i % 2]} for i in range(20)]


@pytest.mark.parametrize("ending", ["csv", "tsv", "json", "jsonl", "parquet", "lines.json"])
def test_every_kind_of_file_gives_the_same_examples(ending, tmp_path):
    from datasets import Dataset

    path, table = tmp_path / f"data.{ending}", Dataset.from_list(RECORDS)
    if ending in ("csv", "tsv"):
        table.to_csv(path, sep="," if ending == "csv" else "\t", index=False)
    elif ending == "parquet":
        table.to_parquet(path)
    else:
        lines = [json.dumps(record) + "\n" for record in RECORDS]
        path.write_text(json.dumps(RECORDS) if ending == "json" else "\n".join(lines))
    splits, records = splits_of(path, seed=1)
    found = sorted((*splits.train, *splits.dev, *splits.test), key=lambda example: example.index)
    assert [example.prompt for example in found] == [f"text {i}, 007 is about" for i in range(20)]
    assert [record["text"] for record in records] == [
        example.prompt.removesuffix(" is about") for example in splits.train
    ]


def test_a_table_of_semicolons_and_lines_of_white_space_is_read(tmp_path):
    lines = ["text;topic", '"a, b; c";bug', "  ", ";", "d;bug", "e;feature"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    rows = read_source("data.train", str(tmp_path / "t.csv"))
    assert [record["text"] for _, record in rows] == ["a, b; c", "d", "e"]
    assert [place.rpartition(" ")[2] for place, _ in rows] == ["2)", "5)", "6)"]


def test_a_column_may_have_a_dot_in_its_name_and_spaces_after_its_labels(tmp_path):
    lines = ["meta.text,meta.topic", *[f"x{i},{'bug ' if i % 2 else 'feature'}" for i in range(10)], "y, "]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    keys = {"prompt": "{meta.text}", "label_field": "meta.topic", "labels": ["bug", "feature"]}
    splits, _ = splits_of(tmp_path / "t.csv", keys)
    examples = (*splits.train, *splits.dev, *splits.test)
    assert {example.prompt: example.label for example in examples} == {f"x{i}": 1 - i % 2 for i in range(10)}


def test_a_table_holds_text_only(tmp_path):
    write_csv(tmp_path / "t.csv", '"NA",1', "007,2", "true,1")
    splits, _ = splits_of(tmp_path / "t.csv", CLASSES | {"labels": ["1", "2"]})
    prompts = {example.prompt for split in (splits.train, splits.dev, splits.test) for example in split}
    assert prompts == {"NA is about", "007 is about", "true is about"}


def test_splits_are_drawn_by_seed_without_overlap_and_the_log_says_so(tmp_path, caplog):
    path = write_tickets(tmp_path / "tickets.csv")
    data = CLASSES | {"labels": ["billing", "bug", "shipping"]}
    with caplog.at_level(logging.INFO):
        splits, _ = splits_of(path, data, seed=4)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        f"data.{name} is not given: 60 of the 300 records of {path} are drawn for it, by data.seed=4"
        for name in ("test", "validation")
    ]
    rows = [{example.index for example in split} for split in (splits.train, splits.dev, splits.test)]
    assert [len(found) for found in rows] == [180, 60, 60]
    assert set.union(*rows) == set(range(300))
    assert splits_of(path, data, seed=4)[0] == splits
    assert splits_of(path, data, seed=5)[0] != splits
    small = splits_of(path, data, seed=4, num_train=1, num_dev=1)[0]
    assert small.test == splits.test  # an evaluation of a model asks for no training examples


def test_files_that_are_given_are_used_whole(tmp_path, caplog):
    train = write_csv(tmp_path / "a.csv", *["x,bug"] * 10)
    other = write_csv(tmp_path / "b.csv", *["y,billing"] * 7)
    with caplog.at_level(logging.INFO):
        splits, _ = splits_of(train, validation=str(other), test=str(other))
    assert [len(split) for split in (splits.train, splits.dev, splits.test)] == [10, 7, 7]
    assert caplog.records == []


# What is refused.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (CLASSES | {"prompt": "no field"}, "names no field of the records"),
        (CLASSES | {"prompt": "{text"}, "is not a template"),
        (CLASSES | {"prompt": "{}"}, "without the plain name of a field"),
        (CLASSES | {"prompt": "{text!r:>9}"}, r"\{text!r:>9\}"),
        (CLASSES | {"labels": ["bug"]}, "two or more labels"),
        (CLASSES | {"labels": {"a": "x", "b": "x"}}, "two or more labels"),
        (CLASSES | {"labels": [True, False]}, "write yes, no, true and false in quotes"),
        (CLASSES | {"labels": {"a": ["x"]}}, "data.labels in recipe.yaml is not valid"),
        (CLASSES | {"labels": None}, "does not say what the model shall answer"),
        (CLASSES | {"label_field": None}, "data.label_field is missing"),
        (CLASSES | {"train": None}, "needs data.train"),
        (CLASSES | {"path": "data"}, "both say where the data is"),
        (CLASSES | {"task": "sst2"}, "cannot change data.task=sst2"),
        ({"task": "custom", "train": "t.csv"}, "needs data.prompt"),
        ({"task": "sst2", "test": "t.csv"}, "need data.train"),
        (CHOICES | {"labels": {"A": "x", "B": "y"}}, "must be a list"),
        (COMPLETION | {"label_field": "x"}, "does not go together with data.label_field"),
        (COMPLETION | {"metric": "exact_mach"}, "did you mean exact_match"),
    ],
)
def test_keys_that_make_no_task_are_refused_before_any_file_is_read(data, message):
    with pytest.raises(UserError, match=message):
        config_of(data)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["x,bug", "y,bgu"], r"record 2 of the train split of custom \(.*t.csv line 3\).*did you mean bug"),
        (["x,bug", "", "y"], r"t.csv line 4 cannot be read as a table.*1 values for 2 columns"),
        (['"x\ny",bug', "y,bug,z"], r"t.csv line 4 cannot be read as a table.*3 values for 2 columns"),
        (['"x,bug'], r"t.csv line 2 cannot be read as a table"),
        ([], r"t.csv is empty"),
        (["x,", "y,"], "2 records without an answer"),
        (["x,bug"], "too few records"),
        (["x" * (MAX_CHARACTERS + 1) + ",bug"], r"field text of record 1 .*line 2\) is too long"),
    ],
)
def test_a_bad_table_is_refused_with_file_and_record(lines, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        splits_of(write_csv(tmp_path / "t.csv", *lines))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"txt": "x", "topic": "bug"}\n',
            r"record 1 .*a.jsonl line 1\) has no field text.*did you mean txt",
        ),
        ('\n{"text": null, "topic": "bug"}\n', r"line 2\) does not fit the task: field text is not a single"),
        ('{"text": "\\ud800", "topic": "bug"}\n', "half of a character"),
        ('{"text": "x", "topic": "bug"}\n{"text"\n', "a.jsonl line 2 is not a JSON object"),
        ("", "a.jsonl is empty"),
    ],
)
def test_bad_json_lines_are_refused_with_file_and_line(content, message, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        splits_of(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.csv", None, "which is not there"),
        ("a.xlsx", b"x", "a file that ends in .csv"),
        ("a.csv", b"", "cannot be read as a table"),
        ("a.csv", b"text,topic\nx,bug\n\xff\xfe,bug\n", "a.csv line 3 is not UTF-8; .*CSV UTF-8"),
        ("a.json", b'[{"text": "x"}, 3]', "item 2 is not a JSON object"),
        ("a.json", b'[{"text": "x"}', "cannot be read as JSON"),
        ("a.parquet", b"x", "cannot be read as parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        splits_of(tmp_path / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_split_of_the_hub_that_cannot_be_reached_is_named():
    with pytest.raises(HubError, match=r"cannot load stanfordnlp/none \(plain\).*set data.train to a file"):
        splits_of("stanfordnlp/none/plain:train")


# Metrics, and recorded runs.


def test_macro_f1_is_the_mean_over_classes():
    labels = [Example("", (" a", " b", " c"), label, 0) for label in (0, 0, 0, 1, 2)]
    # F1 of class 0: precision 2/2, recall 2/3; class 1: 1/2, 1/1; class 2: 1/1, 1/1.
    assert macro_f1([0, 0, 1, 1, 2], labels) == pytest.approx((0.8 + 2 / 3 + 1) / 3)


def test_exact_match_normalizes():
    examples = [Example("", (" x",), 0, 0, references=("The Tower", "Eiffel")) for _ in range(2)]
    assert METRICS["exact_match"].score(["tower.", "Tower bridge"], examples) == 0.5


@pytest.mark.parametrize(("name", "kind"), [("f1", "classification"), ("accuracy", "generation")])
def test_a_metric_that_does_not_fit_the_kind_of_task_is_refused(name, kind):
    with pytest.raises(UserError, match=f"data.metric={name} does not fit a task of the kind {kind}"):
        find_metric(name, kind)


def test_a_recorded_task_need_not_be_known_here():
    recorded = config_to_dict(config_of({"task": "sst2"}))
    recorded["data"] |= {"task": "theirs", "metric": "their_module:score"}
    config = config_from_dict(recorded, "run", recorded=True)
    assert (config.data.task, config.data.metric) == ("theirs", "their_module:score")
    with pytest.raises(UserError, match="unknown task"):
        find_task(config.data)


def test_a_list_or_a_map_survives_a_record():
    for labels in (["bug", "billing"], {"bug": "a bug", "a.b": "c"}):
        config = config_of(CLASSES | {"labels": labels})
        recorded = json.loads(json.dumps(config_to_dict(config), sort_keys=True))
        assert config_from_dict(recorded, "run", recorded=True) == config


def test_texts_on_the_command_line_are_separated_by_commas():
    config = config_of(
        {}, "data.train=t.csv", 'data.prompt="{text}:"', "data.label_field=x", "data.labels=a, b"
    )
    assert config.data.labels == ["a", "b"]
