"""Zeroth-order training in plain PyTorch: one process, one pass for each probe, no DeepSpeed.

Nothing of the engine is used but the noise and the dither. The steps of MeZO (Malladi et al. 2023,
Algorithm 1) and LeZO (Wang et al. 2024, Algorithm 1) are written out again, on float32 weights.
"""

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
    """A model of transformers in float32 and its zeroth-order optimizer. `own_name` names noise."""

    def __init__(self, model, dtype, precision, distribution="normal", own_name=str):
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

    @torch.no_grad()
    def losses(self, batch, key, probes, dropped_blocks=()):
        """Return the mean loss of a batch at theta + scale z of each (direction, scale)."""
        losses = []
        for direction, scale in probes:
            for name, parameter in self.parameters.items():
                parameter.data = self._stored(name)
                if _block(name, self.num_blocks) not in dropped_blocks:
                    z = self._noise(name, direction_key(key, direction))
                    wide = parameter.data.float() + scale * z
                    # Vectors of norms stay in float32: a 16-bit 1.0 has no room for mu z.
                    parameter.data = wide if name in self.wide else wide.to(self.dtype)
            total = sum(float(self._losses(micro_batch).sum()) for micro_batch in batch)
            losses.append(total / sum(micro_batch.weight for micro_batch in batch))
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
            for direction, gradient in enumerate(record.projected_grads):
                key = direction_key(record.key, direction)
                value = value * factor - share * gradient * weight * self._noise(name, key)
                value = self._stored_as_float(value, name, key)
                factor = 1.0
            self.values[name] = value

    def stored(self):
        """Return the trained weights as they are stored, by name."""
        return {name: self._stored(name) for name in self.values}

    def _noise(self, name, key):
        shape = self.values[name].shape
        return draw(self.distribution, key, self.ids[name], 0, shape.numel()).view(shape)

    def _stored(self, name):
        return _nearest(self.values[name], self.dtype, self.precision)

    def _stored_as_float(self, value, name=None, key=None):
        """Return what remains of a float32 value once it is stored."""
        if self.dtype == torch.float32:
            return value.clone()
        if self.precision == "fp32_master":
            if self.dtype == torch.bfloat16:
                return value.clone()
            # The low bits of fp16 are in units of 2**-39 below 2**-14.
            return ((value.double() * 2**39).round() / 2**39).float()
        if self.precision == "stochastic" and key is not None:
            dither = words_at(key, self.ids[name], torch.arange(value.numel()), DITHER_STREAM)
            dither = dither.view(value.shape)
            return round_stochastic(value.contiguous(), dither, self.dtype).float()
        return value.to(self.dtype).float()

    def _losses(self, batch):
        """Return the cross-entropy over the candidates of each example, in float64.

        Only the logits asked for are computed: the last bits of a matrix product depend on its
        shape.
        """
        hidden = self.model.base_model(**batch.inputs).last_hidden_state
        asked = hidden[batch.selection.rows, batch.selection.positions]
        head = self.model.get_output_embeddings().weight
        logits = F.linear(asked, head[batch.selection.vocabulary])
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
    """Round to the nearest of `dtype`; with low bits in bf16, ties go away from zero."""
    if dtype == torch.bfloat16 and precision == "fp32_master":
        rounded = (values.contiguous().view(torch.int32) + 0x8000) >> 16
        return rounded.to(torch.int16).view(torch.bfloat16)
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
