"""RTE: does a premise entail a hypothesis (prompt and label words of MeZO)."""

from __future__ import annotations

from lezo_ds.tasks.base import Example, Record, Task


def build_example(record: Record, index: int) -> Example:
    r"""Ask whether the hypothesis follows.

    >>> build_example({"premise": "It rains.", "hypothesis": "It is wet.", "label": 0}, 0).prompt
    'It rains.\nDoes this mean that "It is wet." is true? Yes or No?\n'
    """
    return Example(
        prompt=f'{record["premise"]}\nDoes this mean that "{record["hypothesis"]}" is true? Yes or No?\n',
        candidates=("Yes", "No"),
        label=record["label"],
        index=index,
        null_prompt="",
    )


RTE = Task(
    name="rte",
    hub_id="aps/super_glue",
    hub_config="rte",
    kind="classification",
    fields={"premise": str, "hypothesis": str, "label": int},
    build_example=build_example,
)
