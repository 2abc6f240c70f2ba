"""Forward passes at theta + mu z and theta - mu z that leave the stored weights alone.

Every module that directly owns parameters gets its `forward` wrapped. While a perturbation is set, the
wrapper computes the perturbed copies of the module's active parameters out of place, runs the module with
them, and drops them: nothing is restored, so nothing drifts. Under ZeRO-3 the wrapper runs between
DeepSpeed's hooks, which gather the module's parameters before it and release them after it.

In the dual forward the batch is doubled, [x; x]: a module with active parameters runs twice, on the first
half with theta + mu z and on the second with theta - mu z, from one gather and one draw of z; every other
module runs once over the doubled batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers.pytorch_utils import Conv1D

from lezo_ds.errors import UserError
from lezo_ds.model.batch import LogitSelection, MicroBatch
from lezo_ds.noise import NoiseBackend
from lezo_ds.sharding.parameters import NamedParameter

_BIAS_LAST = (nn.Linear.forward, Conv1D.forward)
"""The forwards known to be matrix product + bias, so that the bias can be added after them."""


class Sign(Enum):
    """Which side of theta a forward pass evaluates; BOTH is the dual forward over a doubled batch."""

    PLUS = 1
    MINUS = -1
    BOTH = 0


@dataclass(frozen=True)
class Perturbation:
    """theta +- scale * z(seed), for all parameters outside the dropped layers."""

    seed: int
    scale: float
    dropped_layers: frozenset[int]
    sign: Sign


class PerturbedForward:
    """Wraps a model so that it can run at perturbed weights.

    Args:
        model: a causal language model of transformers (or one with the same interface), in eval mode.
        trainable: the parameters that may be perturbed; a parameter that is tied appears once.
        noise: draws z.
    """

    def __init__(
        self, model: nn.Module, trainable: Mapping[nn.Parameter, NamedParameter], noise: NoiseBackend
    ) -> None:
        self._model = model
        self._trainable = trainable
        self._noise = noise
        self._perturbation: Perturbation | None = None
        self._selection: LogitSelection | None = None
        self._batch_rows = 0
        get_head = getattr(model, "get_output_embeddings", None)
        self._head: nn.Module | None = get_head() if get_head else None
        for module in model.modules():
            if module is self._head or any(p in trainable for p in module.parameters(recurse=False)):
                self._wrap(module)

    def __call__(
        self, batch: MicroBatch, perturbation: Perturbation | None, call: Callable[..., Any]
    ) -> tuple[Tensor, ...]:
        """Run one forward pass, or all those of a continuation.

        Args:
            batch: R sequences and the logits wanted of them.
            perturbation: None to run at theta itself.
            call: runs the model on keyword arguments, and returns its output (DeepSpeed's engine, or the
                model), or a tensor whose first dimension is the batch (generation).

        Returns:
            The logits, or that tensor: (at theta + mu z, at theta - mu z) for Sign.BOTH, else only one.
        """
        copies = 2 if perturbation is not None and perturbation.sign is Sign.BOTH else 1
        inputs = {name: torch.cat([value] * copies) for name, value in batch.inputs.items()}
        rows = next(iter(batch.inputs.values())).shape[0]
        with self._running(perturbation, batch.selection, rows):
            output = call(**inputs)
        return tuple(getattr(output, "logits", output).chunk(copies))

    @contextmanager
    def _running(
        self, perturbation: Perturbation | None, selection: LogitSelection | None, rows: int
    ) -> Iterator[None]:
        if selection is not None and self._head is None:
            raise UserError(
                f"{type(self._model).__name__} names no output head",
                expected="get_output_embeddings() of a causal language model",
                fix="use a causal language model",
            )
        self._perturbation, self._selection, self._batch_rows = perturbation, selection, rows
        try:
            yield
        finally:
            self._perturbation, self._selection = None, None

    def _wrap(self, module: nn.Module) -> None:
        original = module.forward
        run = self._run_head if module is self._head else self._run

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return run(module, original, *args, **kwargs)

        module.forward = forward

    def _active(self, module: nn.Module) -> dict[str, nn.Parameter]:
        if self._perturbation is None:
            return {}
        active: dict[str, nn.Parameter] = {}
        for name, parameter in module._parameters.items():
            named = None if parameter is None else self._trainable.get(parameter)
            if named is None or parameter is None:
                continue
            if named.block is None or named.block not in self._perturbation.dropped_layers:
                active[name] = parameter
        return active

    def _run(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        active = self._active(module)
        if not active:
            return original(*args, **kwargs)
        if type(module).forward is nn.Embedding.forward:
            (table,) = active.values()

            def look_up(sign: Sign, input: Tensor) -> Tensor:  # the name nn.Embedding gives it
                return self._rows(table, input, (sign,))[0]

            return self._by_sign(look_up, args, self._batch_rows, kwargs)
        copies = self._copies(active)

        def run(sign: Sign, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return _call_with(module, original, {n: pair[sign] for n, pair in copies.items()}, args, kwargs)

        return self._by_sign(run, args, self._batch_rows, kwargs)

    def _run_head(self, module: nn.Module, original: Callable[..., Any], hidden: Tensor) -> Any:  # noqa: ANN401
        """Run the output head on the selected positions only, for the selected vocabulary entries only."""
        if self._selection is None:
            return self._run(module, original, hidden)
        selection = _repeat_selection(self._selection, self._batch_rows, len(self._signs()))
        hidden = hidden[selection.rows, selection.positions]
        rows, self._batch_rows = self._batch_rows, hidden.shape[0] // len(self._signs())
        try:
            if selection.vocabulary is None:
                return self._run(module, original, hidden)
            if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
                return self._run(module, original, hidden)[:, selection.vocabulary]
            return self._run_head_entries(module, hidden, selection.vocabulary)
        finally:
            self._batch_rows = rows

    def _run_head_entries(self, module: nn.Linear, hidden: Tensor, entries: Tensor) -> Any:  # noqa: ANN401
        active = self._active(module)
        if not active:
            bias = module.bias
            return F.linear(hidden, module.weight[entries], None if bias is None else bias[entries])
        signs = self._signs()
        weights = (
            self._rows(active["weight"], entries, signs)
            if "weight" in active
            else (module.weight[entries],) * len(signs)
        )
        biases = self._copies({"bias": active["bias"]})["bias"] if "bias" in active else None

        def run(sign: Sign, hidden: Tensor) -> Tensor:
            logits = F.linear(hidden, weights[signs.index(sign)])
            if module.bias is None:
                return logits
            return logits + (module.bias if biases is None else biases[sign])[entries]

        return self._by_sign(run, (hidden,), self._batch_rows)

    def _signs(self) -> tuple[Sign, ...]:
        if self._perturbation is None:
            return (Sign.PLUS,)
        sign = self._perturbation.sign
        return (Sign.PLUS, Sign.MINUS) if sign is Sign.BOTH else (sign,)

    def _copies(self, active: Mapping[str, nn.Parameter]) -> dict[str, dict[Sign, Tensor]]:
        """Return the perturbed copies of each parameter, by sign; those of one dimension in float32.

        Around 1.0 a 16-bit LayerNorm weight is too coarse to hold theta + mu z.
        """
        state = self._perturbation
        assert state is not None
        signs = self._signs()
        scales = [state.scale * sign.value for sign in signs]
        copies: dict[str, dict[Sign, Tensor]] = {}
        for name, parameter in active.items():
            dtype = torch.float32 if parameter.dim() == 1 else parameter.dtype
            parameter_id = self._trainable[parameter].parameter_id
            perturbed = self._noise.perturb(parameter.data, state.seed, parameter_id, scales, dtype)
            copies[name] = dict(zip(signs, perturbed, strict=True))
        return copies

    def _rows(self, table: nn.Parameter, rows: Tensor, signs: Sequence[Sign]) -> tuple[Tensor, ...]:
        """Return the given rows of the perturbed table, for each sign; rows of any shape."""
        state = self._perturbation
        assert state is not None
        flat, width = rows.reshape(-1), table.shape[-1]
        parameter_id = self._trainable[table].parameter_id
        scales = [state.scale * sign.value for sign in signs]
        found = self._noise.perturb_rows(table.data, flat, state.seed, parameter_id, scales)
        return tuple(tensor.view(*rows.shape, width) for tensor in found)

    def _by_sign(
        self,
        run: Callable[..., Any],
        args: Sequence[Any],
        rows: int,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call run(sign, ...) for each sign on its share of the arguments; concatenate the outputs."""
        signs = self._signs()
        if len(signs) == 1:
            return run(signs[0], *args, **(kwargs or {}))
        outputs = []
        for index, sign in enumerate(signs):
            half = partial(_half, index=index, rows=rows)
            half_args = [_map_tensors(half, value) for value in args]
            half_kwargs = {name: _map_tensors(half, value) for name, value in (kwargs or {}).items()}
            with self._with_sign(sign):
                outputs.append(run(sign, *half_args, **half_kwargs))
        return _concatenate(outputs)

    @contextmanager
    def _with_sign(self, sign: Sign) -> Iterator[None]:
        """Modules inside a module that already runs on one half of the batch see that sign only."""
        state = self._perturbation
        assert state is not None
        self._perturbation = replace(state, sign=sign)
        try:
            yield
        finally:
            self._perturbation = state


def _repeat_selection(selection: LogitSelection, rows: int, copies: int) -> LogitSelection:
    """Return the selection of the same logits from each copy of a batch of `rows` sequences."""
    return LogitSelection(
        torch.cat([selection.rows + rows * copy for copy in range(copies)]),
        torch.cat([selection.positions] * copies),
        selection.vocabulary,
    )


def _half(value: Any, index: int, rows: int) -> Any:  # noqa: ANN401
    """Return one half of a batched tensor: 2 * rows, or 2 * rows * tokens, along its first dimension.

    What is the same for all sequences ([1, tokens] position ids, [1, 1, tokens, tokens] masks) is repeated.
    In one dimension a batch cannot be told from as many tokens, so that is refused.
    """
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.dim() > 1 and value.shape[0] == 1:
        return value.expand(rows, *value.shape[1:])
    if value.dim() > 1 and value.shape[0] % (2 * rows) == 0:
        return value.chunk(2)[index]
    raise UserError(
        "a module with tunable parameters is given a tensor without a batch dimension of its own",
        got=f"shape {tuple(value.shape)}",
        expected=f"two dimensions or more, the first {2 * rows} (or a multiple): the batch, twice",
        fix="set zo.forward=two_pass for this model",
    )


def _map_tensors(function: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401
    # Nearly all values are tensors, and tree_map alone would take a fifth of the host's time of a step.
    return function(value) if isinstance(value, Tensor) else tree_map(function, value)


def _concatenate(outputs: Sequence[Any]) -> Any:  # noqa: ANN401
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs))
    leaves, structure = zip(*(tree_flatten(output) for output in outputs), strict=True)
    pairs = zip(*leaves, strict=True)
    merged = [torch.cat(pair) if isinstance(pair[0], Tensor) else pair[0] for pair in pairs]
    return tree_unflatten(merged, structure[0])


def _call_with(
    module: nn.Module,
    original: Callable[..., Any],
    copies: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:  # noqa: ANN401
    """Call a module with perturbed copies in the place of its parameters.

    Copies of one dimension are float32. In 16-bit models a module that holds nothing else (a norm) then runs
    in float32, and the bias of a linear module is added in float32; the output is cast back. In any other
    16-bit module they are cast too: what is done with them is not known.
    """
    dtype = next(parameter.dtype for name, parameter in _parameters(module).items() if name in copies)
    if dtype == torch.float32:
        return _call_replaced(module, original, copies, args, kwargs)
    if _holds_only_vectors(module):
        vectors = {name: parameter.float() for name, parameter in _parameters(module).items()}
        args, kwargs = _cast_floats((list(args), dict(kwargs)), torch.float32)
        output = _call_replaced(module, original, vectors | dict(copies), args, kwargs)
        return _cast_floats(output, dtype)
    cast = {name: copy.to(dtype) for name, copy in copies.items()}
    if type(module).forward in _BIAS_LAST and "bias" in copies:
        without_bias = cast | {"bias": torch.zeros_like(cast["bias"])}
        output = _call_replaced(module, original, without_bias, args, kwargs)
        return (output + copies["bias"]).to(dtype)  # the sum of a 16-bit and a float32 tensor is float32
    return _call_replaced(module, original, cast, args, kwargs)


def _call_replaced(
    module: nn.Module,
    original: Callable[..., Any],
    replacements: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:  # noqa: ANN401
    stored = {name: module._parameters[name] for name in replacements}
    try:
        for name, tensor in replacements.items():
            module._parameters[name] = tensor  # type: ignore[assignment]  # not a Parameter: it goes below
        return original(*args, **kwargs)
    finally:
        module._parameters.update(stored)


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def _holds_only_vectors(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    return not has_children and all(parameter.dim() == 1 for parameter in _parameters(module).values())


def _cast_floats(values: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    def cast(value: Any) -> Any:  # noqa: ANN401
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, values)
