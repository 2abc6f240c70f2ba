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
from collections.abc import Callable, Sequence
from functools import cache, partial
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
        self._rank = directions.law.rank
        probes = perturbation.probes
        keys = np.array([probe.keys for probe in probes], dtype=np.uint64)  # [probes, groups]
        different = list(dict.fromkeys(keys.ravel().tolist()))
        is_own = torch.from_numpy(keys[..., None] == np.array(different, dtype=np.uint64))
        scales = torch.tensor([probe.scale for probe in probes], dtype=torch.float64)
        self._scale = float(scales.abs().max())
        signs = scales / (self._scale or 1.0)  # +1 or -1 if all scales are equal
        of_groups = torch.where(is_own, signs[:, None, None], 0.0)  # [probes, groups, directions]
        # Neither has `self`, so that all is freed with the last reference to it.
        self._signs_of = cache(partial(_signs_of_tokens, of_groups, self._rank, batch))
        self._vectors: Callable[..., tuple[Tensor, Tensor]]
        self._vectors = partial(_vectors, directions, different, batch.device)
        if batch.prompts is not None:
            self._vectors = cache(self._vectors)

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
        of_inputs, of_outputs = self._vectors(place.trained, isinstance(module, Conv1D))
        flat = inputs.reshape(-1, inputs.shape[-1])
        through = flat @ of_inputs.t()  # [N, directions * rank]
        current = self.state.current
        num_tokens = current.num_copies * current.rows * current.tokens
        if len(flat) != num_tokens:
            raise UserError(
                f"a {type(module).__name__} of this model runs on {len(flat)} of {num_tokens} "
                "tokens, and zo.noise_rank needs all",
                fix="set zo.noise_rank=0",
            )
        through *= self._signs_of(current.rows, current.tokens, through.dtype)
        scale = self._scale / math.sqrt(self._rank)

        def add_thin_products(output: Tensor) -> None:
            flat_output = output.view(-1, output.shape[-1])
            flat_output.addmm_(through, of_outputs, alpha=scale)

        return add_before_sum(module, own_forward, inputs, add_thin_products)


def _vectors(
    directions: LowRankDirections,
    keys: Sequence[int],
    device: torch.device,
    weight: TrainedParameter,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """Return the vectors of all directions that meet inputs, and those that meet outputs.

    Each is [directions * rank, inputs or outputs of this rank], in the dtype of the model.
    """
    dtype = weight.parameter.dtype
    of_rows, of_columns = directions.vectors(weight.elements, keys, device)
    vectors = of_columns.to(dtype), of_rows.to(dtype)
    # A weight may be stored as [inputs, outputs].
    return vectors[::-1] if transposed else vectors


def _signs_of_tokens(
    of_groups: Tensor,
    rank: int,
    batch: MicroBatch,
    num_rows: int,
    tokens_of_row: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return which directions the tokens of all copies have: [tokens, directions * rank].

    An entry is the sign of the token's probe where the column is of the token's direction, and 0
    elsewhere.

    Args:
        of_groups: the same by probe and group, [probes, groups, directions].
        rank: of the directions.
        batch: of one copy.
        num_rows: number of rows of one copy in this call of the model.
        tokens_of_row: number of tokens in each row of this call.
        dtype: of the result.
    """
    num_groups = of_groups.shape[1]
    examples = batch.token_examples
    if num_groups == 1 or examples is None:
        # Examples have equally many rows each, one after the other.
        groups = group_of(torch.arange(num_rows), num_rows, num_groups)[:, None]
    else:
        groups = group_of(examples, int(examples.max()) + 1, num_groups)
    of_directions = of_groups[:, groups.expand(-1, tokens_of_row)].flatten(0, 2)
    return of_directions.repeat_interleave(rank, dim=1).to(batch.device, dtype)
