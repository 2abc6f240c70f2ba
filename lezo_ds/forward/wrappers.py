"""Wrappers of the forward methods of a model's modules, blocks and output head.

A wrapper replaces `module.forward`. With ZeRO-3, it therefore runs between the hooks that gather
the module's parameters and those that release them. All wrappers of a model share one `PassState`.

    model ── start_pass hook
      block 0 ── wrap_block      equal copies of the batch run once; else all weights at once
        linear ── wrap_module    its perturber runs it at each probe
        norm ── wrap_module
      head ── SelectingHead      selected positions and vocabulary entries only
        head ── wrap_module
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lezo_ds.forward.copies import Args, Kwargs, has_batch, run_once
from lezo_ds.forward.directions import PROBES_AT_ONCE, PassState
from lezo_ds.forward.module_calls import children_read_by, modules_that_run
from lezo_ds.forward.probes import AT_THETA, TrainedParameter, trained_parameters
from lezo_ds.sharding.quantization import quantization_of
from lezo_ds.sharding.tensor_parallel import LINEAR_FORWARDS, look_up, whole_logits

Trainable = Mapping[nn.Parameter, TrainedParameter]

TARGETS_AT_ONCE = 128
"""Most targets whose logits are copied to float32 at a time."""


def parameters_read_by(module: nn.Module, trainable: Trainable) -> list[TrainedParameter]:
    """Return the trained parameters that a module reads: its own, and those of some children."""
    found = trained_parameters([module], trainable)
    for child in children_read_by(module):
        for entry in trained_parameters([module.get_submodule(child)], trainable):
            found.append(entry._replace(name=f"{child}.{entry.name}"))
    return found


def wrap_module(module: nn.Module, state: PassState, trainable: Trainable) -> None:
    """Let a module that reads parameters run at the probes of the pass."""
    own_forward = module.forward
    owned = parameters_read_by(module, trainable)

    @wraps(own_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        active = state.active(owned)
        if not state.runs_at_once and (active or has_batch(args, kwargs)):
            # A module at theta is cut up, too: the bits of a product depend on its number of rows.
            assert state.perturber is not None
            return state.run_in_parts(state.perturber.probes_at_once, forward, args, kwargs)
        if not active:
            return own_forward(*args, **kwargs)
        assert state.perturber is not None
        return state.perturber.run_module(module, own_forward, active, args, kwargs)

    module.forward = forward


def wrap_block(block: nn.Module, index: int, state: PassState, trainable: Trainable) -> None:
    """Let a transformer block run once on equal copies of the batch, or perturb it as a whole."""
    own_forward = block.forward
    owned = [
        entry
        for entry in trained_parameters(modules_that_run(block), trainable)
        if quantization_of(entry.parameter) is None  # its values are here only while a module runs
    ]

    @wraps(own_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if index < state.num_equal_blocks:
            return run_on_one_copy(args, kwargs)
        # Copies differ from here on, also if the model runs an earlier block again.
        state.num_equal_blocks = 0
        perturber = state.perturber
        if perturber is None or not perturber.takes_blocks:
            return own_forward(*args, **kwargs)
        active = state.active(owned)
        # For more probes, the copies of a whole block would take too much memory.
        if not active or not state.runs_at_once:
            return own_forward(*args, **kwargs)
        perturber.begin_block(active)
        try:
            return own_forward(*args, **kwargs)
        finally:
            perturber.end_block()

    def run_on_one_copy(args: Args, kwargs: Kwargs) -> Any:
        current = state.current
        cache_layer = index if current.writes_answers else None
        state.current = AT_THETA
        num_probes = len(current.probes)
        output = run_once(own_forward, args, kwargs, current.rows, num_probes, cache_layer)
        state.current = current
        return output

    block.forward = forward


def target_log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of the target of each row of logits, float32 [N].

    Args:
        logits: [N, vocabulary].
        targets: int64 [N].
    """
    # Slices, because float32 copies of all logits may take more memory than the model.
    slices = [torch.split(tensor, TARGETS_AT_ONCE) for tensor in (logits, targets)]
    losses = [
        F.cross_entropy(part.float(), targets_of_part, reduction="none")
        for part, targets_of_part in zip(*slices, strict=True)
    ]
    return -torch.cat(losses)


class SelectingHead:
    """The forward method of an output head, whose own forward runs at the probes already.

    It takes the hidden states of all copies, [copies * rows, tokens, width], and returns

        [copies * rows, tokens, vocabulary]   if the batch selects no logits
        [copies * N, vocabulary]              if it selects N positions
        [copies * N, K]                       if it selects K entries of the vocabulary, too
        [copies * N]                          if it selects the log-probabilities of N targets
    """

    def __init__(self, head: Any, state: PassState, trainable: Trainable) -> None:
        self._head = head
        self._run = head.forward
        self._state = state
        self._owned = trained_parameters([head], trainable)
        self._is_linear = type(head).forward in (nn.Linear.forward, *LINEAR_FORWARDS)

    def forward(self, hidden: Tensor) -> Tensor:
        state = self._state
        selection = state.selection
        current = state.current
        if selection is None:
            # In a batch of last tokens, whose rows are far apart in memory, torch would multiply by
            # as many copies of a frozen weight.
            return self._all_entries(hidden.contiguous())
        # The head may run inside a module that already runs on some of the copies only.
        num_copies = len(current.probes) or 1
        rows_of_copy = hidden.shape[0] // num_copies
        rows = torch.cat([selection.rows + rows_of_copy * copy for copy in range(num_copies)])
        positions = selection.positions.repeat(num_copies)
        selected = hidden[rows, positions]  # [copies * N, width]
        state.current = current._replace(rows=len(selection.rows))
        try:
            if selection.targets is not None:
                state.log_probabilities = self._log_probabilities(selection.targets, selected)
                return state.log_probabilities
            if selection.vocabulary is None:
                return self._all_entries(selected)
            if not self._is_linear:
                return self._all_entries(selected)[:, selection.vocabulary]
            return self._entries(selection.vocabulary, selected)
        finally:
            state.current = current

    def _all_entries(self, hidden: Tensor) -> Tensor:
        return whole_logits(self._head, self._run(hidden))

    def _log_probabilities(self, targets: Tensor, hidden: Tensor) -> Tensor:
        """Return the log-probabilities of the targets, [copies * N].

        Only the logits of the probes that run at once are in memory.
        """
        state = self._state

        def run_part(hidden: Tensor) -> Tensor:
            logits = self._all_entries(hidden)
            return target_log_probabilities(logits, targets.repeat(len(logits) // len(targets)))

        found: Tensor = state.run_in_parts(PROBES_AT_ONCE, run_part, [hidden], {})
        return found

    def _entries(self, entries: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits of some entries of the vocabulary: [copies * N, K]."""
        state = self._state
        num_probes = 1
        if state.perturber is not None and not state.active(self._owned):
            num_probes = state.perturber.probes_at_once
        run = partial(self._entries_at_probe, entries)
        logits: Tensor = state.run_in_parts(num_probes, run, [hidden], {})
        return logits

    def _entries_at_probe(self, entries: Tensor, hidden: Tensor) -> Tensor:
        """Run a linear head, at one probe if it is perturbed. Only some rows of it are read."""
        perturber = self._state.perturber
        active = {entry.name: entry for entry in self._state.active(self._owned)}
        own = self._head._parameters

        def read(rows: Tensor) -> Tensor:
            if perturber is not None and "weight" in active:
                return perturber.rows_of(active["weight"], rows)
            theta: Tensor = own["weight"]
            return theta[rows]

        weight = look_up(self._head, entries, read)
        bias: Tensor | None = own.get("bias")
        if perturber is not None and "bias" in active:
            bias = perturber.vector_of(active["bias"])
        if bias is None:
            return F.linear(hidden, weight)
        if not active:
            return F.linear(hidden, weight, bias[entries])
        return F.linear(hidden, weight) + bias[entries]
