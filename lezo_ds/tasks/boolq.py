"""BoolQ: answer a question about a passage with yes or no (prompt and label words of MeZO)."""

from __future__ import annotations

from lezo_ds.tasks.base import Example, Record, Task


def build_example(record: Record, index: int) -> Example:
    r"""Ask the question after the passage, with a capital first letter and a question mark.

    >>> build_example({"passage": "It rains.", "question": "is it wet", "answer": True}, 0).prompt
    'It rains. Is it wet?\n'
    """
    question = record["question"]
    question = question[:1].upper() + question[1:]
    if not question.endswith("?"):
        question += "?"
    return Example(
        prompt=f"{record['passage']} {question}\n",
        candidates=("Yes", "No"),
        label=0 if record["answer"] else 1,
        index=index,
        null_prompt="",
    )


BOOLQ = Task(
    name="boolq",
    hub_id="google/boolq",
    hub_config=None,
    kind="classification",
    fields={"passage": str, "question": str, "answer": bool},
    build_example=build_example,
)
