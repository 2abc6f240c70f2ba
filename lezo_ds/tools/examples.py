"""What the model reads and learns of training examples.

The result is lines, such as

    reads  '</s>a gripping film It was great'
    learns  [' great'] label 1
"""

from __future__ import annotations

from collections.abc import Iterator

from lezo_ds.data.task_data import TaskData


def example_lines(data: TaskData, number: int) -> Iterator[str]:
    """Yield lines for the first training examples.

    `reads` has the whole text with the right answer, `learns` the tokens that the loss is about,
    and `label` is the index of the right candidate. A prompt that the model answers by itself has
    one line.
    """
    decode = data.reader.tokenizer.backend.decode
    for prompt in filter(None, data.train.prompts[:number]):
        yield f"reads  {decode(list(prompt))!r}"
    for encoded in data.train.encoded[:number]:
        if encoded.label is None:
            continue
        ids = encoded.sequences[encoded.label]
        places = encoded.targets(encoded.label)
        learned = [decode([ids[place]]) for place in places]
        yield f"reads  {decode(list(ids))!r}"
        yield f"learns  {learned} label {encoded.label}"
