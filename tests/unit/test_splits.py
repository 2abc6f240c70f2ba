"""Which examples each split has, and what is said of records that are not used."""

import json
from collections import Counter
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from assets import write_records
from golden_tasks import GOLDEN

from lezo_ds.config import DataConfig
from lezo_ds.data.described import find_task
from lezo_ds.data.examples import Example
from lezo_ds.data.mezo import TASKS
from lezo_ds.data.splits import draw_splits, json_text, read_split, sources_of, with_demonstrations
from lezo_ds.errors import UserError

LABELS = {"prompt": "{text}", "label_field": "topic", "labels": ["bug", "billing", "shipping"]}


def tickets(count, labels=("bug", "billing"), **more):
    return [{"text": f"ticket {n}", "topic": labels[n % len(labels)], **more} for n in range(count)]


def data_of(directory, records, **keys):
    """Return the section data of a recipe; `records` are lists, by split."""
    files = {}
    for split, rows in records.items():
        files[split] = str(directory / f"{split}.jsonl")
        write_records(directory / f"{split}.jsonl", rows)
    return DataConfig(**files, **(LABELS | keys))


def draw(data, task=None):
    """Return the texts of each split, in order."""
    task = task or find_task(data)
    sources = sources_of(task, data)
    classes = []
    stored = {
        split: list(read_split(task, data, source, classes)) for split, source in sources.items()
    }
    labels, keys = (
        {split: np.array([row[name] for row in rows]) for split, rows in stored.items()}
        for name in ("label", "key")
    )
    drawn = draw_splits(task, data, labels, keys)
    texts = {}
    for split, rows in drawn.items():
        of_source = stored.get(split, stored["train"])
        texts[split] = [task.example(json.loads(of_source[row]["record"])).prompt for row in rows]
    return texts


def sizes_of(drawn):
    return tuple(map(len, drawn.values()))


def refusal_of(data):
    with pytest.raises(UserError) as error:
        draw(data)
    return str(error.value)


def test_bad_records_are_refused_together_with_their_rows_or_left_out(tmp_path, caplog):
    rows = tickets(20)
    rows[3] = rows[3] | {"topic": "biling"}
    rows[5] = rows[5] | {"text": "\ud83d"}
    rows[7] = rows[7] | {"topic": "biling"}
    data = data_of(tmp_path, {"train": rows})
    message = refusal_of(data)
    assert message.startswith("3 of 20 records cannot be used: row 4 of ")
    assert "row 6 of" in message and "it has half of a character" in message
    assert "row 8 of" not in message  # the same problem
    assert message.endswith("or leave out such records: data.skip_unusable=true")
    drawn = draw(data.model_copy(update={"skip_unusable": True}))
    assert sum(sizes_of(drawn)) == 17
    assert "left out: 3 of 20 records cannot be used" in caplog.text


def test_a_mistake_of_the_recipe_is_not_answered_by_leaving_records_out(tmp_path):
    data = data_of(tmp_path, {"train": tickets(20)}, prompt="{txt}")
    assert "there is no column txt, only text, topic" in refusal_of(data)
    assert "skip_unusable" not in refusal_of(data)
    data = data.model_copy(update={"skip_unusable": True})
    assert "20 of 20 records cannot be used" in refusal_of(data)


def test_records_without_an_answer_are_left_out_and_counted(tmp_path, caplog):
    rows = [*tickets(8), *tickets(2, labels=(None, ""))]
    assert sum(sizes_of(draw(data_of(tmp_path, {"train": rows})))) == 8
    assert "fix: add records, or set a" in refusal_of(data_of(tmp_path, {"train": tickets(1)}))
    assert "2 of 10 records of" in caplog.text and "no right answer and are left out" in caplog.text
    assert "none of the 2 records" in refusal_of(data_of(tmp_path, {"train": rows[8:]}))


def test_bytes_of_parquet_are_no_text():
    assert json_text({"text": b"abc", "day": date(2026, 1, 31)}) == (
        '{"text": ["3 bytes"], "day": "2026-01-31"}'
    )


@pytest.mark.parametrize("column", ["image", "images"])
def test_a_text_that_stands_for_an_image_is_refused(column, tmp_path):
    rows = tickets(4, **{column: ["a.png"]})
    assert sum(sizes_of(draw(data_of(tmp_path, {"train": rows})))) == 4
    rows[1]["text"] = "<image> What?"
    refusal = refusal_of(data_of(tmp_path, {"train": rows}))
    assert "it has images, and a text with <image>" in refusal
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "A cat."}]
    write_records(tmp_path / "chat.jsonl", [{"turns": turns, column: "a.png"}])
    data = DataConfig(train=str(tmp_path / "chat.jsonl"), messages="turns")
    assert "no images are read" in refusal_of(data)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sst2", {"label": True}, "column `label` is True, not of type int"),
        ("sst2", {"label": -1}, "the label is -1, not 0 to 1"),
        ("squad", {"answers": {"text": "Rain"}}, r"column `answers.text` is 'Rain', not of type"),
        ("squad", {"answers": ["Rain"]}, r"there is no column answers.text"),
        ("copa", {"question": "Effect"}, "it does not fit the task copa: KeyError: 'Effect'"),
    ],
)
def test_a_record_of_another_type_than_the_papers_is_refused(name, change, message, tmp_path):
    record = next(golden.record for golden in GOLDEN if golden.task == name)
    for split in ("train", "validation"):
        write_records(tmp_path / f"{split}.jsonl", [record, record | change])
    with pytest.raises(UserError, match=message):
        draw(DataConfig(task=name, path=str(tmp_path)))


def test_a_record_at_which_ones_own_task_fails_is_named(tmp_path, monkeypatch):
    data = data_of(tmp_path, {"train": tickets(3)})
    task = find_task(data)
    monkeypatch.setattr(type(task), "build_example", lambda _, record: record["txt"])
    assert "row 1 of" in refusal_of(data)
    assert "it does not fit the task custom: KeyError: 'txt'" in refusal_of(data)


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda n: ("a", "b") * n, "it has the candidates ['a', 'b', 'a', 'b'], and the first"),
        (lambda _: "ab", "an Example has a text as its prompt, and tuples of texts as candidates"),
    ],
)
def test_ones_own_labels_are_a_tuple_and_the_same_for_all(build, problem, tmp_path, monkeypatch):
    data = data_of(tmp_path, {"train": [{"text": "1"}], "test": [{"text": "2"}]})
    own = lambda _, record: Example("", build(int(record["text"])), 0)  # noqa: E731
    monkeypatch.setattr(type(find_task(data)), "build_example", own)
    assert problem in refusal_of(data)


def test_splits_are_those_of_mezos_own_code(tmp_path):
    seed = 42
    for split, count in (("train", 2000), ("validation", 1500)):
        rows = [{"sentence": f"review {n}", "label": n % 2} for n in range(count)]
        write_records(tmp_path / f"{split}.jsonl", rows)
    drawn = np.random.RandomState(seed).permutation(2000).tolist()[:1500]
    scored = np.random.RandomState(seed).permutation(1500).tolist()[:1000]
    rows_of = {"train": drawn[:-500], "dev": drawn[-500:], "test": scored}
    expected = {split: [f"review {n} It was" for n in rows] for split, rows in rows_of.items()}
    for protocol in ("clean", "mezo"):
        data = DataConfig(task="sst2", path=str(tmp_path), protocol=protocol, seed=seed)
        assert draw(data) == expected


PUBLISHED = [("cb", "clean", (150, 100, 56)), ("cb", "mezo", (150, 100, 56))]
PUBLISHED += [("wsc", "clean", (454, 100, 104)), ("wsc", "mezo", (54, 500, 104))]


@pytest.mark.parametrize(("name", "protocol", "sizes"), PUBLISHED)
def test_tasks_get_their_published_sizes(name, protocol, sizes, tmp_path, caplog):
    record = next(golden.record for golden in GOLDEN if golden.task == name)
    write_records(tmp_path / "train.jsonl", [record] * {"cb": 250, "wsc": 554}[name])
    write_records(tmp_path / "validation.jsonl", [record] * sizes[2])
    drawn = draw(DataConfig(task=name, path=str(tmp_path), protocol=protocol))
    assert sizes_of(drawn) == sizes
    assert ("MeZO's protocol trains on 54" in caplog.text) == (sizes[0] == 54)


def test_own_splits_are_drawn_by_seed_without_overlap(tmp_path):
    data = data_of(tmp_path, {"train": tickets(100)}, seed=4)
    drawn = draw(data)
    assert sizes_of(drawn) == (60, 20, 20)
    assert len(set(drawn["train"] + drawn["dev"] + drawn["test"])) == 100
    assert draw(data) == drawn != draw(data.model_copy(update={"seed": 5}))
    small = draw(data.model_copy(update={"num_train": 1, "num_dev": 1}))
    assert small["test"] == drawn["test"]
    with pytest.raises(UserError, match="too few for 90 to train on, 20 for dev"):
        draw(data.model_copy(update={"num_train": 90}))
    for key, file in {"num_dev": "validation", "num_test": "test"}.items():
        with pytest.raises(UserError, match=f"{key}=101 is more than the 100 records of its file"):
            draw(data.model_copy(update={key: 101, file: data.train}))
    # Of a task of the papers, too, all records of one's own file are used.
    write_records(tmp_path / "t.jsonl", [{"sentence": f"{n}", "label": n % 2} for n in range(20)])
    assert sizes_of(draw(DataConfig(task="sst2", train=str(tmp_path / "t.jsonl")))) == (12, 4, 4)


def test_splits_have_the_labels_in_their_shares_whatever_the_seed(tmp_path):
    labels = 70 * ["bug"] + 20 * ["billing"] + 10 * ["shipping"]
    rows = [{"text": f"{label} {n}", "topic": label} for n, label in enumerate(labels)]
    for seed in range(3):
        drawn = draw(data_of(tmp_path, {"train": rows}, seed=seed))
        for split in ("test", "dev"):
            counts = Counter(text.split()[0] for text in drawn[split])
            assert counts == {"bug": 14, "billing": 4, "shipping": 2}


def test_test_records_that_repeat_a_text_are_left_out_and_counted(tmp_path, caplog):
    rows = tickets(30)
    repeated = [{**row, "text": f" Ticket  {n}"} for n, row in enumerate(rows[:4])]
    test = [*repeated, {**rows[0], "text": "another"}]
    drawn = draw(data_of(tmp_path, {"train": rows, "test": test}, num_train=5))
    assert "another" in drawn["test"]
    seen = set(drawn["train"] + drawn["dev"])
    left_out = {f"ticket {n}" for n in range(4)} & seen
    assert len(drawn["test"]) == 5 - len(left_out)
    assert f"{len(left_out)} of 5 test records repeat the text of records" in caplog.text


def test_one_file_for_all_splits_and_one_label_are_said(tmp_path, caplog):
    rows = tickets(20, labels=("bug",))
    drawn = draw(data_of(tmp_path, {"train": rows, "validation": rows, "test": rows}))
    assert sizes_of(drawn) == (20, 20, 20)
    assert caplog.messages[0] == "all 20 training records have the same label"
    for split, message in zip(("dev", "test"), caplog.messages[1:], strict=True):
        assert f"20 of 20 {split} records repeat the text" in message


def test_choices_whose_numbers_begin_at_1_are_refused_with_the_labels_that_read_them(tmp_path):
    rows = [{"text": f"q{n}", "a": "x", "b": "y", "c": "z", "topic": 1 + n % 2} for n in range(30)]
    write_records(tmp_path / "t.jsonl", rows)
    keys = {"prompt": "{text}", "label_field": "topic", "choices": ["{a}", "{b}", "{c}"]}
    data = DataConfig(train=str(tmp_path / "t.jsonl"), **keys)
    assert "indices count from 0; fix: list in data.labels" in refusal_of(data)
    assert sizes_of(draw(data.model_copy(update={"labels": ["1", "2", "3"]}))) == (18, 6, 6)


def test_data_path_is_a_folder_with_one_file_of_each_split(tmp_path):
    keys = LABELS | {"path": str(tmp_path)}
    write_records(tmp_path / "train.jsonl", tickets(20))
    with pytest.raises(UserError, match="has 0 files of the split validation: none"):
        draw(DataConfig(**keys))
    write_records(tmp_path / "validation-00000.jsonl", tickets(9, text="another"))
    assert sizes_of(draw(DataConfig(**keys))) == (16, 4, 9)
    write_records(tmp_path / "train-00001.jsonl", tickets(20))
    with pytest.raises(UserError, match=r"has 2 files of the split train: train-00001\.json"):
        draw(DataConfig(**keys))


def mezo_draws(num_questions, num_records, count):
    """The rows that MeZO's sample_train_sets draws without a seed for each question."""
    seeds = np.random.RandomState(0).randint(0, 10000, num_questions)
    drawn = (np.random.RandomState(seed).permutation(num_records) for seed in seeds)
    return [tuple(rows.tolist()[:count]) for rows in drawn]


def solved(rows):
    return "".join(f"{row} It was\n\n" for row in rows)


def asked_of(data, examples, pool, demonstrations=()):
    return with_demonstrations(data, examples, pool, [*demonstrations], lambda example: example)


POOL = [Example(f" {row} It", (" was",), 0, row) for row in range(60)]


def test_the_demonstrations_of_each_question_are_those_of_mezos_code_without_its_own_answer():
    data = DataConfig(protocol="mezo", num_demonstrations=4)
    others = [replace(example) for example in POOL]
    asked = asked_of(data, others, POOL)
    expected = [solved(rows) for rows in mezo_draws(60, 60, 4)]
    assert [example.demonstrations for example in asked] == expected
    for question in asked_of(data, POOL[:5] * 4, POOL[:5]):
        assert question.demonstrations.count("\n\n") == 4
        assert solved([question.index]) not in question.demonstrations


def test_the_clean_protocol_shows_all_questions_the_first_training_examples():
    data = DataConfig(num_demonstrations=2)
    asked = asked_of(data, POOL[:3], POOL, POOL[7:9])
    assert {example.demonstrations for example in asked} == {solved([7, 8])}
    with pytest.raises(UserError, match="num_demonstrations=2 is more than the 1 examples"):
        asked_of(data, POOL[:3], POOL, POOL[7:8])


def test_a_task_without_a_data_set_on_the_hub_needs_files():
    with pytest.raises(UserError, match=r"custom has no data set on the Hub; fix: set data\.tr"):
        sources_of(find_task(DataConfig(**LABELS)), DataConfig(**LABELS))
    assert sources_of(TASKS["cb"], DataConfig(task="cb")) == {
        "train": "aps/super_glue/cb:train",
        "test": "aps/super_glue/cb:validation",
    }
