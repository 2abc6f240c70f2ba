"""ReCoRD: which entity of a news story fills the blank in a sentence about it (prompt of MeZO)."""

from __future__ import annotations

from lezo_ds.tasks.base import Example, Record, Task


def build_example(record: Record, index: int) -> Example:
    r"""Each candidate is the sentence with one entity filled in, as the last highlight of the story.

    Several entities may be right. Training uses the first right answer. If it is not among the entities,
    the example has no label.

    >>> query = "@placeholder fell"
    >>> answers = {"entities": ["Rome", "Oslo"], "answers": ["Oslo"]}
    >>> example = build_example({"passage": "War.\n@highlight\nEnd", "query": query, **answers}, 0)
    >>> example.prompt, example.candidates, example.references
    ('War.\n- End\n-', (' Rome fell', ' Oslo fell'), (' Oslo fell',))
    """

    def fill(entity: str) -> str:
        return f" {record['query'].replace('@placeholder', entity)}"

    entities, answers = record["entities"], record["answers"]
    return Example(
        prompt=record["passage"].replace("@highlight\n", "- ") + "\n-",
        candidates=tuple(fill(entity) for entity in entities),
        label=entities.index(answers[0]) if answers and answers[0] in entities else None,
        index=index,
        references=tuple(fill(answer) for answer in answers),
        null_prompt="-",
    )


RECORD = Task(
    name="record",
    hub_id="aps/super_glue",
    hub_config="record",
    kind="multiple_choice",
    fields={"passage": str, "query": str, "entities": list[str], "answers": list[str]},
    build_example=build_example,
)
