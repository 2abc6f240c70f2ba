"""WSC: does a pronoun refer to a noun phrase (prompt and label words of MeZO)."""

from __future__ import annotations

from lezo_ds.tasks.base import Example, Record, SplitSizes, Task


def build_example(record: Record, index: int) -> Example:
    """Ask whether the pronoun refers to the phrase. The pronoun is shown in lower case.

    >>> record = {"text": "Ann met Bo. She ran.", "span1_text": "Ann", "span2_text": "She", "label": 1}
    >>> print(build_example(record, 0).prompt)
    Ann met Bo. She ran.
    In the previous sentence, does the pronoun "she" refer to Ann? Yes or No?
    <BLANKLINE>
    """
    phrase, pronoun = record["span1_text"], record["span2_text"].lower()
    question = f'In the previous sentence, does the pronoun "{pronoun}" refer to {phrase}? Yes or No?'
    return Example(
        prompt=f"{record['text']}\n{question}\n",
        candidates=("No", "Yes"),
        label=record["label"],
        index=index,
        null_prompt="",
    )


WSC = Task(
    name="wsc",
    hub_id="aps/super_glue",
    hub_config="wsc.fixed",
    kind="classification",
    fields={"text": str, "span1_text": str, "span2_text": str, "label": int},
    build_example=build_example,
    sizes=SplitSizes(num_train=454, num_dev=100),
    # mezo_sizes keeps its default: MeZO's dev split takes 500 of the 554 records and leaves 54 to train on.
)
