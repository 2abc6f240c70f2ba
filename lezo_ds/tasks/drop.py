"""DROP: answer a question that needs arithmetic or counting over a passage (prompt of MeZO)."""

from __future__ import annotations

from lezo_ds.tasks.base import Example, Record, Task, answer_example


def build_example(record: Record, index: int) -> Example:
    r"""Ask the question after its passage.

    >>> record = {"passage": "Two rained.", "question": "How many? ", "answers_spans": {"spans": ["2"]}}
    >>> example = build_example(record, 0)
    >>> example.prompt, example.candidates
    ('Passage: Two rained.\nQuestion: How many?\nAnswer:', (' 2\n',))
    """
    prompt = f"Passage: {record['passage']}\nQuestion: {record['question'].strip()}\nAnswer:"
    return answer_example(prompt, record["answers_spans"]["spans"], index)


DROP = Task(
    name="drop",
    hub_id="ucinlp/drop",
    hub_config=None,
    kind="generation",
    fields={"passage": str, "question": str, "answers_spans.spans": list[str]},
    build_example=build_example,
    metric="f1",
)
