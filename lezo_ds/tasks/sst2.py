"""SST-2: is a sentence from a film review negative or positive (prompt and label words of MeZO)."""

from __future__ import annotations

from lezo_ds.tasks.base import Example, Record, Task


def build_example(record: Record, index: int) -> Example:
    """Append "It was" to the sentence; the candidates complete it with a verdict.

    >>> build_example({"sentence": "a joy to watch ", "label": 1}, 0).prompt
    'a joy to watch It was'
    """
    return Example(
        prompt=f"{record['sentence'].strip()} It was",
        candidates=(" terrible", " great"),
        label=record["label"],
        index=index,
        null_prompt=" It was",
    )


SST2 = Task(
    name="sst2",
    hub_id="nyu-mll/glue",
    hub_config="sst2",
    kind="classification",
    fields={"sentence": str, "label": int},
    build_example=build_example,
)
