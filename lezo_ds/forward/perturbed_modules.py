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

On a GPU, each call of the noise is a kernel launch. There the perturbed weights of all modules of a block are
made with one call when the block begins.
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
from lezo_ds.forward.perturbed_linear import is_product, product_at_probes
from lezo_ds.forward.perturbed_norm import is_fused, norm_at_probes
from lezo_ds.forward.replaced_call import call_with_copies, cast_floats, copy_dtype, runs_in_float32
from lezo_ds.noise import Distribution, NoiseBackend, Weight
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


class _Direction(NamedTuple):
    """The probes of a run that have the same key.

    Attributes:
        key: of their noise.
        places: their indices in the run.
        scales: of each.
    """

    key: int
    places: tuple[int, ...]
    scales: tuple[float, ...]


class _Run:
    """What the wrapped modules see while a model runs.

    Every module asks for the same facts, so they are found once for a pass.

    Attributes:
        perturbation: of this run, or of the part of it that runs at one probe.
        rows: number of rows of one copy of the batch.
        num_copies: number of copies of the batch.
        directions: the probes by their keys.
    """

    def __init__(self, perturbation: Perturbation, rows: int) -> None:
        self.perturbation = perturbation
        self.rows = rows
        self.num_copies = len(perturbation.probes)
        places: dict[int, list[int]] = {}
        for place, probe in enumerate(perturbation.probes):
            places.setdefault(probe.key, []).append(place)
        scales = [probe.scale for probe in perturbation.probes]
        self.directions = [
            _Direction(key, tuple(found), tuple(scales[place] for place in found))
            for key, found in places.items()
        ]
        self._parts: dict[tuple[int, int], _Run] = {}

    def part(self, start: int, stop: int) -> _Run:
        """Return the run on the copies `start` to `stop` - 1."""
        if (start, stop) not in self._parts:
            probes = self.perturbation.probes[start:stop]
            self._parts[start, stop] = _Run(replace(self.perturbation, probes=probes), self.rows)
        return self._parts[start, stop]


class _Trained(NamedTuple):
    """A parameter of a module that may be perturbed.

    Attributes:
        name: in the module.
        parameter: the parameter itself.
        named: its identity.
    """

    name: str
    parameter: nn.Parameter
    named: NamedParameter


class _Owned(NamedTuple):
    """The parameters that may be perturbed of a module, or of all modules of a block.

    Attributes:
        entries: the parameters.
        blocks: the transformer blocks that they are in; None stands for those outside all blocks.
    """

    entries: Sequence[_Trained]
    blocks: frozenset[int | None]


class PerturbedModules:
    """The wrapped modules of a model.

    Args:
        model: in eval mode; its modules' `forward` methods are replaced.
        trainable: the parameters that may be perturbed; a parameter that is tied appears once.
        noise: draws z.
        at_once: blocks whose parameters are perturbed when the block begins. They must be available then.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Mapping[nn.Parameter, NamedParameter],
        noise: NoiseBackend,
        at_once: Iterable[nn.Module] = (),
    ) -> None:
        self._trainable = trainable
        self._noise = noise
        self._running: _Run | None = None
        self._kept: dict[tuple[nn.Parameter, KeyedProbe], Tensor] | None = None
        self._of_block: dict[nn.Parameter, dict[KeyedProbe, Tensor]] = {}
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._wrap(module)
        for block in at_once:
            self._wrap_block(block)

    @property
    def num_copies(self) -> int:
        """How many copies of the batch the module that runs is given."""
        return 1 if self._running is None else self._running.num_copies

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
        return {trained.name: trained.parameter for trained in self._active(self._owned_by([module]))}

    def _owned_by(self, modules: Iterable[nn.Module]) -> _Owned:
        entries = [
            _Trained(name, parameter, self._trainable[parameter])
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in self._trainable
        ]
        return _Owned(entries, frozenset(entry.named.block for entry in entries))

    def _active(self, owned: _Owned) -> Sequence[_Trained]:
        if self._running is None:
            return ()
        dropped = self._running.perturbation.dropped_layers
        if dropped.isdisjoint(owned.blocks):
            return owned.entries
        if dropped.issuperset(owned.blocks):
            return ()
        return [entry for entry in owned.entries if entry.named.block not in dropped]

    def copies(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return the perturbed copies of an active parameter, one for each probe."""
        (copies,) = self._copies([parameter])
        return copies

    def _copies(self, parameters: Sequence[nn.Parameter]) -> list[list[Tensor]]:
        run = self._running
        assert run is not None, "copies are made while a perturbation is set"
        probes = run.perturbation.probes
        if self._of_block and all(parameter in self._of_block for parameter in parameters):
            return [[self._of_block[parameter][probe] for probe in probes] for parameter in parameters]
        if self._kept is None:
            return self._new_copies(run, parameters)
        missing = [
            parameter
            for parameter in parameters
            if any((parameter, probe) not in self._kept for probe in probes)
        ]
        if missing:
            for parameter, made in zip(missing, self._new_copies(run, missing), strict=True):
                for probe, copy in zip(probes, made, strict=True):
                    # At scale 0 a copy may be theta itself, which ZeRO-3 releases after this module.
                    self._kept[parameter, probe] = copy if probe.scale else copy.clone()
        return [[self._kept[parameter, probe] for probe in probes] for parameter in parameters]

    def _new_copies(self, run: _Run, parameters: Sequence[nn.Parameter]) -> list[list[Tensor]]:
        """Return the perturbed copies of each parameter."""
        weights = [
            Weight(parameter.data, self._trainable[parameter].parameter_id, copy_dtype(parameter))
            for parameter in parameters
        ]
        distribution = run.perturbation.distribution
        made = [self._noise.perturb(weights, key, scales, distribution) for key, _, scales in run.directions]
        if len(made) == 1:
            return made[0]
        found = []
        for place in range(len(parameters)):
            by_probe: dict[int, Tensor] = {}
            for direction, copies in zip(run.directions, made, strict=True):
                by_probe.update(zip(direction.places, copies[place], strict=True))
            found.append([by_probe[probe] for probe in range(run.num_copies)])
        return found

    @contextmanager
    def _perturbed_at_once(self, owned: _Owned) -> Iterator[None]:
        """Make the copies of active parameters, which modules use until this context ends."""
        run, active = self._running, self._active(owned)
        # More copies would take more memory than a module's two, and those that are kept are made once.
        if run is None or not active or run.num_copies > COPIES_AT_ONCE or self._kept is not None:
            yield
            return
        parameters = list(dict.fromkeys(entry.parameter for entry in active))
        probes = run.perturbation.probes
        self._of_block = {
            parameter: dict(zip(probes, copies, strict=True))
            for parameter, copies in zip(parameters, self._new_copies(run, parameters), strict=True)
        }
        try:
            yield
        finally:
            self._of_block = {}

    def rows_of_copies(self, table: nn.Parameter, rows: Tensor) -> list[Tensor]:
        """Return the given rows of an active parameter's perturbed copies, one tensor for each probe.

        Args:
            table: [num_rows, width].
            rows: int64, any shape.

        Returns:
            Tensors of shape [*rows.shape, width].
        """
        run = self._running
        assert run is not None, "copies are made while a perturbation is set"
        found: dict[int, Tensor] = {}
        for key, places, scales in run.directions:
            parameter_id = self._trainable[table].parameter_id
            weight = Weight(table.data, parameter_id, table.dtype, rows.reshape(-1))
            (made,) = self._noise.perturb([weight], key, scales, run.perturbation.distribution)
            found.update(zip(places, made, strict=True))
        return [found[place].view(*rows.shape, table.shape[-1]) for place in range(run.num_copies)]

    def for_each_pair(
        self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        """Call run(...) on two copies of the batch at a time; concatenate the outputs.

        While it is called, only the probes of these copies are set. With an odd number of probes, the last
        call gets one copy.
        """
        if self.num_copies <= COPIES_AT_ONCE:
            return run(*args, **(kwargs or {}))

        def run_pair(_: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return run(*args, **kwargs)

        return self._for_each_part(COPIES_AT_ONCE, run_pair, args, kwargs or {})

    def for_each_probe(
        self,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:  # noqa: ANN401
        """Call run(index of the probe, ...) on each copy of the batch; concatenate the outputs.

        Args:
            run: what is called.
            args: of it, for all copies.
            kwargs: of it, for all copies.
            dtype: what floating-point outputs are cast to; None leaves them as they are.
        """
        if self.num_copies == 1:
            output = run(0, *args, **(kwargs or {}))
            return output if dtype is None else cast_floats(output, dtype)
        return self._for_each_part(1, run, args, kwargs or {}, dtype)

    def _for_each_part(
        self,
        size: int,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dtype: torch.dtype | None = None,
    ) -> Any:  # noqa: ANN401
        """Call run(first copy of the part, ...) on `size` copies at a time; concatenate the outputs."""
        whole = self._running
        assert whole is not None, "a module is run at probes while a perturbation is set"
        outputs = []
        try:
            for start in range(0, whole.num_copies, size):
                stop = min(start + size, whole.num_copies)
                share = partial(_share, start=start, stop=stop, num_copies=whole.num_copies, rows=whole.rows)
                share_args = [map_tensors(share, value) for value in args]
                share_kwargs = {name: map_tensors(share, value) for name, value in kwargs.items()}
                # Modules inside this one already run on these copies: they see their probes only.
                self._running = whole.part(start, stop)
                outputs.append(run(start, *share_args, **share_kwargs))
        finally:
            self._running = whole
        return _concatenate(outputs, dtype)

    def _wrap_block(self, block: nn.Module) -> None:
        original, owned = block.forward, self._owned_by(_modules_that_run(block))

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with self._perturbed_at_once(owned):
                return original(*args, **kwargs)

        block.forward = forward

    def _wrap(self, module: nn.Module) -> None:
        original, owned = module.forward, self._owned_by([module])

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self._running is None:
                return original(*args, **kwargs)
            return self._run(module, original, owned, args, kwargs)

        module.forward = forward

    def _run(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        owned: _Owned,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # noqa: ANN401
        assert self._running is not None, "a module is run at probes while a perturbation is set"
        active = self._active(owned)
        if self._running.num_copies > COPIES_AT_ONCE and (active or _has_batch(args, kwargs)):

            def run_pair(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                return self._run(module, original, owned, args, kwargs)

            return self.for_each_pair(run_pair, args, kwargs)
        if not active:
            return original(*args, **kwargs)
        if type(module).forward is nn.Embedding.forward:
            return self._look_up(active[0].parameter, args, kwargs)
        made = self._copies([entry.parameter for entry in active])
        copies = {entry.name: tensors for entry, tensors in zip(active, made, strict=True)}
        num_copies = self._running.num_copies
        rows = 1 if num_copies == 1 else num_copies * self._running.rows
        if is_product(original, args, kwargs, rows):
            return product_at_probes(module, copies, args[0], num_copies)
        if is_fused(module, original, args, kwargs, rows):
            return norm_at_probes(module, copies, args[0], num_copies)

        def run(index: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            of_probe = {name: tensors[index] for name, tensors in copies.items()}
            return call_with_copies(module, original, of_probe, args, kwargs)

        dtype = None
        if runs_in_float32(module, active[0].parameter):
            dtype = active[0].parameter.dtype
            args, kwargs = cast_floats((list(args), dict(kwargs)), torch.float32)
        return self.for_each_probe(run, args, kwargs, dtype)

    def _look_up(self, table: nn.Parameter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run an embedding: only the rows that are read are perturbed."""

        def run(index: int, input: Tensor) -> Tensor:  # the name that nn.Embedding gives its argument
            (rows,) = self.rows_of_copies(table, input)
            return rows

        return self.for_each_probe(run, args, kwargs)


def _modules_that_run(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those in it that run whenever it does, and that need whole weights.

    A list, such as that of experts, may have modules that do not run. Of an embedding, a few rows are read.
    """
    if isinstance(module, nn.ModuleList) or type(module).forward is nn.Embedding.forward:
        return
    yield module
    for child in module.children():
        yield from _modules_that_run(child)


def _has_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether any tensor is that of the batch, and not the same for all sequences."""
    leaves, _ = tree_flatten((list(args), dict(kwargs)))
    return any(isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[0] > 1 for leaf in leaves)


def _share(value: Any, start: int, stop: int, num_copies: int, rows: int) -> Any:  # noqa: ANN401
    """Return the share of some copies of a batched tensor: its first dimension is copies x rows (x tokens).

    A tensor that is the same for all sequences ([1, tokens] position ids, [1, 1, tokens, tokens] masks) is
    expanded to the rows of a single copy: models that index it by row would fail otherwise. A tensor of one
    dimension is refused, because a batch cannot be told from as many tokens.
    """
    if not isinstance(value, Tensor) or not value.shape:
        return value
    first, *others = value.shape
    if others and first == 1:
        return value.expand(rows, *others) if stop - start == 1 else value
    if others and first % (num_copies * rows) == 0:
        size = first // num_copies
        return value[start * size : stop * size]
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


def _concatenate(outputs: Sequence[Any], dtype: torch.dtype | None) -> Any:  # noqa: ANN401
    if isinstance(outputs[0], Tensor):
        return _joined(outputs, dtype)
    leaves, structure = zip(*(tree_flatten(output) for output in outputs), strict=True)
    groups = zip(*leaves, strict=True)
    merged = [_joined(group, dtype) if isinstance(group[0], Tensor) else group[0] for group in groups]
    return tree_unflatten(merged, structure[0])


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Concatenate tensors; floating-point ones are cast to `dtype` on the way."""
    first, *_ = tensors
    if dtype is None or not first.is_floating_point():
        return torch.cat(list(tensors))
    sizes = [len(tensor) for tensor in tensors]
    whole = torch.empty((sum(sizes), *first.shape[1:]), dtype=dtype, device=first.device)
    for part, tensor in zip(torch.split(whole, sizes), tensors, strict=True):
        part.copy_(tensor)
    return whole
