"""Runs each module of a model at several probes of its weights, and leaves the stored weights alone.

Every module that directly owns parameters gets its `forward` wrapped. While a perturbation is set,
the wrapper computes perturbed copies of the module's active parameters out of place, runs the module with
them, and drops them: nothing has to be restored, so nothing drifts. Under ZeRO-3 the wrapper runs between
DeepSpeed's hooks, which gather the module's parameters before it and release them after it.

With k probes the batch is repeated k times, [x; x; ...]. A module with active parameters runs k times, each
time on one copy of the batch with the weights of one probe, and all from one gather. Its perturbed weights
are made for two probes at a time. A module with other parameters runs on two copies at a time, because the
bits of a matrix product depend on its number of rows: the losses of a pass are then those of passes of two
probes. A module without parameters runs once over all copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lezo_ds.errors import UserError
from lezo_ds.model.replaced_call import call_with_copies, copy_dtype
from lezo_ds.noise import Distribution, NoiseBackend
from lezo_ds.sharding.parameters import NamedParameter

COPIES_AT_ONCE = 2
"""How many copies of the batch a module with parameters runs on at a time. The two probes of a direction of
SPSA need the same noise. The last bits of losses depend on this number."""


class KeyedProbe(NamedTuple):
    """The weights theta + scale * z(key)."""

    key: int
    scale: float


@dataclass(frozen=True)
class Perturbation:
    """Where the loss is measured.

    Attributes:
        probes: at least one; each runs on a copy of the batch of its own.
        dropped_layers: indices of the transformer blocks that stay at theta.
        distribution: of z.
    """

    probes: tuple[KeyedProbe, ...]
    dropped_layers: frozenset[int]
    distribution: Distribution = "normal"


@dataclass(frozen=True)
class _Run:
    """What the wrapped modules see while a model runs.

    Attributes:
        perturbation: of this run, or of the part of it that runs at one probe.
        rows: number of rows of one copy of the batch.
    """

    perturbation: Perturbation
    rows: int


class PerturbedModules:
    """The wrapped modules of a model.

    Args:
        model: in eval mode; its modules' `forward` methods are replaced.
        trainable: the parameters that may be perturbed; a parameter that is tied appears once.
        noise: draws z.
    """

    def __init__(
        self, model: nn.Module, trainable: Mapping[nn.Parameter, NamedParameter], noise: NoiseBackend
    ) -> None:
        self._trainable = trainable
        self._noise = noise
        self._running: _Run | None = None
        self._kept: dict[tuple[nn.Parameter, KeyedProbe], Tensor] | None = None
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._wrap(module)

    @property
    def num_copies(self) -> int:
        """How many copies of the batch the module that runs is given."""
        return 1 if self._running is None else len(self._running.perturbation.probes)

    @contextmanager
    def running(self, perturbation: Perturbation | None, rows: int) -> Iterator[None]:
        """Run modules at the probes of a perturbation; None runs them at theta.

        Args:
            perturbation: what the modules are run at.
            rows: number of rows of one copy of the batch.
        """
        before = self._running
        self._running = None if perturbation is None else _Run(perturbation, rows)
        try:
            yield
        finally:
            self._running = before

    def perturb_from_here(self, perturbation: Perturbation, rows: int) -> None:
        """Go on at the probes of a perturbation, until the `running` around it ends."""
        self._running = _Run(perturbation, rows)

    @contextmanager
    def running_on_rows(self, rows: int) -> Iterator[None]:
        """Go on at the same probes with copies of another number of rows."""
        with self.running(None if self._running is None else self._running.perturbation, rows):
            yield

    @contextmanager
    def keeping_copies(self, keep: bool) -> Iterator[None]:
        """Make each perturbed copy of a whole parameter once and keep it, until this context ends.

        The weights must not change meanwhile.

        Args:
            keep: False makes a copy again for each run of a module.
        """
        self._kept = {} if keep else None
        try:
            yield
        finally:
            self._kept = None

    def active(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the module's own parameters that are perturbed now, by name."""
        if self._running is None:
            return {}
        dropped = self._running.perturbation.dropped_layers
        active: dict[str, nn.Parameter] = {}
        for name, parameter in module._parameters.items():
            named = None if parameter is None else self._trainable.get(parameter)
            if named is None or parameter is None:
                continue
            if named.block is None or named.block not in dropped:
                active[name] = parameter
        return active

    def copies(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return the perturbed copies of an active parameter, one for each probe."""
        assert self._running is not None, "copies are made while a perturbation is set"
        if self._kept is None:
            return self._new_copies(parameter)
        places = [(parameter, probe) for probe in self._running.perturbation.probes]
        if any(place not in self._kept for place in places):
            made = zip(places, self._new_copies(parameter), strict=True)
            # At scale 0 a copy may be theta itself, which ZeRO-3 releases after this module.
            self._kept |= {place: copy if place[1].scale else copy.clone() for place, copy in made}
        return [self._kept[place] for place in places]

    def _new_copies(self, parameter: nn.Parameter) -> list[Tensor]:
        def perturb(key: int, scales: Sequence[float], distribution: Distribution) -> list[Tensor]:
            return self._noise.perturb(
                parameter.data,
                key=key,
                parameter_id=self._trainable[parameter].parameter_id,
                scales=scales,
                out_dtype=copy_dtype(parameter),
                distribution=distribution,
            )

        return self._by_key(perturb)

    def rows_of_copies(self, table: nn.Parameter, rows: Tensor) -> list[Tensor]:
        """Return the given rows of an active parameter's perturbed copies, one tensor for each probe.

        Args:
            table: [num_rows, width].
            rows: int64, any shape.

        Returns:
            Tensors of shape [*rows.shape, width].
        """

        def perturb(key: int, scales: Sequence[float], distribution: Distribution) -> list[Tensor]:
            return self._noise.perturb_rows(
                table.data,
                rows.reshape(-1),
                key=key,
                parameter_id=self._trainable[table].parameter_id,
                scales=scales,
                distribution=distribution,
            )

        return [found.view(*rows.shape, table.shape[-1]) for found in self._by_key(perturb)]

    def for_each_pair(
        self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        """Call run(...) on two copies of the batch at a time; concatenate the outputs.

        While it is called, only the probes of these copies are set. With an odd number of probes, the last
        call gets one copy.
        """
        if self.num_copies <= COPIES_AT_ONCE:
            return run(*args, **(kwargs or {}))
        starts = range(0, self.num_copies, COPIES_AT_ONCE)
        parts = (range(start, min(start + COPIES_AT_ONCE, self.num_copies)) for start in starts)
        return self._for_each_part(parts, lambda _, *args, **kwargs: run(*args, **kwargs), args, kwargs or {})

    def for_each_probe(
        self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        """Call run(index of the probe, ...) on each copy of the batch; concatenate the outputs."""
        if self.num_copies == 1:
            return run(0, *args, **(kwargs or {}))
        parts = (range(index, index + 1) for index in range(self.num_copies))
        return self._for_each_part(parts, run, args, kwargs or {})

    def _for_each_part(
        self,
        parts: Iterable[range],
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # noqa: ANN401
        """Call run(first copy of the part, ...) on parts of the copies; concatenate the outputs."""
        assert self._running is not None, "a module is run at probes while a perturbation is set"
        perturbation, rows = self._running.perturbation, self._running.rows
        outputs = []
        for part in parts:
            share = partial(_share, part=part, num_copies=len(perturbation.probes), rows=rows)
            share_args = [map_tensors(share, value) for value in args]
            share_kwargs = {name: map_tensors(share, value) for name, value in kwargs.items()}
            # Modules inside this one already run on these copies: they see their probes only.
            probes = perturbation.probes[part.start : part.stop]
            with self.running(replace(perturbation, probes=probes), rows):
                outputs.append(run(part.start, *share_args, **share_kwargs))
        return _concatenate(outputs)

    def _by_key(self, perturb: Callable[[int, Sequence[float], Distribution], list[Tensor]]) -> list[Tensor]:
        """Call perturb(key, scales, distribution) once for each key; return its tensors in probe order."""
        assert self._running is not None, "copies are made while a perturbation is set"
        indices: dict[int, list[int]] = {}
        probes, distribution = self._running.perturbation.probes, self._running.perturbation.distribution
        for index, probe in enumerate(probes):
            indices.setdefault(probe.key, []).append(index)
        found: dict[int, Tensor] = {}
        for key, places in indices.items():
            made = perturb(key, [probes[place].scale for place in places], distribution)
            found.update(zip(places, made, strict=True))
        return [found[index] for index in range(len(probes))]

    def _wrap(self, module: nn.Module) -> None:
        original = module.forward

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return self._run(module, original, args, kwargs)

        module.forward = forward

    def _run(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # noqa: ANN401
        if self.num_copies > COPIES_AT_ONCE and (self.active(module) or _has_batch(args, kwargs)):

            def run_pair(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                return self._run(module, original, args, kwargs)

            return self.for_each_pair(run_pair, args, kwargs)
        active = self.active(module)
        if not active:
            return original(*args, **kwargs)
        if type(module).forward is nn.Embedding.forward:
            return self._look_up(active["weight"], args, kwargs)
        copies = {name: self.copies(parameter) for name, parameter in active.items()}

        def run(index: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            of_probe = {name: tensors[index] for name, tensors in copies.items()}
            return call_with_copies(module, original, of_probe, args, kwargs)

        return self.for_each_probe(run, args, kwargs)

    def _look_up(self, table: nn.Parameter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run an embedding: only the rows that are read are perturbed."""

        def run(index: int, input: Tensor) -> Tensor:  # the name that nn.Embedding gives its argument
            (rows,) = self.rows_of_copies(table, input)
            return rows

        return self.for_each_probe(run, args, kwargs)


def _has_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether any tensor is that of the batch, and not the same for all sequences."""
    leaves, _ = tree_flatten((list(args), dict(kwargs)))
    return any(isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[0] > 1 for leaf in leaves)


def _share(value: Any, part: range, num_copies: int, rows: int) -> Any:  # noqa: ANN401
    """Return the share of some copies of a batched tensor: its first dimension is copies x rows (x tokens).

    A tensor that is the same for all sequences ([1, tokens] position ids, [1, 1, tokens, tokens] masks) is
    expanded to the rows of a single copy: models that index it by row would fail otherwise. A tensor of one
    dimension is refused, because a batch cannot be told from as many tokens.
    """
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.dim() > 1 and value.shape[0] == 1:
        return value.expand(rows, *value.shape[1:]) if len(part) == 1 else value
    if value.dim() > 1 and value.shape[0] % (num_copies * rows) == 0:
        size = value.shape[0] // num_copies
        return value[part.start * size : part.stop * size]
    raise UserError(
        "a module with parameters is given a tensor without a batch dimension of its own",
        got=f"shape {tuple(value.shape)}",
        expected=f"two dimensions or more, the first {num_copies * rows} (or a multiple): the batch, "
        f"{num_copies} times",
        fix="set zo.probes_per_pass=1 for this model",
    )


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401
    """Return a value with `function` called on each tensor in it, and on each other leaf."""
    # Nearly all values are tensors, and tree_map alone would take a fifth of the host's time of a step.
    return function(value) if isinstance(value, Tensor) else tree_map(function, value)


def _concatenate(outputs: Sequence[Any]) -> Any:  # noqa: ANN401
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs))
    leaves, structure = zip(*(tree_flatten(output) for output in outputs), strict=True)
    groups = zip(*leaves, strict=True)
    merged = [torch.cat(group) if isinstance(group[0], Tensor) else group[0] for group in groups]
    return tree_unflatten(merged, structure[0])
