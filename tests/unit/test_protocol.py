"""What docs/protocol.md says of MeZO's code, written out here from that code, against this package."""

from __future__ import annotations

import re

import numpy as np
import pytest
from assets import REPOSITORY, write_records
from hypothesis import given
from hypothesis import strategies as st
from lezo_ds.data.records import draw_demonstrations, load_records
from tiny_tasks import task_config, write_tasks, write_writer

from lezo_ds.config import GenerationConfig
from lezo_ds.config.schema import READER
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.tasks import TASKS

PAGE = (REPOSITORY / "docs" / "protocol.md").read_text()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    write_writer(root / "writer")
    write_tasks(root / "data")
    return root


def load(assets, task, data="data", **changes):
    return load_task_data(task_config(assets / "writer", assets / data, task, **changes))


def mezo_draws(num_questions, num_records, count):
    """The training sets of MeZO's sample_train_sets without a seed: one for each question."""
    np.random.seed(0)
    seeds = np.random.randint(0, 10000, num_questions)
    drawn = []
    for seed in seeds:
        np.random.seed(seed)
        drawn.append(np.random.permutation(num_records).tolist()[:count])
    return drawn


def test_the_demonstrations_of_each_question_are_those_of_mezos_code():
    assert draw_demonstrations(0, 100, 554, count=32) == mezo_draws(100, 554, 32)


@given(seed=st.integers(0, 2**32 - 1), num_questions=st.integers(1, 40), more=st.integers(0, 40))
def test_a_draw_depends_on_the_seed_and_the_questions_place_only(seed, num_questions, more):
    few = draw_demonstrations(seed, num_questions, 9, count=3)
    assert draw_demonstrations(seed, num_questions + more, 9, count=3)[:num_questions] == few


def test_no_question_is_shown_its_own_answer():
    own = [row % 5 for row in range(60)]
    drawn = draw_demonstrations(0, 60, 5, count=4, own_rows=own)
    assert all(row not in rows and len(set(rows)) == 4 for row, rows in zip(own, drawn, strict=True))
    free = draw_demonstrations(0, 60, 5, count=4)
    kept = [(a, b) for row, a, b in zip(own, drawn, free, strict=True) if row not in b]
    assert kept
    assert all(a == b for a, b in kept)


def test_in_context_learning_shows_each_question_what_was_drawn_for_it(assets):
    changes = {"method": "icl", "data__num_demonstrations": 2, "data__protocol": "mezo"}
    data = load(assets, "cb", **changes)
    train, _ = load_records(TASKS["cb"], assets / "data" / "cb")
    for question, rows in zip(data.test.examples, mezo_draws(7, len(train), 2), strict=True):
        solved = [TASKS["cb"].build_example(train[row], row).solution for row in rows]
        assert question.demonstrations == "".join(f"{text}\n\n" for text in solved)
    for question in data.dev.examples:
        assert question.solution not in question.demonstrations
    assert len({question.demonstrations for question in data.test.examples}) > 1


def test_a_question_cannot_be_shown_more_records_than_there_are(assets):
    changes = {"method": "icl", "data__protocol": "mezo", "data__num_demonstrations": 24}
    with pytest.raises(UserError, match=r"got: 24 of 23; .*fix: set data.num_demonstrations=23"):
        load(assets, "cb", **changes)


@pytest.mark.parametrize(("method", "shows"), [("zero_shot_sfc", False), ("icl_sfc", True)])
def test_a_null_prompt_has_demonstrations_if_they_are_asked_for(assets, method, shows):
    changes = {"method": method, "data__num_demonstrations": 1}
    data = load(assets, "cb", **changes)
    for example, null in zip(data.test.examples, data.test.null_encoded, strict=True):
        before = example.demonstrations if shows else ""
        texts = [data.tokenizer.decode(ids[1:]) for ids in null.sequences]
        assert texts == [(before + candidate)[-255:] for candidate in example.candidates]
        assert list(null.option_lengths) == list(map(len, example.candidates))


SPACED = "\n\t\u00a0 \u3000"


def test_white_space_before_a_text_goes_with_mezos_details_only(tmp_path, assets):
    record = {"premise": f"{SPACED}It rains.", "hypothesis": "it is wet", "label": 0}
    for split in ("train", "validation"):
        write_records(tmp_path / "rte" / f"{split}.jsonl", [record] * 24)
    for details, text in (("clean", record["premise"]), ("mezo", "It rains.")):
        data = load(assets, "rte", data=tmp_path, data__protocol=details)
        for split in (data.train, data.dev, data.test):
            assert {example.prompt[: len(text)] for example in split.examples} == {text}


@pytest.mark.parametrize("details", ["clean", "mezo"])
def test_a_text_with_its_gold_answer_is_cut_50_tokens_earlier_with_mezos_details(assets, details):
    squad = load(assets, "squad", data__max_length=70, data__protocol=details)
    for split in (squad.train, squad.dev):
        assert {example.num_tokens for example in split.encoded} == {20 if details == "mezo" else 70}
    assert max(map(len, squad.test.prompts)) == 70 - GenerationConfig().max_new_tokens
    copa = load(assets, "copa", data__max_length=40, data__protocol=details)
    assert max(example.num_tokens for example in copa.train.encoded) == 40
    with pytest.raises(UserError, match="leaves no room for a prompt before 50 new tokens; got: 51"):
        load(assets, "squad", data__max_length=51, data__protocol=details)


def test_the_page_names_keys_that_exist_and_every_key_of_the_protocol():
    named = set(re.findall(r"`((?:data|train|model|peft|adamw)\.\w+)(?:=\w+)?`", PAGE))
    assert named - {"data.calibrated"} <= READER.keys.keys()
    chosen_here = {"protocol", "num_demonstrations"}
    assert {f"data.{name}" for name in chosen_here} <= named


def test_the_page_names_tests_that_exist():
    for path, word in re.findall(r"pytest (\S+?\.py)(?: -k (\w+))?", PAGE):
        text = (REPOSITORY / path).read_text()
        assert word in text, f"{path} has no {word}"
