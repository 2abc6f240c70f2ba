"""COPA: which of two sentences is the cause or the effect of a premise (prompt of MeZO)."""

from __future__ import annotations

from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Example, Record, SplitSizes, Task

CONJUNCTIONS = {"effect": " so ", "cause": " because "}


def build_example(record: Record, index: int) -> Example:
    """Start a sentence with the premise; each choice is a way to end it.

    Raises:
        UserError: the question is neither "cause" nor "effect".

    >>> choices = {"choice1": "It rained.", "choice2": "I slept."}
    >>> example = build_example({"premise": "I was wet.", "question": "cause", "label": 0, **choices}, 0)
    >>> example.prompt, example.candidates
    ('I was wet because ', ('it rained.', 'I slept.'))
    """
    conjunction = CONJUNCTIONS.get(record["question"])
    if conjunction is None:
        raise UserError(
            "field question is not valid",
            got=record["question"],
            expected=" or ".join(CONJUNCTIONS),
            fix="correct the record",
        )
    return Example(
        prompt=record["premise"].rstrip().removesuffix(".") + conjunction,
        candidates=(_continue_with(record["choice1"]), _continue_with(record["choice2"])),
        label=record["label"],
        index=index,
        null_prompt=conjunction,
    )


def _continue_with(choice: str) -> str:
    """Return the choice with its first word in lower case, unless that is "I"."""
    first, *others = choice.split(" ")
    return " ".join([first if first == "I" else first.lower(), *others])


COPA = Task(
    name="copa",
    hub_id="aps/super_glue",
    hub_config="copa",
    kind="multiple_choice",
    fields={"premise": str, "choice1": str, "choice2": str, "question": str, "label": int},
    build_example=build_example,
    sizes=SplitSizes(num_train=300, num_dev=100),
    mezo_sizes=SplitSizes(num_dev=100),
)
