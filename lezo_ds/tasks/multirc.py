"""MultiRC: is the given answer to a question about a paragraph right (prompt and label words of MeZO)."""

from __future__ import annotations

from lezo_ds.tasks.base import Example, Record, Task


def build_example(record: Record, index: int) -> Example:
    """Ask whether the answer is correct.

    >>> record = {"paragraph": "It rains.", "question": "Is it dry?", "answer": "No", "label": 1}
    >>> print(build_example(record, 0).prompt)
    It rains.
    Question: Is it dry?
    I found this answer "No". Is that correct? Yes or No?
    <BLANKLINE>
    """
    verdict = f'I found this answer "{record["answer"]}". Is that correct? Yes or No?'
    return Example(
        prompt=f"{record['paragraph']}\nQuestion: {record['question']}\n{verdict}\n",
        candidates=("No", "Yes"),
        label=record["label"],
        index=index,
        null_prompt="",
    )


MULTIRC = Task(
    name="multirc",
    hub_id="aps/super_glue",
    hub_config="multirc",
    kind="classification",
    fields={"paragraph": str, "question": str, "answer": str, "label": int},
    build_example=build_example,
)
