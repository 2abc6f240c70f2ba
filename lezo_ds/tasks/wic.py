"""WiC: does a word have the same meaning in two sentences (prompt and label words of MeZO)."""

from __future__ import annotations

from lezo_ds.tasks.base import Example, Record, Task


def build_example(record: Record, index: int) -> Example:
    """Ask whether the meanings are the same.

    >>> record = {"word": "run", "sentence1": "I run.", "sentence2": "A run of luck.", "label": 0}
    >>> print(build_example(record, 0).prompt)
    Does the word "run" have the same meaning in these two sentences? Yes, No?
    I run.
    A run of luck.
    <BLANKLINE>
    """
    question = f'Does the word "{record["word"]}" have the same meaning in these two sentences? Yes, No?'
    return Example(
        prompt=f"{question}\n{record['sentence1']}\n{record['sentence2']}\n",
        candidates=("No", "Yes"),
        label=record["label"],
        index=index,
        null_prompt="",
    )


WIC = Task(
    name="wic",
    hub_id="aps/super_glue",
    hub_config="wic",
    kind="classification",
    fields={"word": str, "sentence1": str, "sentence2": str, "label": int},
    build_example=build_example,
)
