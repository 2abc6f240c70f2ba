"""The answers that a model gave, as rows of text that people can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lezo_ds.tasks.base import Example


def answer_text(example: Example, predicted: int | str) -> str:
    """Return the text of a chosen candidate, without white space around it, or the generated answer."""
    return predicted if isinstance(predicted, str) else example.candidates[predicted].strip()


def prediction_rows(examples: Sequence[Example], predicted: Sequence[int | str]) -> list[dict[str, Any]]:
    """Return a row for each example: its index, its prompt, the right answers and the answer of the model.

    Args:
        examples: examples of a split.
        predicted: index of the chosen candidate, or the generated answer, for each example in order.
    """
    rows = []
    for example, found in zip(examples, predicted, strict=True):
        right = example.references
        if not right and example.label is not None:
            right = (example.candidates[example.label],)
        rows.append(
            {
                "index": example.index,
                "prompt": example.prompt,
                "right": [text.strip() for text in right],
                "predicted": answer_text(example, found).strip(),
            }
        )
    return rows
