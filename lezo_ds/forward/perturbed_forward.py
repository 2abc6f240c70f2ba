"""Runs a model at several probes of its weights, and leaves the stored weights alone.

One pass of k probes gathers each weight once, and runs all probes (probes.py draws the rows):

    batch ──repeat k times──► wrapped model ──► logits [k * rows, ...] ──cut──► k outputs
                              │ wrappers.py: what runs at the probes: blocks, modules, the head
                              └ a Perturber: how its rows meet the weights of their probes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds.errors import UserError
from lezo_ds.forward.answer_cache import cache_name, takes_padding
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.forward.copies import Args, Kwargs
from lezo_ds.forward.directions import Directions, PassState
from lezo_ds.forward.probes import (
    Perturbation,
    ProbePass,
    TrainedParameter,
    is_norm,
    places_in,
)
from lezo_ds.forward.rope import own_positions, rope_limit
from lezo_ds.forward.swap import widen_norm
from lezo_ds.forward.wrappers import (
    SelectingHead,
    share_block,
    target_log_probabilities,
    wrap_module,
)


class PerturbedForward:
    """Wraps a causal language model in eval mode so that it can run at perturbed weights.

    Args:
        model: with its parameters sharded or not. Its modules get new forward methods.
        trainable: what may be perturbed. A tied parameter appears once.
        blocks: the transformer blocks, in order. All weights of a block must be gathered when it
            begins.
        directions: perturb them. None if no pass is perturbed.
        shares_start: whether the blocks before the first perturbed one run on one copy of the
            batch. Then nothing outside the blocks may be trainable.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Sequence[TrainedParameter],
        blocks: Sequence[nn.Module] = (),
        *,
        directions: Directions | None = None,
        shares_start: bool = False,
    ) -> None:
        num_blocks = len(blocks)
        assert not shares_start or all(entry.block < num_blocks for entry in trainable)
        entries = {entry.parameter: entry for entry in trainable}
        self._model: Any = model
        self._num_blocks = num_blocks
        self._shares_start = shares_start
        self.directions = directions
        self._num_unperturbed = 0  # blocks before the first perturbed one
        self._state = PassState(blocks)
        config: Any = getattr(model, "config", None)
        self._has_rope_limit = config is not None and rope_limit(config) is not None
        get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = get_head()
        self._own_forwards = {
            module: module.forward for module in model.modules() if module not in (model, head)
        }
        for unit, modules in self._units().items():
            places = places_in(modules, entries)
            if unit is head:
                head.forward = SelectingHead(head, self._state, places).forward
            elif places:
                wrap_module(unit, self._state, places)
        for index, block in enumerate(blocks if shares_start else ()):
            share_block(block, index, self._state)
        model.register_forward_pre_hook(self._start_pass, with_kwargs=True)
        # Whether the model returns what its head returns. Some scale or cap the logits first; the
        # first pass shows it.
        self._ends_with_head = True

    def _units(self) -> dict[nn.Module, list[nn.Module]]:
        """Return what runs at the probes as a whole, and the modules of each that own parameters.

        These are linear modules, or the blocks and each module outside them.
        """
        modules = list(self._model.modules())
        if self.directions is None or self.directions.runs_linear_modules:
            return {module: [module] for module in modules}
        for norm in filter(is_norm, modules):
            widen_norm(norm)
        units = {block: list(block.modules()) for block in self._state.blocks}
        inside = set(chain.from_iterable(units.values()))
        return units | {module: [module] for module in modules if module not in inside}

    @contextmanager
    def own_forwards(self) -> Iterator[None]:
        """Let the modules run by their own forward methods, at theta, without any wrapper.

        The head keeps its wrapper, which then returns all logits: of ranks that split the weights,
        each has only a part of them.
        """
        wrapped = {module: module.forward for module in self._own_forwards}
        for module, own_forward in self._own_forwards.items():
            module.forward = own_forward
        try:
            yield
        finally:
            for module, forward in wrapped.items():
                module.forward = forward

    def __call__(
        self,
        batch: MicroBatch,
        perturbation: Perturbation | None,
        call: Callable[..., Any],
    ) -> tuple[Tensor, ...]:
        """Run one pass.

        Args:
            batch: of one copy, on the device of the model.
            perturbation: the probes, or None for one pass at theta.
            call: runs the model, (**inputs) -> its output or a tensor of new tokens.

        Returns:
            What `call` returns at each probe: the logits, [selected rows, entries] if the batch
            selects some of them and else [rows, tokens, vocabulary]; or the log-probabilities that
            it selects, [targets]; or new tokens, int64 [rows, tokens].
        """
        writes_answers = batch.prompts is not None
        if perturbation is not None and writes_answers:
            self._assert_rows_keep_their_directions(perturbation)
            assert self.directions is not None
            if len(perturbation.probes) > 1 and not self.directions.runs_linear_modules:
                singles = perturbation.one_by_one()
                return tuple(self(batch, single, call)[0] for single in singles)
        state = self._state
        num_copies = 1
        if perturbation is not None:
            num_copies = len(perturbation.probes)
            assert self.directions is not None, "a model that is perturbed has directions"
            state.perturber = self.directions.start_pass(state, perturbation, batch)
            state.current = ProbePass(
                probes=perturbation.probes,
                rows=len(next(iter(batch.inputs.values()))),
                dropped_layers=perturbation.dropped_layers,
                writes_answers=writes_answers,
            )
            self._num_unperturbed = self._num_equal_blocks(perturbation)
        own_inputs = own_positions(batch) if self._has_rope_limit else batch.inputs
        inputs = {name: torch.cat([value] * num_copies) for name, value in own_inputs.items()}
        targets = None if batch.selection is None else batch.selection.targets
        state.selection = batch.selection
        if batch.selection is not None and not self._ends_with_head:
            state.selection = replace(batch.selection, targets=None)
        try:
            output = call(**inputs)
            of_head = state.log_probabilities
        finally:
            state.finish()
            self._num_unperturbed = 0
        found: Tensor = getattr(output, "logits", output)
        copies = found.chunk(num_copies)
        if targets is None:
            return copies
        if of_head is None:
            return tuple(
                target_log_probabilities(logits, targets, lambda part: part) for logits in copies
            )
        if found.shape == of_head.shape and found.data_ptr() == of_head.data_ptr():
            return copies
        self._ends_with_head = False
        return self(batch, perturbation, call)

    def _assert_rows_keep_their_directions(self, perturbation: Perturbation) -> None:
        """Refuse groups of rows with directions of their own if rows are continued by length."""
        if perturbation.num_groups > 1 and not takes_padding(self._model):
            raise UserError(
                f"{type(self._model).__name__} writes no answers to padded prompts, and "
                "zo.examples_per_direction needs all prompts of a batch in one pass",
                fix="set zo.examples_per_direction=null",
            )

    def _num_equal_blocks(self, perturbation: Perturbation) -> int:
        """Return how many blocks come before the first perturbed one and may share a copy."""
        if not self._shares_start or len(perturbation.probes) == 1:
            return 0
        perturbed = set(range(self._num_blocks)) - perturbation.dropped_layers
        return min(perturbed, default=0)

    def _start_pass(self, model: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Note the rows of a call of the model. While it writes answers, a pass has many calls."""
        state = self._state
        state.num_equal_blocks = self._num_unperturbed
        ids = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        state.current = state.current._replace(tokens=ids.shape[1])
        if state.current.writes_answers:
            # What all prompts begin with is read as one row of each copy, or of each group.
            state.current = state.current._replace(rows=len(ids) // len(state.current.probes))
            # The tokens that the probes have written differ. Without a cache, all are read again.
            if ids.shape[1] == 1 or kwargs.get(cache_name(model)) is None:
                state.num_equal_blocks = 0
