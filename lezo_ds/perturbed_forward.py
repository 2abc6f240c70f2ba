"""Forward passes at theta + mu z and theta - mu z that leave the stored weights alone.

Every module that directly owns parameters gets its `forward` wrapped. While a perturbation is set, the wrapper
computes the perturbed copies of the module's active parameters out of place, runs the module with them, and
drops them: nothing is restored, so nothing drifts. Under ZeRO-3 the wrapper runs between DeepSpeed's hooks,
which gather the module's parameters before it and release them after it.

In the dual forward the batch is doubled, [x; x]: a module with active parameters runs twice, on the first half
with theta + mu z and on the second with theta - mu z, from one gather and one draw of z; every other module
runs once over the doubled batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lezo_ds.batch import LogitSelection, MicroBatch
from lezo_ds.errors import UserError
from lezo_ds.noise import NoiseBackend


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


@dataclass(frozen=True)
class NamedParameter:
    """A trainable parameter, its noise stream and its place: `block` is None outside all blocks."""

    name: str
    parameter_id: int
    block: int | None


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
        self._takes_position_ids = "position_ids" in inspect.signature(model.forward).parameters
        get_head = getattr(model, "get_output_embeddings", None)
        self._head: nn.Module | None = get_head() if get_head else None
        for module in model.modules():
            if module is self._head or any(p in trainable for p in module.parameters(recurse=False)):
                self._wrap(module)

    def __call__(
        self, batch: MicroBatch, perturbation: Perturbation | None, call: Callable[..., Any]
    ) -> tuple[Tensor, ...]:
        """Run one forward pass.

        Args:
            batch: R sequences and the logits wanted of them.
            perturbation: None to run at theta itself.
            call: runs the model on keyword arguments (DeepSpeed's engine, or the model).

        Returns:
            The logits: (at theta + mu z, at theta - mu z) for Sign.BOTH, one tensor otherwise.
        """
        copies = 2 if perturbation is not None and perturbation.sign is Sign.BOTH else 1
        inputs = self._inputs(batch, copies)
        rows = next(iter(batch.inputs.values())).shape[0]
        with self._running(perturbation, _repeat_selection(batch.selection, rows, copies), rows):
            output = call(**inputs)
        return tuple(output.logits.chunk(copies))

    def _inputs(self, batch: MicroBatch, copies: int) -> dict[str, Tensor]:
        inputs = dict(batch.inputs)
        if self._takes_position_ids and "position_ids" not in inputs and "attention_mask" not in inputs:
            # Models make [1, tokens] position ids on their own; a perturbed position table needs a row a sequence.
            rows, tokens = inputs["input_ids"].shape
            inputs["position_ids"] = torch.arange(tokens, device=inputs["input_ids"].device).expand(rows, tokens)
        return {name: torch.cat([value] * copies) for name, value in inputs.items()}

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

        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return run(module, original, *args, **kwargs)

        module.forward = forward

    def _active(self, module: nn.Module) -> dict[str, nn.Parameter]:
        if self._perturbation is None:
            return {}
        dropped = self._perturbation.dropped_layers
        return {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter in self._trainable and self._trainable[parameter].block not in dropped
        }

    def _run(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        active = self._active(module)
        if not active:
            return original(*args, **kwargs)
        if type(module).forward is nn.Embedding.forward:
            (table,) = active.values()
            return self._by_sign(lambda sign, input: self._rows(table, input, (sign,))[0], args, self._batch_rows, kwargs)
        copies = self._copies(active)

        def run(sign: Sign, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return _call_with(module, original, {n: pair[sign] for n, pair in copies.items()}, args, kwargs)

        return self._by_sign(run, args, self._batch_rows, kwargs)

    def _run_head(self, module: nn.Module, original: Callable[..., Any], hidden: Tensor) -> Any:  # noqa: ANN401
        """Run the output head on the selected positions only, for the selected vocabulary entries only."""
        selection = self._selection
        if selection is None:
            return self._run(module, original, hidden)
        hidden = hidden[selection.rows, selection.positions]
        rows, self._batch_rows = self._batch_rows, hidden.shape[0] // len(self._signs())
        try:
            if selection.vocabulary is None:
                return self._run(module, original, hidden)
            if type(module).forward is not nn.Linear.forward:
                return self._run(module, original, hidden)[:, selection.vocabulary]
            return self._run_head_entries(module, hidden, selection.vocabulary)
        finally:
            self._batch_rows = rows

    def _run_head_entries(self, module: nn.Module, hidden: Tensor, entries: Tensor) -> Any:  # noqa: ANN401
        active = self._active(module)
        if not active:
            bias = module.bias
            return F.linear(hidden, module.weight[entries], None if bias is None else bias[entries])
        signs = self._signs()
        weights = (
            self._rows(module.weight, entries, signs)
            if "weight" in active
            else (module.weight[entries],) * len(signs)
        )
        biases = self._copies({"bias": module.bias})["bias"] if "bias" in active else None

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
        copies: dict[str, dict[Sign, Tensor]] = {}
        for name, parameter in active.items():
            dtype = torch.float32 if parameter.dim() == 1 else parameter.dtype
            key = (state.seed, self._trainable[parameter].parameter_id)
            if state.sign is Sign.BOTH:
                plus, minus = self._noise.perturb_pair(parameter.data, *key, state.scale, dtype)
                copies[name] = {Sign.PLUS: plus, Sign.MINUS: minus}
            else:
                scale = state.scale * state.sign.value
                copies[name] = {state.sign: self._noise.perturb(parameter.data, *key, scale, dtype)}
        return copies

    def _rows(self, table: nn.Parameter, rows: Tensor, signs: Sequence[Sign]) -> tuple[Tensor, ...]:
        """Return the given rows of the perturbed table, for each sign; rows of any shape."""
        state = self._perturbation
        assert state is not None
        flat, width = rows.reshape(-1), table.shape[-1]
        key = (state.seed, self._trainable[table].parameter_id)
        if len(signs) == 2:
            found = self._noise.perturb_rows_pair(table.data, flat, *key, state.scale)
        else:
            found = (self._noise.perturb_rows(table.data, flat, *key, state.scale * signs[0].value),)
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
            half_args, half_kwargs = tree_map(lambda value: _half(value, index, rows), (list(args), dict(kwargs or {})))  # noqa: B023
            with self._with_sign(sign):
                outputs.append(run(sign, *half_args, **half_kwargs))
        return _concatenate(outputs)

    @contextmanager
    def _with_sign(self, sign: Sign) -> Iterator[None]:
        """Modules inside a module that already runs on one half of the batch see that sign only."""
        state = self._perturbation
        assert state is not None
        self._perturbation = Perturbation(state.seed, state.scale, state.dropped_layers, sign)
        try:
            yield
        finally:
            self._perturbation = state


def _repeat_selection(selection: LogitSelection | None, rows: int, copies: int) -> LogitSelection | None:
    if selection is None or copies == 1:
        return selection
    return LogitSelection(
        torch.cat([selection.rows, selection.rows + rows]),
        torch.cat([selection.positions] * 2),
        selection.vocabulary,
    )


def _half(value: Any, index: int, rows: int) -> Any:  # noqa: ANN401
    """Return one half of a batched tensor of the doubled batch: 2 * rows (* tokens) along its first dimension."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape[0] % (2 * rows) == 0:
        return value.chunk(2)[index]
    if value.shape[0] == 1:
        return value.expand(rows, *value.shape[1:])
    raise UserError(
        "a module with tunable parameters is given a tensor without a batch dimension of its own",
        got=f"shape {tuple(value.shape)}",
        expected=f"a first dimension of {2 * rows} (or a multiple): the batch, twice",
        fix="set zo.forward=two_pass for this model",
    )


def _concatenate(outputs: Sequence[Any]) -> Any:  # noqa: ANN401
    leaves, structure = zip(*(tree_flatten(output) for output in outputs), strict=True)
    merged = [torch.cat(pair) if isinstance(pair[0], Tensor) else pair[0] for pair in zip(*leaves, strict=True)]
    return tree_unflatten(merged, structure[0])


def _call_with(
    module: nn.Module,
    original: Callable[..., Any],
    copies: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:  # noqa: ANN401
    """Call a module with perturbed copies in the place of its parameters.

    Copies of one dimension are float32. In 16-bit models a module that owns nothing else (a norm) then runs in
    float32, and a bias beside a matrix is added in float32; the output is cast back.
    """
    stored = {name: module._parameters[name] for name in copies}
    dtype = next(p.dtype for p in stored.values() if p is not None)
    replacements, late_bias = dict(copies), None
    only_vectors = all(p is None or p.dim() == 1 for p in module._parameters.values())
    if dtype != torch.float32:
        if only_vectors:
            args, kwargs = _cast_floats((list(args), dict(kwargs)), torch.float32)
        elif set(module._parameters) == {"weight", "bias"} and "bias" in copies:
            late_bias = copies["bias"]
            replacements["bias"] = torch.zeros_like(late_bias, dtype=dtype)
        else:
            replacements = {name: copy.to(dtype) for name, copy in copies.items()}
    try:
        for name, copy in replacements.items():
            module._parameters[name] = copy  # type: ignore[assignment]  # not a Parameter: it is dropped below
        output = original(*args, **kwargs)
    finally:
        module._parameters.update(stored)
    if late_bias is not None:
        output = output.float() + late_bias
    return output if dtype == torch.float32 else _cast_floats(output, dtype)


def _cast_floats(values: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    return tree_map(
        lambda value: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value, values
    )
