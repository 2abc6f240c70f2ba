"""CB: does a premise entail a hypothesis, contradict it, or neither (prompt and label words of MeZO)."""

from __future__ import annotations

from lezo_ds.tasks.base import Example, Record, SplitSizes, Task


def build_example(record: Record, index: int) -> Example:
    r"""Ask whether the hypothesis can be inferred.

    >>> build_example({"premise": "It rains.", "hypothesis": "it is wet", "label": 0}, 0).prompt
    'Suppose It rains. Can we infer that "it is wet"? Yes, No, or Maybe?\n'
    """
    premise, hypothesis = record["premise"], record["hypothesis"]
    return Example(
        prompt=f'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n',
        candidates=("Yes", "No", "Maybe"),
        label=record["label"],
        index=index,
        null_prompt="",
    )


CB = Task(
    name="cb",
    hub_id="aps/super_glue",
    hub_config="cb",
    kind="classification",
    fields={"premise": str, "hypothesis": str, "label": int},
    build_example=build_example,
    sizes=SplitSizes(num_train=150, num_dev=100),
    mezo_sizes=SplitSizes(num_dev=100),
)
