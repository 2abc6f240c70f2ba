"""The rows of answers: of chosen candidates, of references and of generated texts."""

from __future__ import annotations

from lezo_ds.data.predictions import prediction_rows
from lezo_ds.tasks.base import Example, answer_example


def test_a_row_has_the_texts_of_the_chosen_and_the_right_candidate():
    example = Example(prompt="a joy It was", candidates=(" terrible", " great"), label=1, index=7)
    (row,) = prediction_rows([example], [0])
    assert row == {"index": 7, "prompt": "a joy It was", "right": ["great"], "predicted": "terrible"}


def test_all_references_are_right_and_an_example_without_a_label_has_none():
    written = answer_example("Who?\nAnswer:", ["Ada", "Ada Lovelace"], index=0)
    unknown = Example(prompt="?", candidates=(" a",), label=None, index=1)
    first, second = prediction_rows([written, unknown], [" Ada ", 0])
    assert (first["right"], first["predicted"]) == (["Ada", "Ada Lovelace"], "Ada")
    assert (second["right"], second["predicted"]) == ([], "a")
