"""Directions of low rank: all rows share one product with W, and add thin products to it.

Each token of a pass has a direction d and a scale: those of its probe, and of the group of its
example. With a [rank, outputs] and b [rank, inputs] of each direction:

    x [N, inputs] --W--------------------------------> y [N, outputs]
      |                                                ^ + mu rank^-1/2 * t a
      --all b--> t [N, directions * rank] --of its own direction only, with its sign--

No weight is copied, so the number of probes of a pass is limited by activations alone.

A step's terms are the outer products of all its directions, direction by direction. For the
elements (i, j) of a matrix that a rank stores, an update needs a[i] and b[j] of each term:

             columns 3 to 5                b  [terms, 3]
             |  |  |
    row 1  . x  x  x     a [terms, 2]      delta[i, j] = sum over terms t of u[t, i] * b[t, j]
    row 2  . x  x  x                       u[t, i]     = coefficient[t] * a[t, i]

Every product and every sum is rounded to fp32 on its own, in the order of the terms. So all
programs and all layouts give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.forward.directions import Directions, PassState, Perturber
from lezo_ds.forward.probes import Args, Forward, Kwargs, Perturbation, Place, TrainedParameter
from lezo_ds.noise import Elements, Region, UpdateTarget
from lezo_ds.sharding.tensor_parallel import add_before_sum
from lezo_ds.zo.laws import FIRST_OF_COLUMNS
from lezo_ds.zo.passes import group_of
from lezo_ds.zo.updates import Update, UpdatePrecision


class LowRankDirections(Directions):
    """z of a matrix is a sum of outer products."""

    runs_linear_modules = True

    def start_pass(
        self, state: PassState, perturbation: Perturbation, batch: MicroBatch
    ) -> Perturber:
        return LowRankPerturber(state, self, perturbation, batch)

    def vectors(
        self, elements: Elements, keys: Sequence[int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return a and b of each direction, without the factor rank^-1/2.

        Args:
            elements: of a matrix. They lie in some rows and columns of it.
            keys: of the directions.
            device: of the result.

        Returns:
            a, fp32 [len(keys) * rank, rows]; b, fp32 [len(keys) * rank, columns].
        """
        rank = self.law.rank
        num_rows, num_columns = elements.shape
        rows, columns = elements.rows_and_columns()
        first_column = FIRST_OF_COLUMNS + columns.start
        of_rows = Region(rows.start, rank, len(rows), num_rows)
        of_columns = Region(first_column, rank, len(columns), num_columns)
        kernels = self.kernels_of(device)
        draw = partial(kernels.draw, self.law.entries, elements.parameter_id, keys)
        return draw(of_rows), draw(of_columns)

    def update(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        """Apply updates: theta * factor - delta for each step, which is rounded once."""
        device = targets[0].values.device
        kernels = self.kernels_of(device)
        rank = self.law.rank
        for step in _steps(updates):
            keys = [update.key for update in step]
            of_directions = [update.coefficient / math.sqrt(rank) for update in step]
            of_terms = torch.tensor(of_directions, dtype=torch.float32).repeat_interleave(rank)
            # They go to the device once: a copy from the host waits for the GPU.
            coefficients = of_terms[:, None].to(device)
            for target in targets:
                a, b = self.vectors(target.elements, keys, device)
                u = a * coefficients
                kernels.subtract(target, u, b, step[0], precision)


def _steps(updates: Sequence[Update]) -> list[list[Update]]:
    """Return the updates of each step."""
    steps: list[list[Update]] = []
    for update in updates:
        if update.begins_step or not steps:
            steps.append([])
        steps[-1].append(update)
    return steps


class LowRankPerturber(Perturber):
    """Adds thin products to the outputs of linear modules.

    The vectors of a module are drawn when it runs. While a model writes answers, they stay to the
    last token.
    """

    def __init__(
        self,
        state: PassState,
        directions: LowRankDirections,
        perturbation: Perturbation,
        batch: MicroBatch,
    ) -> None:
        super().__init__(state)
        self._vectors_of = partial(directions.vectors, device=batch.device)
        self._rank = directions.law.rank
        probes = perturbation.probes
        keys = np.array([probe.keys for probe in probes], dtype=np.uint64)  # [probes, groups]
        self._keys = list(dict.fromkeys(keys.ravel().tolist()))
        is_own = torch.from_numpy(keys[..., None] == np.array(self._keys, dtype=np.uint64))
        scales = torch.tensor([probe.scale for probe in probes], dtype=torch.float64)
        self._scale = float(scales.abs().max())
        signs = scales / (self._scale or 1.0)  # +1 or -1 if all scales are equal
        self._signs = torch.where(is_own, signs[:, None, None], 0.0)  # [probes, groups, directions]
        self._keeps_vectors = batch.prompts is not None
        self._token_examples = batch.token_examples
        # By rows of a copy, and tokens of a row.
        self._signs_of_tokens: dict[tuple[int, int], Tensor] = {}
        self._kept: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}

    def run_module(
        self,
        module: nn.Module,
        own_forward: Forward,
        active: Sequence[Place],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        (place,) = active  # `blocks.freeze_all_but` leaves nothing else
        (inputs,) = [*args, *kwargs.values()]  # nn.Linear calls its argument `input`
        of_inputs, of_outputs = self._vectors(place.trained, transposed=isinstance(module, Conv1D))
        flat = inputs.reshape(-1, inputs.shape[-1])
        through = flat @ of_inputs.t()  # [N, directions * rank]
        through *= self._signs_of(module, len(flat)).to(through.dtype)
        scale = self._scale / math.sqrt(self._rank)

        def add_thin_products(output: Tensor) -> None:
            flat_output = output.view(-1, output.shape[-1])
            flat_output.addmm_(through, of_outputs, alpha=scale)

        return add_before_sum(module, own_forward, inputs, add_thin_products)

    def _vectors(self, weight: TrainedParameter, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """Return the vectors of all directions that meet inputs, and those that meet outputs.

        Each is [directions * rank, inputs or outputs of this rank], in the dtype of the model.
        """
        parameter = weight.parameter
        if parameter in self._kept:
            return self._kept[parameter]
        of_rows, of_columns = self._vectors_of(weight.elements, self._keys)
        vectors = of_columns.to(parameter.dtype), of_rows.to(parameter.dtype)
        if transposed:  # a weight that is stored as [inputs, outputs]
            vectors = vectors[::-1]
        if self._keeps_vectors:
            self._kept[parameter] = vectors
        return vectors

    def _signs_of(self, module: nn.Module, num_tokens: int) -> Tensor:
        """Return which directions each token has: [num_tokens, directions * rank].

        An entry is the sign of the token's probe where the column is of the token's direction, and
        0 elsewhere.
        """
        current = self.state.current
        sizes = (current.rows, current.tokens)
        num_all = current.num_copies * math.prod(sizes)
        if num_tokens != num_all:
            raise UserError(
                f"a {type(module).__name__} of this model runs on {num_tokens} of {num_all} "
                "tokens, and zo.noise_rank needs all",
                fix="set zo.noise_rank=0",
            )
        found = self._signs_of_tokens.get(sizes)
        if found is None:
            groups = self._groups_of_tokens(*sizes)
            of_directions = self._signs[:, groups].reshape(num_tokens, -1)
            of_terms = of_directions.repeat_interleave(self._rank, dim=1)
            found = of_terms.to(next(module.parameters()))
            self._signs_of_tokens[sizes] = found
        return found

    def _groups_of_tokens(self, num_rows: int, tokens_of_row: int) -> Tensor:
        """Return the group of each token of one copy: int64 [num_rows, tokens_of_row]."""
        num_groups = self._signs.shape[1]
        examples = self._token_examples
        if num_groups == 1 or examples is None:
            # Examples have equally many rows each, one after the other.
            groups = group_of(torch.arange(num_rows), num_rows, num_groups)
            return groups[:, None].expand(-1, tokens_of_row)
        num_examples = int(examples.max()) + 1
        groups = group_of(examples, num_examples, num_groups)
        return groups.expand(-1, tokens_of_row)
