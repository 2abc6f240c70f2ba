"""What is timed: models of OPT's shapes with random weights, and batches as long as the tasks' inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import OPTConfig

from lezo_ds.data.batching import candidate_batch, teacher_forcing_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.objectives import classification_loss, teacher_forcing_loss
from lezo_ds.errors import UserError
from lezo_ds.model.batch import LossFunction, MicroBatch
from lezo_ds.noise import noise_backend
from lezo_ds.sharding.checkpoint_files import DTYPES, build_on_meta
from lezo_ds.sharding.parameters import parameter_ids

VOCABULARY = 50272
MAX_LENGTH = 2048
_WEIGHT_SEED = 20240
_STANDARD_DEVIATION = 0.02
_STORED_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PAD = 1
_FIRST_WORD = 3  # the ids below are special


@dataclass(frozen=True)
class Shape:
    """Size of an OPT model (Zhang et al. 2022, table 1).

    Attributes:
        num_blocks: transformer blocks.
        width: of the hidden states; the feed-forward layers are four times as wide.
        num_heads: attention heads of a block.
    """

    num_blocks: int
    width: int
    num_heads: int


SHAPES = {
    "opt-tiny": Shape(4, 32, 2),  # not a published one: to try the program
    "opt-125m": Shape(12, 768, 12),
    "opt-1.3b": Shape(24, 2048, 32),
    "opt-2.7b": Shape(32, 2560, 32),
    "opt-6.7b": Shape(32, 4096, 32),
    "opt-13b": Shape(40, 5120, 40),
    "opt-30b": Shape(48, 7168, 56),
    "opt-66b": Shape(64, 9216, 72),
}


@dataclass(frozen=True)
class Workload:
    """A step's batch; all inputs are equally long, so that no layout pays for padding.

    Attributes:
        batch_size: examples.
        length: tokens of prompt and candidate together, at most MAX_LENGTH.
        num_candidates: answers of an example that are compared; 1 for teacher forcing.
        candidate_tokens: length of an answer in tokens.
    """

    batch_size: int
    length: int
    num_candidates: int = 2
    candidate_tokens: int = 1

    def __post_init__(self) -> None:
        if not self.candidate_tokens < self.length <= MAX_LENGTH:
            raise UserError(
                "--length does not fit",
                got=self.length,
                expected=f"{self.candidate_tokens + 1} to {MAX_LENGTH}",
                fix="give another --length",
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of the examples, each counted once however often it is run."""
        return self.batch_size * self.length

    @property
    def loss(self) -> LossFunction:
        """The loss MeZO trains such a task on."""
        return classification_loss if self.num_candidates > 1 else teacher_forcing_loss

    def examples(self) -> list[EncodedExample]:
        """Return random examples, always the same."""
        generator = torch.Generator().manual_seed(self.length)

        def tokens(count: int) -> tuple[int, ...]:
            drawn = torch.randint(_FIRST_WORD, VOCABULARY, (count,), generator=generator)
            return tuple(drawn.tolist())

        candidates = [tokens(self.candidate_tokens) for _ in range(self.num_candidates)]
        made = []
        for index in range(self.batch_size):
            prompt = tokens(self.length - self.candidate_tokens)
            sequences = tuple((*prompt, *candidate) for candidate in candidates)
            lengths = (self.candidate_tokens,) * self.num_candidates
            made.append(EncodedExample(sequences, lengths, index % self.num_candidates, False))
        return made

    def micro_batches(self, count: int) -> list[MicroBatch]:
        """Return the batch as our trainer lays it out, in `count` micro-batches.

        Raises:
            UserError: `count` does not divide the batch.
        """
        build = candidate_batch if self.num_candidates > 1 else teacher_forcing_batch
        return [build(part, _PAD) for part in self._split(count)]

    def published_batch(self, rank: int, num_ranks: int) -> MicroBatch:
        """Return a rank's share as MeZO lays it out: a sequence for every candidate.

        Raises:
            UserError: the ranks do not divide the batch.
        """
        share = self._split(num_ranks)[rank]
        if self.num_candidates == 1:
            return teacher_forcing_batch(share, _PAD)
        return candidate_batch(share, _PAD, deduplicate=False)

    def _split(self, count: int) -> list[Sequence[EncodedExample]]:
        if self.batch_size % count:
            raise UserError(
                "the batch does not split into equal parts",
                got=f"{self.batch_size} examples, {count} parts",
                expected="a multiple",
                fix="change --batch, --micro-batches or the number of ranks",
            )
        size = self.batch_size // count
        examples = self.examples()
        return [examples[start : start + size] for start in range(0, self.batch_size, size)]


TASKS = {
    "sst2": Workload(16, 32),
    "rte": Workload(16, 88),
    "cb": Workload(16, 112, num_candidates=3),
    "boolq": Workload(16, 200),
    "wsc": Workload(16, 64),
    "wic": Workload(16, 56),
    "multirc": Workload(16, 376),
    "copa": Workload(16, 24, num_candidates=1, candidate_tokens=6),
    "record": Workload(16, 280, num_candidates=1, candidate_tokens=24),
    "squad": Workload(16, 256, num_candidates=1, candidate_tokens=5),
    "drop": Workload(16, 320, num_candidates=1, candidate_tokens=3),
}
"""Typical inputs of a batch of 16; what a real batch costs varies with its longest input."""


def opt_config(shape: str, num_blocks: int | None = None) -> OPTConfig:
    """Return the config of an OPT model.

    Args:
        shape: a key of SHAPES.
        num_blocks: blocks to build in the place of the shape's own number, at least 1.
    """
    found = SHAPES[shape]
    return OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=found.width,
        word_embed_proj_dim=found.width,
        ffn_dim=4 * found.width,
        num_hidden_layers=num_blocks or found.num_blocks,
        num_attention_heads=found.num_heads,
        max_position_embeddings=MAX_LENGTH,
    )


def write_empty_model(config: OPTConfig, dtype: str, directory: Path) -> None:
    """Write a model directory whose weights are zeros, which take no room on disk: a file with a hole."""
    model = build_on_meta(config, DTYPES[dtype])
    config.save_pretrained(directory)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parameter in model.named_parameters():
        start, end = end, end + parameter.numel() * parameter.element_size()
        stored = _STORED_DTYPES[parameter.dtype]
        header[name] = {"dtype": stored, "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def random_weights(name: str, parameter_id: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return elements of a parameter as OPT's initialisation makes them: float32 [count].

    They depend on the parameter's name and the element alone, so that any sharding gives the same model.

    Args:
        name: of the parameter; a norm's weights are around 1.
        parameter_id: of the parameter.
        start: index of the first element.
        count: number of elements.
        device: to make them on.
    """
    values = noise_backend(device).normal(_WEIGHT_SEED, parameter_id, start, count, device)
    return values.mul_(_STANDARD_DEVIATION).add_(1.0 if name.endswith("norm.weight") else 0.0)


def plain_model(config: OPTConfig, dtype: str, device: torch.device) -> nn.Module:
    """Return an unsharded model with random weights, the same as those of a sharded one."""
    model = build_on_meta(config, DTYPES[dtype])
    ids = parameter_ids(name for name, _ in model.named_parameters())
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        values = random_weights(name, ids[name], 0, math.prod(parameter.shape), device)
        made[parameter] = nn.Parameter(values.view(parameter.shape).to(parameter.dtype), requires_grad=False)
    for module in model.modules():
        module._parameters.update({n: made[p] for n, p in module._parameters.items() if p is not None})
    return model.to(device)
