"""Computes only the logits that are wanted: a model's output head is the largest matrix of a short batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lezo_ds.errors import UserError
from lezo_ds.forward.batch import LogitSelection
from lezo_ds.forward.perturbed_modules import PerturbedModules


class SelectiveHead:
    """A model's output head, which computes the selected positions and vocabulary entries only.

    Args:
        model: its output head's `forward` is replaced, if it has one.
        modules: of the model; the head may be one of those that are perturbed.
    """

    def __init__(self, model: nn.Module, modules: PerturbedModules) -> None:
        self._model_name = type(model).__name__
        self._modules = modules
        self._selection: LogitSelection | None = None
        get_head = getattr(model, "get_output_embeddings", None)
        self._head: nn.Module | None = get_head() if get_head else None
        if self._head is not None:
            self._wrap(self._head)

    @contextmanager
    def selecting(self, selection: LogitSelection | None) -> Iterator[None]:
        """Compute the selected logits of each copy of the batch; None computes all.

        Raises:
            UserError: the model has no output head.
        """
        if selection is not None and self._head is None:
            raise UserError(
                f"{self._model_name} names no output head",
                got="a model without get_output_embeddings()",
                expected="a causal language model",
                fix="set model.path to a causal language model",
            )
        self._selection = selection
        try:
            yield
        finally:
            self._selection = None

    def _wrap(self, head: nn.Module) -> None:
        original = head.forward  # the perturbed one, if the head is trainable

        @wraps(original)
        def forward(hidden: Tensor) -> Any:  # noqa: ANN401
            if self._selection is None:
                return original(hidden)
            return self._run(head, original, hidden, self._selection)

        head.forward = forward

    def _run(
        self, head: nn.Module, original: Callable[..., Any], hidden: Tensor, selection: LogitSelection
    ) -> Any:  # noqa: ANN401
        # The head may run inside a module that already runs on one copy of the batch.
        num_copies = self._modules.num_copies
        rows_of_copy = hidden.shape[0] // num_copies
        rows = torch.cat([selection.rows + rows_of_copy * copy for copy in range(num_copies)])
        hidden = hidden[rows, selection.positions.repeat(num_copies)]
        with self._modules.running_on_rows(len(selection.rows)):
            if selection.vocabulary is None:
                return original(hidden)
            if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
                return original(hidden)[:, selection.vocabulary]
            run = partial(self._run_entries, head, selection.vocabulary)
            return self._modules.for_each_pair(run, (hidden,))

    def _run_entries(self, head: nn.Linear, entries: Tensor, hidden: Tensor) -> Any:  # noqa: ANN401
        """Run a linear head for some vocabulary entries: only their rows of its weight are perturbed."""
        active = self._modules.active(head)
        if not active:
            bias = head.bias
            return F.linear(hidden, head.weight[entries], None if bias is None else bias[entries])
        num_copies = self._modules.num_copies
        biases: Sequence[Tensor] = [head.bias] * num_copies
        weights: Sequence[Tensor]
        if "weight" in active:
            weights = self._modules.rows_of_copies(active["weight"], entries)
        else:
            weights = [head.weight[entries]] * num_copies
        if "bias" in active:
            biases = self._modules.copies(active["bias"])

        def run(index: int, hidden: Tensor) -> Tensor:
            logits = F.linear(hidden, weights[index])
            return logits if head.bias is None else logits + biases[index][entries]

        return self._modules.for_each_probe(run, (hidden,))
