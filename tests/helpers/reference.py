"""Zeroth-order training in plain PyTorch: one process, one pass for each probe, no DeepSpeed.

Nothing of the engine is used but the noise and the dither. The steps of MeZO (Malladi et al. 2023,
Algorithm 1) and LeZO (Wang et al. 2024, Algorithm 1) are written out again, on float32 weights.
"""

from __future__ import annotations

import math
import re
import statistics

import torch
from eager_noise import draw, round_stochastic
from torch.nn import functional as F

from lezo_ds.noise.philox import DITHER_STREAM, words_at
from lezo_ds.sharding.parameters import parameter_ids
from lezo_ds.zo.keys import direction_key


class Reference:
    """A model of transformers in float32 and its zeroth-order optimizer. `own_name` names noise.

    With a `rank`, directions are of low rank, and only the matrices of the blocks are trained.
    """

    def __init__(
        self,
        model,
        dtype,
        precision,
        distribution="normal",
        own_name=str,
        rank=0,
    ):
        self.rank = rank
        if rank:
            for name, parameter in model.named_parameters():
                if parameter.dim() != 2 or "layers." not in name:
                    parameter.requires_grad_(False)
        self.dtype, self.precision, self.distribution = dtype, precision, distribution
        self.model = model.eval()
        self.model.config.use_cache = False
        self.num_blocks = model.config.num_hidden_layers
        named = {own_name(name): parameter for name, parameter in model.named_parameters()}
        ids = parameter_ids(named)
        self.parameters = {
            name: parameter for name, parameter in named.items() if parameter.requires_grad
        }
        self.ids = {name: ids[name] for name in self.parameters}
        self.values = {
            name: self._stored_as_float(p.detach()) for name, p in self.parameters.items()
        }
        for parameter in self.model.parameters():  # and no buffers, such as frequencies
            parameter.data = parameter.data.to(dtype)
        self.wide = set()
        for path, module in self.model.named_modules():
            if _is_norm(module):
                _run_in_the_dtype_of_vectors(module)
                own = module.named_parameters(recurse=False)
                self.wide.update(own_name(f"{path}.{name}") for name, _ in own)

    def losses_of_groups(self, batch, key, probes, dropped_blocks, size):
        """Return, for each group of `size` examples, the losses of its own directions."""
        num_directions = 1 + max(direction for direction, _ in probes)
        num_examples = sum(micro_batch.weight for micro_batch in batch)
        groups = []
        for group, first in enumerate(range(0, num_examples, size)):
            own = [(group * num_directions + direction, scale) for direction, scale in probes]
            examples = slice(first, first + size)
            groups.append(self.losses(batch, key, own, dropped_blocks, examples))
        return groups

    @torch.no_grad()
    def losses(self, batch, key, probes, dropped_blocks=(), examples=slice(None)):
        """Return the mean loss over a step's batch, or some of its examples, at theta + scale z of
        each (direction, scale)."""
        losses = []
        for direction, scale in probes:
            for name, parameter in self.parameters.items():
                parameter.data = self._stored(name)
                if _block(name, self.num_blocks) not in dropped_blocks:
                    wide = parameter.data.float() + scale * self._noise(
                        name, direction_key(key, direction)
                    )
                    # Vectors of norms stay in float32: a 16-bit 1.0 has no room for mu z.
                    parameter.data = wide if name in self.wide else wide.to(self.dtype)
            of_micro_batches = list(map(self._losses, batch))
            if examples == slice(None):
                total = sum(float(each.sum()) for each in of_micro_batches)
                losses.append(total / sum(micro_batch.weight for micro_batch in batch))
            else:
                losses.append(float(torch.cat(of_micro_batches)[examples].mean()))
        return losses

    def update(self, record, weight_decay=0.0):
        """Do the step that a record describes."""
        share = record.learning_rate / len(record.projected_grads)
        for name, value in self.values.items():
            block = _block(name, self.num_blocks)
            if block in record.dropped_layers:
                continue
            weight = record.layer_weights[block] if record.layer_weights else 1.0
            factor = 1 - record.learning_rate * weight_decay if value.dim() > 1 else 1.0
            if self.rank:
                delta = torch.zeros_like(value)
                for direction, gradient in enumerate(record.projected_grads):
                    coefficient = share * gradient * weight / math.sqrt(self.rank)
                    key = direction_key(record.key, direction)
                    for a, b in self._vectors(name, key):
                        delta = delta + (coefficient * a)[:, None] * b
                value = value * factor - delta
                self.values[name] = self._stored_as_float(value, name, record.key)
                continue
            for direction, gradient in enumerate(record.projected_grads):
                key = direction_key(record.key, direction)
                value = value * factor - share * gradient * weight * self._noise(name, key)
                value = self.values[name] = self._stored_as_float(value, name, key)
                factor = 1.0

    def stored(self):
        """Return the trained weights as they are stored, by name."""
        return {name: self._stored(name) for name in self.values}

    def _vectors(self, name, key):
        """Yield the vectors a and b of a direction of low rank."""
        num_rows, num_columns = self.values[name].shape
        for place in range(self.rank):
            a = draw(self.distribution, key, self.ids[name], place * num_rows, num_rows)
            first = 2**39 + place * num_columns
            yield a, draw(self.distribution, key, self.ids[name], first, num_columns)

    def _noise(self, name, key):
        if self.rank:
            products = [torch.outer(a, b) for a, b in self._vectors(name, key)]
            return sum(products) / math.sqrt(self.rank)
        shape = self.values[name].shape
        return draw(self.distribution, key, self.ids[name], 0, shape.numel()).view(shape)

    def _stored(self, name):
        return _nearest(self.values[name], self.dtype, self.precision)

    def _stored_as_float(self, value, name=None, key=None):
        """Return what remains of a float32 value once it is stored."""
        if self.dtype == torch.float32:
            return value.clone()
        if self.precision == "fp32_master":
            # The low bits of bf16 are exact, those of fp16 in units of 2**-39 below 2**-14.
            exact = (
                value.clone()
                if self.dtype == torch.bfloat16
                else (value.double() * 2**39).round() / 2**39
            )
            return exact.float()
        if self.precision == "stochastic" and key is not None:
            dither = words_at(key, self.ids[name], torch.arange(value.numel()), DITHER_STREAM)
            return round_stochastic(
                value.contiguous(), dither.view(value.shape), self.dtype
            ).float()
        return value.to(self.dtype).float()

    def _losses(self, batch):
        """Return the cross-entropy over the candidates of each example, in float64.

        Only the logits asked for are computed: the last bits of a matrix product depend on its
        shape.
        """
        hidden = self.model.base_model(**batch.inputs).last_hidden_state
        asked = hidden[batch.selection.rows, batch.selection.positions]
        logits = F.linear(
            asked, self.model.get_output_embeddings().weight[batch.selection.vocabulary]
        )
        return F.cross_entropy(logits.float(), batch.labels["label"], reduction="none").double()


def probes_of(estimator, scale, directions):
    """Return the (direction, scale) of each probe of a step."""
    if estimator in ("spsa", "grzo"):
        return [(direction, sign * scale) for direction in range(directions) for sign in (1, -1)]
    at_theta = [] if estimator == "evolution-strategies" else [(0, 0.0)]
    return at_theta + [(direction, scale) for direction in range(directions)]


def estimate_groups(estimator, scale, losses):
    """Return the loss and the projected gradients of all groups of examples, group by group.

    See lezo_ds.zo for the papers. All groups have equally many examples.
    """
    if estimator == "evolution-strategies":
        means = [statistics.fmean(of_group) for of_group in losses]
        gradients = [
            loss - mean for of_group, mean in zip(losses, means, strict=True) for loss in of_group
        ]
        spread = math.hypot(*gradients) / math.sqrt(len(gradients))
        return statistics.fmean(means), [gradient / spread for gradient in gradients]
    if estimator in ("fzoo", "one-sided"):
        unit = scale
        if estimator == "fzoo":
            variances = [statistics.variance(sides) for _, *sides in losses]
            unit = math.sqrt(statistics.fmean(variances))
        gradients = [(side - base) / unit for base, *sides in losses for side in sides]
        return statistics.fmean(base for base, *_ in losses), gradients
    flat = [loss for of_group in losses for loss in of_group]
    sides = zip(flat[::2], flat[1::2], strict=True)
    gradients = [(plus - minus) / (2 * scale) for plus, minus in sides]
    if estimator == "grzo":
        spread = statistics.stdev(gradients)
        gradients = [gradient / spread for gradient in gradients]
    return statistics.fmean(flat), gradients


def _block(name, num_blocks):
    """Return the index of a parameter's transformer block, or of its group outside the blocks."""
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else num_blocks + ("embed" not in name)


def _nearest(values, dtype, precision):
    """Round float32 values to the nearest of `dtype`; with low bits in bf16, ties go away from
    zero."""
    if dtype == torch.bfloat16 and precision == "fp32_master":
        return (
            ((values.contiguous().view(torch.int32) + 0x8000) >> 16)
            .to(torch.int16)
            .view(torch.bfloat16)
        )
    return values.to(dtype)


def _is_norm(module):
    own = list(module.parameters(recurse=False))
    return len(own) > 0 and all(parameter.dim() == 1 for parameter in own)


def _run_in_the_dtype_of_vectors(norm):
    """Let a norm whose perturbed vectors are wider than its input compute with all their bits."""
    original = norm.forward

    def forward(hidden):
        return original(hidden.to(norm.weight.dtype)).to(hidden.dtype)

    norm.forward = forward
