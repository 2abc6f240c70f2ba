"""The output head of a model: it computes only the logits that a batch needs, at each probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lezo_ds.forward.batch import LogitSelection
from lezo_ds.forward.directions import PassState
from lezo_ds.forward.probes import Forward, Place
from lezo_ds.sharding.tensor_parallel import is_linear, look_up, whole_logits

TARGETS_AT_ONCE = 128
"""Most targets whose logits, in the dtype of the model and in float32, are there at a time."""


def target_log_probabilities(
    states: Tensor, targets: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the log-probability of the target of each row, float32 [N].

    Args:
        states: [N, width].
        targets: int64 [N].
        logits_of: (some rows of `states`) -> their logits, [n, vocabulary].
    """
    # Slices, because the logits of all targets may take more memory than the model.
    some_states = torch.split(states, TARGETS_AT_ONCE)
    some_targets = torch.split(targets, TARGETS_AT_ONCE)
    losses = []
    for own_states, own_targets in zip(some_states, some_targets, strict=True):
        logits = logits_of(own_states).float()
        losses.append(F.cross_entropy(logits, own_targets, reduction="none"))
    return -torch.cat(losses)


class SelectingHead:
    """The forward method of an output head.

    It takes the hidden states of all copies, [copies * rows, tokens, width], and returns

        [copies * rows, tokens, vocabulary]   if the batch selects no logits
        [copies * N, vocabulary]              if it selects N positions
        [copies * N, K]                       if it selects K entries of the vocabulary, too
        [copies * N]                          if it selects the log-probabilities of N targets
    """

    def __init__(self, head: Any, state: PassState, places: Sequence[Place]) -> None:
        self._head = head
        self._own_forward = head.forward
        self._state = state
        self._places = places
        self._reads_rows = is_linear(head) and not isinstance(head, Conv1D)

    def forward(self, hidden: Tensor) -> Tensor:
        state = self._state
        selection = state.selection
        if selection is None:
            # In a batch of last tokens, whose rows are far apart in memory, torch would multiply by
            # as many copies of a frozen weight.
            return self._run(self._logits, hidden.contiguous())
        # The head may run inside a module that already runs on one of the copies.
        current = state.current
        of_copies = hidden.view(current.num_copies, -1, *hidden.shape[1:])
        wanted = of_copies[:, selection.rows, selection.positions]
        state.current = replace(current, rows=len(selection.rows), tokens=1)
        output = self._selected(selection, wanted.flatten(0, 1))
        state.current = current
        return output

    def _selected(self, selection: LogitSelection, hidden: Tensor) -> Tensor:
        """Return what is selected, from the hidden states of its positions [copies * N, width]."""
        state = self._state
        entries = selection.vocabulary
        if selection.targets is not None:
            run = partial(self._log_probabilities, selection.targets)
            state.log_probabilities = self._run(run, hidden)
            return state.log_probabilities
        if entries is None:
            return self._run(self._logits, hidden)
        if not self._reads_rows:
            return self._run(self._logits, hidden)[:, entries]
        if not state.active(self._places):
            return self._entries(entries, hidden)
        run = partial(self._entries, entries)
        of_probes: Tensor = state.run_each_probe(run, [hidden], {})
        return of_probes

    def _run(self, run: Forward, hidden: Tensor) -> Tensor:
        output: Tensor = self._state.run_module(self._head, run, self._places, [hidden], {})
        return output

    def _logits(self, hidden: Tensor) -> Tensor:
        return whole_logits(self._head, self._own_forward(hidden))

    def _log_probabilities(self, targets: Tensor, hidden: Tensor) -> Tensor:
        of_copies = targets.repeat(self._state.current.num_copies)
        return target_log_probabilities(hidden, of_copies, self._logits)

    def _entries(self, entries: Tensor, hidden: Tensor) -> Tensor:
        """Run a linear head at theta, or at the one probe that runs. Only some rows are read."""
        table = self._head._parameters
        active = {place.key: place for place in self._state.active(self._places)}

        def read(key: str, rows: Tensor) -> Tensor:
            if key in active:
                assert self._state.perturber is not None
                return self._state.perturber.rows_of(active[key], rows)
            theta: Tensor = table[key]
            return theta[rows]

        weight = look_up(self._head, entries, partial(read, "weight"))
        bias = None
        if table.get("bias") is not None:
            bias = read("bias", entries)
        return F.linear(hidden, weight, bias)
