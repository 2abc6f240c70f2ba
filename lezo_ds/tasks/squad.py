"""SQuAD: answer a question with words from a paragraph (prompt of MeZO)."""

from __future__ import annotations

from lezo_ds.tasks.base import Example, Record, Task, answer_example


def build_example(record: Record, index: int) -> Example:
    r"""Ask the question after its context.

    >>> record = {"title": "Rain", "context": "Rain is wet.", "question": "What is wet? "}
    >>> example = build_example({**record, "answers": {"text": ["Rain", "rain"]}}, 0)
    >>> example.prompt
    'Title: Rain\nContext: Rain is wet.\nQuestion: What is wet?\nAnswer:'
    >>> example.candidates, example.references
    ((' Rain\n',), ('Rain', 'rain'))
    """
    title, context, question = record["title"], record["context"], record["question"].strip()
    prompt = f"Title: {title}\nContext: {context}\nQuestion: {question}\nAnswer:"
    return answer_example(prompt, record["answers"]["text"], index)


SQUAD = Task(
    name="squad",
    hub_id="rajpurkar/squad",
    hub_config=None,
    kind="generation",
    fields={"title": str, "context": str, "question": str, "answers.text": list[str]},
    build_example=build_example,
    metric="f1",
)
