"""Zeroth-order training in plain PyTorch: one process, two passes, no DeepSpeed; what the engine must equal.

Nothing of the engine is used but `normal`, the noise itself: the steps of MeZO (Malladi et al. 2023,
Algorithm 1) and LeZO (Wang et al. 2024, Algorithm 1) are written out again, on whole float32 weights.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lezo_ds.noise import noise_backend
from lezo_ds.sharding.parameters import parameter_ids


class ReferenceRun:
    """A plain model and its zeroth-order optimizer.

    Args:
        directory: the base model.
        dtype: of the stored weights; with bfloat16 their float32 masters are kept beside them.
        learning_rate: eta.
        scale: mu.
        blocks: dotted name of the list of transformer blocks.
    """

    def __init__(self, directory, dtype, learning_rate, scale, blocks):
        self.dtype = dtype
        self.learning_rate = learning_rate
        self.scale = scale
        self.blocks = blocks
        self.noise = noise_backend(torch.device("cpu"))
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.model.config.use_cache = False
        self.parameters = dict(self.model.named_parameters())
        self.ids = parameter_ids(self.parameters)
        self.masters = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        for module in self.model.modules():
            if type(module) is nn.Linear:
                module.__class__ = _Linear
            if type(module) is nn.LayerNorm:
                module.__class__ = _LayerNorm
        self.model.to(dtype)

    def step(self, batch, seed, dropped_blocks=()):
        """Do one step and return (mean loss, projected gradient)."""
        return self.step_in_directions(batch, [seed], dropped_blocks)

    @torch.no_grad()
    def step_in_directions(self, batch, seeds, dropped_blocks=()):
        """Do one step along the mean of several directions; return (mean loss, *projected gradients)."""
        prefixes = tuple(f"{self.blocks}.{block}." for block in dropped_blocks)
        active = [name for name in self.parameters if not name.startswith(prefixes)]
        losses, gradients, directions = [], [], []
        for seed in seeds:
            directions.append({name: self._normal(name, seed) for name in active})
            plus, minus = (self._loss_at(directions[-1], sign * self.scale, batch) for sign in (1, -1))
            losses.append((plus + minus) / 2)
            gradients.append((plus - minus) / (2 * self.scale))
        for gradient, z in zip(gradients, directions, strict=True):
            for name in active:
                self.masters[name] -= self.learning_rate / len(seeds) * gradient * z[name]
        return sum(losses) / len(losses), *gradients

    def stored(self):
        """Return the weights as stored, by name."""
        return {name: round_to(master, self.dtype) for name, master in self.masters.items()}

    def _normal(self, name, seed):
        shape = self.masters[name].shape
        return self.noise.draw(seed, self.ids[name], 0, shape.numel(), torch.device("cpu")).view(shape)

    def _loss_at(self, z, scale, batch):
        """Return the mean loss over the batch at theta + scale z.

        Perturbed vectors (biases and norms) stay in float32: a 16-bit 1.0 has no room for them.
        """
        stored = self.stored()
        for name, parameter in self.parameters.items():
            value = stored[name]
            if name in z:
                value = value.float() + scale * z[name]
                value = value if value.dim() == 1 else value.to(self.dtype)
            parameter.data = value
        total = 0.0
        for micro_batch in batch:
            total += float(self._summed_loss(micro_batch))
        return total / sum(micro_batch.weight for micro_batch in batch)

    def _summed_loss(self, batch):
        """Return the summed cross-entropy over the candidates, in float64.

        Only the logits asked for are computed: the last bits of a matrix product depend on its shape.
        """
        hidden = self.model.base_model(**batch.inputs).last_hidden_state
        asked = hidden[batch.selection.rows, batch.selection.positions]
        logits = F.linear(asked, self.model.get_output_embeddings().weight[batch.selection.vocabulary])
        return F.cross_entropy(logits.float(), batch.labels["label"], reduction="none").double().sum()


class _Linear(nn.Linear):
    """Adds a bias that is wider than the weight in its own precision."""

    def forward(self, input):
        if self.bias is None or self.bias.dtype == self.weight.dtype:
            return super().forward(input)
        return (F.linear(input, self.weight).float() + self.bias).to(input.dtype)


class _LayerNorm(nn.LayerNorm):
    """Normalises in the precision of its weights."""

    def forward(self, input):
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)


def round_to(values, dtype):
    """Round float32 values to the nearest of `dtype`, ties away from zero."""
    if dtype == torch.float32:
        return values
    assert dtype == torch.bfloat16
    return ((values.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
