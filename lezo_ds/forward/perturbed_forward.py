"""Runs a model at several probes of its weights, and leaves the stored weights alone.

One pass of k probes gathers each weight once, and runs all probes (probes.py draws the rows):

    batch ──repeat k times──► wrapped model ──► logits [k * rows, ...] ──cut──► k outputs
                              │ PassState: what runs at the probes: blocks, modules, the head
                              └ a Perturber: how its rows meet the weights of their probes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds.errors import UserError
from lezo_ds.forward.answer_cache import takes_padding
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.forward.dense import widen_norm
from lezo_ds.forward.directions import Directions, PassState
from lezo_ds.forward.head import SelectingHead, target_log_probabilities
from lezo_ds.forward.probes import (
    Args,
    Kwargs,
    Perturbation,
    TrainedParameter,
    is_norm,
    places_in,
)
from lezo_ds.forward.rope import own_positions, rope_limit
from lezo_ds.sharding.gather import units_of


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
        model: Any,
        trainable: Sequence[TrainedParameter],
        blocks: Sequence[nn.Module] = (),
        *,
        directions: Directions | None = None,
        shares_start: bool = False,
    ) -> None:
        entries = {entry.parameter: entry for entry in trainable}
        self._model = model
        self._sharing = blocks if shares_start else ()
        self.directions = directions
        self._runs_linear_modules = directions is None or directions.runs_linear_modules
        self._state = PassState(blocks)
        self._has_rope_limit = rope_limit(model.config) is not None
        head = model.get_output_embeddings()
        for unit, modules in self._units(blocks).items():
            places = places_in(modules, entries)
            if unit is head:
                head.forward = SelectingHead(head, self._state, places).forward
            elif places:
                self._state.wrap(unit, places)
        for index, block in enumerate(self._sharing):
            self._state.share(block, index)
        model.register_forward_pre_hook(self._note_rows, with_kwargs=True)
        # Whether the model returns what its head returns. Some scale or cap the logits first; the
        # first pass shows it.
        self._ends_with_head = True

    def _units(self, blocks: Sequence[nn.Module]) -> Mapping[nn.Module, Sequence[nn.Module]]:
        """Return what runs at the probes as a whole, and the modules in it.

        These are linear modules, or the blocks and each module outside them.
        """
        modules = list(self._model.modules())
        if self._runs_linear_modules:
            return {module: [module] for module in modules}
        for norm in filter(is_norm, modules):
            widen_norm(norm)
        return units_of(modules, blocks)

    def __call__(
        self,
        batch: MicroBatch,
        perturbation: Perturbation,
        call: Callable[..., Any],
    ) -> tuple[Tensor, ...]:
        """Run one pass.

        Args:
            batch: of one copy, on the device of the model.
            perturbation: the probes, or `AT_THETA`.
            call: runs the model, (**inputs) -> its output or a tensor of new tokens.

        Returns:
            What `call` returns at each probe: the logits, [selected rows, entries] if the batch
            selects some of them and else [rows, tokens, vocabulary]; or the log-probabilities that
            it selects, [targets]; or new tokens, int64 [rows, tokens].
        """
        num_copies = perturbation.num_copies
        writes_answers = batch.prompts is not None
        if writes_answers and perturbation.probes:
            self._assert_rows_keep_their_directions(perturbation)
            if num_copies > 1 and not self._runs_linear_modules:
                return tuple(self(batch, single, call)[0] for single in perturbation.one_by_one())
        selection = batch.selection
        targets = None if selection is None else selection.targets
        if targets is not None and not self._ends_with_head:
            of_probes = self(batch.with_logits(), perturbation, call)
            return tuple(
                target_log_probabilities(logits, targets, lambda part: part) for logits in of_probes
            )
        state = self._state
        own_inputs = own_positions(batch) if self._has_rope_limit else batch.inputs
        inputs = {name: torch.cat([value] * num_copies) for name, value in own_inputs.items()}
        try:
            state.current = perturbation
            state.selection = selection
            if perturbation.probes:
                assert self.directions is not None, "a model that is perturbed has directions"
                state.perturber = self.directions.start_pass(state, perturbation, batch)
            if num_copies > 1 and not writes_answers:
                perturbed = set(range(len(self._sharing))) - perturbation.dropped_layers
                state.num_equal_blocks = min(perturbed, default=0)
            output = call(**inputs)
            of_head = state.log_probabilities
        finally:
            state.finish()
        found: Tensor = getattr(output, "logits", output)
        if targets is not None:
            assert of_head is not None, "the head has run"
            if found.shape != of_head.shape or found.data_ptr() != of_head.data_ptr():
                self._ends_with_head = False
                return self(batch, perturbation, call)
        return found.chunk(num_copies)

    def _assert_rows_keep_their_directions(self, perturbation: Perturbation) -> None:
        """Refuse groups of rows with directions of their own if rows are continued by length."""
        has_groups = len(perturbation.probes[0].keys) > 1
        if has_groups and not takes_padding(self._model):
            raise UserError(
                f"{type(self._model).__name__} cannot generate from padded prompts, and "
                "zo.examples_per_direction needs all prompts of a batch in one pass",
                fix="set zo.examples_per_direction=null",
            )

    def _note_rows(self, model: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Note the rows of a call of the model. While it writes answers, a pass has many calls.

        What all prompts begin with is read as one row of each copy, or of each group.
        """
        ids = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        current = self._state.current
        rows = len(ids) // current.num_copies
        self._state.current = replace(current, rows=rows, tokens=ids.shape[1])
