from __future__ import annotations

import pytest
from golden_tasks import GOLDEN

from lezo_ds.errors import UserError
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Example, SplitSizes

DEFAULT = SplitSizes(num_train=1000, num_dev=500, num_test=1000)

# name -> hub id, configuration, kind, metric, clean sizes, sizes of MeZO's scripts
PROTOCOL = {
    "sst2": ("nyu-mll/glue", "sst2", "classification", "accuracy", DEFAULT, DEFAULT),
    "rte": ("aps/super_glue", "rte", "classification", "accuracy", DEFAULT, DEFAULT),
    "cb": (
        *("aps/super_glue", "cb", "classification", "accuracy"),
        *(SplitSizes(150, 100, 1000), SplitSizes(1000, 100, 1000)),
    ),
    "boolq": ("google/boolq", None, "classification", "accuracy", DEFAULT, DEFAULT),
    "wsc": (
        *("aps/super_glue", "wsc.fixed", "classification", "accuracy"),
        *(SplitSizes(454, 100, 1000), SplitSizes(1000, 500, 1000)),
    ),
    "wic": ("aps/super_glue", "wic", "classification", "accuracy", DEFAULT, DEFAULT),
    "multirc": ("aps/super_glue", "multirc", "classification", "accuracy", DEFAULT, DEFAULT),
    "copa": (
        *("aps/super_glue", "copa", "multiple_choice", "accuracy"),
        *(SplitSizes(300, 100, 1000), SplitSizes(1000, 100, 1000)),
    ),
    "record": ("aps/super_glue", "record", "multiple_choice", "accuracy", DEFAULT, DEFAULT),
    "squad": ("rajpurkar/squad", None, "generation", "f1", DEFAULT, DEFAULT),
    "drop": ("ucinlp/drop", None, "generation", "f1", DEFAULT, DEFAULT),
}


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.task)
def test_a_record_becomes_the_text_of_the_protocol(golden):
    assert TASKS.find(golden.task).build_example(golden.record, 7) == Example(
        prompt=golden.prompt,
        candidates=golden.candidates,
        label=golden.label,
        index=7,
        references=golden.references,
        null_prompt=golden.null_prompt,
    )


def test_every_task_has_several_golden_records():
    names = [golden.task for golden in GOLDEN]
    assert {name: names.count(name) >= 2 for name in names} == dict.fromkeys(TASKS, True)


def test_all_tasks_have_the_data_kinds_and_sizes_of_the_protocol():
    assert {
        task.name: (task.hub_id, task.hub_config, task.kind, task.metric, task.sizes, task.mezo_sizes)
        for task in TASKS.values()
    } == PROTOCOL


def test_an_empty_boolq_question_is_only_its_question_mark():
    record = {"passage": "It rains.", "question": "", "answer": True}
    assert TASKS["boolq"].build_example(record, 0).prompt == "It rains. ?\n"


def test_a_copa_question_that_is_neither_cause_nor_effect_is_refused():
    record = {"premise": "I ran.", "choice1": "A", "choice2": "B", "question": "why", "label": 0}
    with pytest.raises(UserError, match=r"field question is not valid; got: why; expected: effect or cause"):
        TASKS["copa"].build_example(record, 4)


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("squad", {"title": "", "context": "", "question": "", "answers": {"text": []}}),
        ("drop", {"passage": "", "question": "", "answers_spans": {"spans": []}}),
        ("record", {"passage": "", "query": "", "entities": ["Rome"], "answers": []}),
        ("record", {"passage": "", "query": "", "entities": [], "answers": ["Rome"]}),
        ("record", {"passage": "", "query": "", "entities": ["Rome"], "answers": ["Oslo", "Rome"]}),
    ],
)
def test_a_record_without_a_right_answer_has_no_label(name, record):
    assert TASKS[name].build_example(record, 0).label is None


@pytest.mark.parametrize("name", ["SST2", "Sst2", "BoolQ", "ReCoRD"])
def test_a_task_is_found_whatever_the_case_of_its_name(name):
    assert TASKS.find(name).name == name.lower()


@pytest.mark.parametrize(("name", "near"), [("sst-2", "sst2"), ("SST", "sst2"), ("squad2", "squad")])
def test_an_unknown_task_gets_the_nearest_name(name, near):
    with pytest.raises(UserError, match=rf"unknown task; got: {name}; .*did you mean {near}\?"):
        TASKS.find(name)


def test_a_name_near_to_none_gets_the_list_alone():
    with pytest.raises(UserError, match=r"expected: one of boolq, cb, copa, .*sst2") as caught:
        TASKS.find("translation")
    assert "did you mean" not in str(caught.value)
