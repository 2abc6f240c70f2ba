"""Runs a model at several probes of its weights, and leaves the stored weights alone.

Every module that owns parameters gets its `forward` wrapped. The wrapper makes perturbed copies of the active
parameters, runs the module with them, and drops them: nothing drifts. With ZeRO-3 it runs between the
hooks of DeepSpeed, which gather the module's parameters before it and release them after it.

With k probes the batch is repeated k times, [x; x; ...]. A module with active parameters runs on each copy of
the batch with the weights of one probe, and all from one gather. A module without parameters runs once over
all copies. While a model writes answers, the copies of its weights are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lezo_ds.errors import UserError
from lezo_ds.forward.batch import LogitSelection, MicroBatch
from lezo_ds.forward.copies import has_batch, mapped, run_once, share_of
from lezo_ds.forward.module_calls import (
    call_with_copies,
    cast_floats,
    copy_dtype,
    is_16_bit_norm,
    modules_that_run,
    runner_at_probes,
)
from lezo_ds.noise import NoiseBackend, Weight, noise_backend
from lezo_ds.sharding.parameters import NamedParameter
from lezo_ds.sharding.tensor_parallel import LINEAR_FORWARDS, LOOKUP_FORWARDS, look_up, whole_logits
from lezo_ds.zo.laws import DenseLaw, PerturbationLaw

COPIES_AT_ONCE = 2
"""Copies of the batch that a module with parameters runs on at a time. The bits of a matrix product depend on
its number of rows, so the losses of a pass of more probes are those of passes of two. Answers are tokens and
do not show these bits: all copies run at once."""


class KeyedProbe(NamedTuple):
    """The weights theta + scale * z(key)."""

    key: int
    scale: float


@dataclass(frozen=True)
class Perturbation:
    """The weights at which the loss is measured."""

    probes: tuple[KeyedProbe, ...]  # at least one; each runs on its own copy of the batch
    dropped_layers: frozenset[int]  # transformer blocks that stay at theta
    law: PerturbationLaw = DenseLaw()


class _Pass(NamedTuple):
    """The forward pass that runs, or the part of it that runs some of the probes."""

    probes: tuple[KeyedProbe, ...] = ()  # none at theta
    rows: int = 1  # of one copy of the batch
    dropped: frozenset[int] = frozenset()
    keeps: bool = False  # the perturbed weights, to the end of the answers

    @property
    def runs_at_once(self) -> bool:
        return self.keeps or len(self.probes) <= COPIES_AT_ONCE


class _Trained(NamedTuple):
    """A parameter of a module that may be perturbed."""

    name: str  # in the module
    parameter: nn.Parameter
    named: NamedParameter


class PerturbedForward:
    """Wraps a causal language model in eval mode so that it can run at perturbed weights.

    `trainable` are the parameters that may be perturbed; a parameter that is tied appears once. If
    `noise.takes_blocks`, one call of the noise (on a GPU, one kernel) perturbs all weights of a block when it
    begins; they must be gathered by then. With `shares_start`, for which nothing outside the blocks may be
    trainable, what is before the first perturbed block is computed once for all probes.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Mapping[nn.Parameter, NamedParameter],
        noise: NoiseBackend,
        blocks: Sequence[nn.Module] = (),
        *,
        shares_start: bool = False,
    ) -> None:
        assert not shares_start or all(named.block < len(blocks) for named in trainable.values())
        self._trainable = trainable
        self._noise = noise
        self._blocks_that_share = range(len(blocks) if shares_start else 0)
        self._now = _Pass()
        self._selection: LogitSelection | None = None
        self._made: dict[
            tuple[nn.Parameter, KeyedProbe], Tensor
        ] = {}  # for a block, or for answers
        self._first_perturbed = (
            0  # before this block, all copies of the batch are equal, answers excepted
        )
        self._equal_until = 0  # the same in the pass that runs
        for module in model.modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                self._wrap(module)
        if noise.takes_blocks or shares_start:
            for index, block in enumerate(blocks):
                self._wrap_block(index, block)
        model.register_forward_pre_hook(self._start_pass, with_kwargs=True)
        self._model_name = type(model).__name__
        get_head = getattr(model, "get_output_embeddings", None)
        self._head: nn.Module | None = get_head() if get_head else None
        if self._head is not None:
            self._wrap_head(self._head)

    def __call__(
        self, batch: MicroBatch, perturbation: Perturbation | None, call: Callable[..., Any]
    ) -> tuple[Tensor, ...]:
        """Return the logits, or the tensor that `call(**inputs)` returns, at each probe or once at theta."""
        if batch.selection is not None and self._head is None:
            what = f"{self._model_name} has no output head: get_output_embeddings() is missing"
            raise UserError(what, fix="set model.path to a causal language model")
        if perturbation is not None:
            rows = len(next(iter(batch.inputs.values())))
            change = (perturbation.probes, rows, perturbation.dropped_layers)
            if perturbation.law != self._noise.law:
                self._noise = noise_backend(self._noise.device, perturbation.law)
            self._now = _Pass(*change, keeps=batch.generation is not None)
            shared = set(self._blocks_that_share if len(perturbation.probes) > 1 else ())
            self._first_perturbed = min(shared - perturbation.dropped_layers, default=0)
        num_copies = len(self._now.probes) or 1
        inputs = {name: torch.cat([value] * num_copies) for name, value in batch.inputs.items()}
        self._selection = batch.selection
        try:
            output = call(**inputs)
        finally:
            self._now, self._selection, self._made, self._first_perturbed = _Pass(), None, {}, 0
        return tuple(getattr(output, "logits", output).chunk(num_copies))

    def _start_pass(self, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read the rows of a pass: what all prompts begin with is one. A token of answers is not shared."""
        self._equal_until = self._first_perturbed
        if self._now.keeps:
            ids = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            self._now = self._now._replace(rows=len(ids) // len(self._now.probes))
            self._equal_until *= ids.shape[1] > 1

    def _wrap(self, module: nn.Module) -> None:
        original, owned = module.forward, self._owned_by([module])

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            active, num_copies = self._active(owned), len(self._now.probes)
            if not self._now.runs_at_once and (active or has_batch(args, kwargs)):
                return self._in_parts(
                    COPIES_AT_ONCE, lambda _, *a, **k: forward(*a, **k), args, kwargs
                )
            if not active:
                return original(*args, **kwargs)
            if type(module).forward in LOOKUP_FORWARDS:  # only the rows that are read are perturbed
                (ids,) = (*args, *kwargs.values())  # nn.Embedding calls its argument `input`
                perturbed = partial(
                    self._in_parts, 1, lambda _, share: self._rows(active[0], share)
                )
                return look_up(module, ids, lambda ids: perturbed([ids], {}))
            copies = dict(zip([entry.name for entry in active], self._copies(active), strict=True))
            rows = 1 if num_copies == 1 else num_copies * self._now.rows
            if runner := runner_at_probes(module, original, args, kwargs, rows):
                return runner(module, copies, args[0], num_copies)

            def run(probe: int, *args: Any, **kwargs: Any) -> Any:
                of_probe = {name: of_entry[probe] for name, of_entry in copies.items()}
                return call_with_copies(module, original, of_probe, args, kwargs)

            if not is_16_bit_norm(module):
                return self._in_parts(1, run, args, kwargs)
            args, kwargs = cast_floats((list(args), kwargs), torch.float32)
            return cast_floats(self._in_parts(1, run, args, kwargs), active[0].parameter.dtype)

        module.forward = forward

    def _in_parts(
        self, size: int, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call run(first copy, ...) on `size` copies of the batch at a time; concatenate the outputs."""
        now = self._now
        if len(now.probes) <= size:
            return run(0, *args, **kwargs)
        outputs = []
        try:
            for first in range(0, len(now.probes), size):
                self._now = now._replace(probes=now.probes[first : first + size])
                share = share_of(now.rows, len(now.probes), first, len(self._now.probes))
                outputs.append(run(first, *mapped(share, args), **mapped(share, kwargs)))
        finally:
            self._now = now
        return tree_map(
            lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *outputs
        )

    def _owned_by(self, modules: Iterable[nn.Module]) -> Sequence[_Trained]:
        return [
            _Trained(name, parameter, self._trainable[parameter])
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in self._trainable
        ]

    def _active(self, owned: Sequence[_Trained]) -> Sequence[_Trained]:
        """Return the parameters that are perturbed now."""
        dropped = self._now.dropped
        return (
            [entry for entry in owned if entry.named.block not in dropped]
            if self._now.probes
            else ()
        )

    def _copies(self, active: Sequence[_Trained]) -> list[list[Tensor]]:
        """Return the perturbed copies of each parameter, one for each probe that runs."""
        probes = self._now.probes
        if self._made and all((entry.parameter, probes[0]) in self._made for entry in active):
            return [[self._made[entry.parameter, probe] for probe in probes] for entry in active]
        weights = [
            Weight(p.data, named.parameter_id, copy_dtype(p), region=named.region)
            for _, p, named in active
        ]
        copies = self._perturbed(weights)
        if self._now.keeps:
            self._keep(active, copies)
        return copies

    def _keep(self, active: Sequence[_Trained], copies: Sequence[Sequence[Tensor]]) -> None:
        for entry, of_entry in zip(active, copies, strict=True):
            for probe, copy in zip(self._now.probes, of_entry, strict=True):
                self._made[entry.parameter, probe] = copy

    def _rows(self, table: _Trained, rows: Tensor) -> Tensor:
        """Return some rows of a perturbed matrix at the one probe that runs: [*rows.shape, width]."""
        theta = table.parameter.data
        weight = Weight(
            theta, table.named.parameter_id, theta.dtype, rows.reshape(-1), table.named.region
        )
        ((copy,),) = self._perturbed([weight])
        return copy.view(*rows.shape, -1)

    def _perturbed(self, weights: Sequence[Weight]) -> list[list[Tensor]]:
        """Return the perturbed copies of each weight, one for each probe that runs."""
        probes = self._now.probes
        if all(probe.key == probes[0].key for probe in probes):
            return self._noise.perturb(weights, probes[0].key, [probe.scale for probe in probes])
        of_probes = [self._noise.perturb(weights, probe.key, [probe.scale]) for probe in probes]
        return [[copy for (copy,) in of_weight] for of_weight in zip(*of_probes, strict=True)]

    def _wrap_block(self, index: int, block: nn.Module) -> None:
        """Let a block start with the copies of the batch that it needs and those of all its weights."""
        original = block.forward
        owned = self._owned_by(modules_that_run(block)) if self._noise.takes_blocks else ()

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if index < self._equal_until:
                self._now, layer = _Pass(), index if now.keeps else None
                output = run_once(original, [*args], kwargs, now.rows, len(now.probes), layer)
                self._now = now
                return output
            self._equal_until = 0
            active = self._active(owned)
            # The copies of more probes would take too much memory.
            if not active or not now.runs_at_once:
                return original(*args, **kwargs)
            self._keep(active, self._copies(active))
            try:
                return original(*args, **kwargs)
            finally:
                if not now.keeps:
                    self._made = {}

        block.forward = forward

    def _wrap_head(self, head: nn.Module) -> None:
        """Let the output head compute the selected positions and vocabulary entries only."""
        run, owned = (
            head.forward,
            self._owned_by([head]),
        )  # the perturbed forward, if it has parameters

        def original(hidden: Tensor) -> Tensor:
            return whole_logits(head, run(hidden))

        def run_entries(entries: Tensor, hidden: Tensor) -> Tensor:
            """Run a linear head at one probe: only some rows of its weight are perturbed."""
            active = {entry.name: entry for entry in self._active(owned)}
            table: Tensor = head._parameters["weight"]  # type: ignore[assignment]  # a linear module has one
            read = (
                partial(self._rows, active["weight"]) if "weight" in active else table.__getitem__
            )
            weight = look_up(head, entries, read)
            bias: Tensor | None = head._parameters.get("bias")
            if not active or bias is None:
                return F.linear(hidden, weight, None if bias is None else bias[entries])
            if "bias" in active:
                ((bias,),) = self._copies([active["bias"]])
            return F.linear(hidden, weight) + bias[entries]

        @wraps(run)
        def forward(hidden: Tensor) -> Any:
            selection, now = self._selection, self._now
            if selection is None:
                # Of the last tokens of prompts, torch would multiply as many copies of a frozen weight.
                return original(hidden.contiguous())
            # The head may run inside a module that already runs on one copy of the batch.
            num_copies, entries = len(now.probes) or 1, selection.vocabulary
            rows_of_copy = hidden.shape[0] // num_copies
            rows = torch.cat([selection.rows + rows_of_copy * copy for copy in range(num_copies)])
            hidden = hidden[rows, selection.positions.repeat(num_copies)]
            self._now = now._replace(rows=len(selection.rows))
            try:
                if entries is None:
                    return original(hidden)
                if type(head).forward not in (nn.Linear.forward, *LINEAR_FORWARDS):
                    return original(hidden)[:, entries]
                size = 1 if self._active(owned) else COPIES_AT_ONCE
                return self._in_parts(
                    size, lambda _, share: run_entries(entries, share), [hidden], {}
                )
            finally:
                self._now = now

        head.forward = forward
