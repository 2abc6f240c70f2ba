"""The answers that a model gave, as rows of text that people can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lezo_ds.tasks.base import Example
from lezo_ds.tasks.metrics import Prediction, TokenCounts


def answer_text(example: Example, predicted: Prediction) -> str:
    """Return a prediction as text.

    That is a chosen candidate without white space around it, the generated answer, or how many of the
    assistant's tokens in a conversation are the model's first choice.
    """
    if isinstance(predicted, TokenCounts):
        return f"{predicted.right} of {predicted.total} tokens"
    return predicted if isinstance(predicted, str) else example.candidates[predicted].strip()


def prediction_rows(examples: Sequence[Example], predicted: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return a row for each example: its index, its prompt, the right answers and the answer of the model.

    Args:
        examples: examples of a split.
        predicted: what the model made of each example, in order.
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
