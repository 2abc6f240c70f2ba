"""Perturbed weights meet only the tokens whose logits the loss reads (zo.perturbed_tokens=answers).

What comes before these tokens is read once, at theta. All probes share its keys and values:

    sequence   <s>  a  fine  film  .  It  was  so  good      the loss reads "so good"
    selected                               |   |             these logits predict it
    context    <s>  a  fine  film  .  It                     at theta, one copy
    answer                               was  so             k copies, one for each probe

A probe of a label of one token runs one token and not the whole text. The projected gradients then
estimate the part of the gradient that reaches the weights through the tokens of answers, and not
the part that reaches them through the keys and values of contexts. The weights that a step updates
meet all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lezo_ds.errors import UserError
from lezo_ds.forward.answer_cache import (
    begins_after_padding,
    cache_name,
    kinds_of_layers,
    takes_padding,
)
from lezo_ds.forward.batch import LogitSelection, MicroBatch, Tensors
from lezo_ds.forward.rope import rope_limit
from lezo_ds.zo.passes import group_of

_KEYS_AND_VALUES = {DynamicLayer, DynamicSlidingWindowLayer}


class ContextLayer(DynamicLayer):  # type: ignore[misc]  # without types
    """The keys and values of contexts in a block. Each copy of the answers reads them.

    Nothing is added to them, so a block may run again, or on one copy of the answers.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Make a layer of the states [sequences, heads, tokens, width]."""
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys = keys
        self.values = values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the states of contexts with those of answers after them, for each row."""
        return _joined(self.keys, key_states), _joined(self.values, value_states)


def _joined(of_contexts: Tensor, of_answers: Tensor) -> Tensor:
    """Return the states of contexts, [S, heads, C, width], and of k * S answers, in one tensor."""
    num_rows, num_heads, num_new, width = of_answers.shape
    num_old = of_contexts.shape[2]
    joined = of_answers.new_empty(num_rows, num_heads, num_old + num_new, width)
    by_copy = joined.view(-1, len(of_contexts), *joined.shape[1:])
    by_copy[..., :num_old, :] = of_contexts
    joined[..., num_old:, :] = of_answers
    return joined


class _Layout(NamedTuple):
    """A batch of S sequences, with at most C tokens in a context, in two parts.

    Attributes:
        inputs: of the model, which read the contexts.
        rows: int64 [S], the row of each sequence in these inputs.
        columns: int64 [S, C], where the tokens of its context are in this row. Contexts end in the
            same column. Any column stands for padding before them.
        answers: the batch of answers, a row for each sequence.
    """

    inputs: Tensors
    rows: Tensor
    columns: Tensor
    answers: MicroBatch


def check_contexts(model: Any) -> None:
    """Refuse a model whose contexts cannot be read apart from answers.

    Raises:
        UserError: it has states besides keys and values, does not locate tokens by position ids
            from 0 on, or has rotary frequencies that depend on the length of a text.
    """
    config = model.config
    keeps_all = takes_padding(model) and kinds_of_layers(config) <= _KEYS_AND_VALUES
    if not keeps_all or begins_after_padding(config) or rope_limit(config) is not None:
        raise UserError(
            "zo.perturbed_tokens=answers needs a model that locates tokens by position ids and "
            f"keeps nothing of them but keys and values, and {type(model).__name__} does not",
            fix="set zo.perturbed_tokens=all",
        )


def read_contexts(
    model: Any, batch: MicroBatch, run: Callable[..., Any]
) -> tuple[MicroBatch, dict[str, Any]]:
    """Read what comes before the answers of a batch. A collective of one forward pass.

    Args:
        model: a causal language model.
        batch: it selects logits. Its sequences may share rows (data/packing.py).
        run: (batch, arguments of the model besides its inputs) -> runs the model at theta.

    Returns:
        The batch of the answers alone, whose output is that of the whole batch; and the arguments
        of the model with which it goes on from the contexts.
    """
    layout = _lay_out(batch)
    read = DynamicCache()
    arguments = {cache_name(model): read, "use_cache": True}
    # The head computes the logits that a batch selects. Here, one row of them is enough.
    one = batch.inputs["input_ids"].new_zeros(1)
    selection = LogitSelection(one, one)
    run(replace(batch, inputs=layout.inputs, selection=selection), arguments)
    rows = layout.rows[:, None]
    cache = DynamicCache()
    for layer in read.layers:
        states = (layer.keys, layer.values)  # [rows, heads, tokens, width]
        of_contexts = [of_all[rows, :, layout.columns].transpose(1, 2) for of_all in states]
        cache.layers.append(ContextLayer(*of_contexts))
        layer.keys = layer.values = None  # frees their memory
    return layout.answers, {**arguments, cache_name(model): cache}


def answers_of(batch: MicroBatch) -> tuple[int, int]:
    """Return the tokens of the longest answer of a batch, and the number of answers."""
    number, length = _lay_out(batch).answers.inputs["input_ids"].shape
    return length, number


def _lay_out(batch: MicroBatch) -> _Layout:
    selection = batch.selection
    assert selection is not None, "a batch with contexts selects logits"
    tokens = batch.inputs["input_ids"]
    num_rows, width = tokens.shape
    columns_of_row = torch.arange(width, device=tokens.device)
    position_ids = batch.inputs.get("position_ids", columns_of_row.expand(num_rows, -1))
    num_start = batch.num_start
    # Where the own tokens of a sequence begin: those after what its row begins with.
    begins = num_start + selection.positions - position_ids[selection.rows, selection.positions]
    places, sequence_of = torch.unique(selection.rows * width + begins, return_inverse=True)
    num_sequences = len(places)
    rows = places // width
    begins = places % width
    firsts = places.new_full((num_sequences,), width)
    firsts.scatter_reduce_(0, sequence_of, selection.positions, "amin")
    lasts = torch.zeros_like(firsts)
    lasts.scatter_reduce_(0, sequence_of, selection.positions, "amax")
    lengths = firsts - begins  # of contexts, without what rows begin with

    to_right = torch.arange(int((lasts - firsts).max()) + 1, device=tokens.device)
    answer_columns = torch.minimum(firsts[:, None] + to_right, lasts[:, None])
    to_left = torch.arange(-int(lengths.max()), 0, device=tokens.device)
    is_context = to_left >= -lengths[:, None]
    start_columns = columns_of_row[:num_start].expand(num_sequences, -1)
    # Answers are padded on the right, where no token looks.
    is_seen = [torch.ones_like(start_columns), is_context.long(), torch.ones_like(answer_columns)]
    inputs = {
        "input_ids": tokens[rows[:, None], answer_columns],
        "attention_mask": torch.cat(is_seen, dim=1),
        "position_ids": num_start + answer_columns - begins[:, None],
    }
    moved = replace(
        selection, rows=sequence_of, positions=selection.positions - firsts[sequence_of]
    )
    answers = replace(
        batch,
        inputs=inputs,
        selection=moved,
        token_examples=_examples(batch, rows, firsts)[:, None].cpu(),
        num_start=0,
    )
    own_columns = (firsts[:, None] + to_left).clamp(min=0)
    columns = torch.cat([start_columns, own_columns], dim=1)
    if "position_ids" in batch.inputs:  # rows are shared already
        return _Layout(batch.inputs, rows, columns, answers)
    # The candidates of an example have one context.
    own = torch.where(columns_of_row < lengths[:, None], tokens[rows], -1)
    distinct, rows = torch.unique(own[:, : max(1, len(to_left))], dim=0, return_inverse=True)
    return _Layout({"input_ids": distinct.clamp(min=0)}, rows, columns, answers)


def _examples(batch: MicroBatch, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the example of each sequence, which has a token in a row and a column: int64 [S]."""
    of_tokens = batch.token_examples
    if of_tokens is None:
        return group_of(rows, len(batch.inputs["input_ids"]), batch.num_examples)
    if of_tokens.shape[1] == 1:
        columns = torch.zeros_like(columns)
    return of_tokens[rows.cpu(), columns.cpu()]
