"""What variants run: models with random weights, and random batches. All ranks and layouts get the same."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
from lezo_ds.tools.opt_shapes import VOCABULARY_SIZE
from lezo_ds.tools.workloads import Workload

_WEIGHT_SEED = 20240
_STANDARD_DEVIATION = 0.02
_STORED_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PAD = 1
_FIRST_WORD = 3  # the ids below are OPT's special tokens


def write_empty_model(config: OPTConfig, dtype: str, directory: Path) -> None:
    """Write a model directory whose weights are zeros.

    The weights are a hole in the file, which takes no space on the disk. The writer of safetensors would need
    as much memory and space as the model has.
    """
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
    """Return elements of a parameter as OPT initializes them: float32 [count].

    Args:
        name: the parameter's name; the weights of a norm are around 1, all others around 0.
        parameter_id: the parameter's id.
        start: index of the first element.
        count: number of elements.
        device: where to make them.
    """
    values = noise_backend(device).normal(_WEIGHT_SEED, parameter_id, start, count, device)
    return values.mul_(_STANDARD_DEVIATION).add_(1.0 if name.endswith("norm.weight") else 0.0)


def plain_model(config: OPTConfig, dtype: str, device: torch.device) -> nn.Module:
    """Return an unsharded model with random weights."""
    model = build_on_meta(config, DTYPES[dtype])
    ids = parameter_ids(name for name, _ in model.named_parameters())
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        values = random_weights(name, ids[name], 0, math.prod(parameter.shape), device)
        made[parameter] = nn.Parameter(values.view(parameter.shape).to(parameter.dtype), requires_grad=False)
    for module in model.modules():
        module._parameters.update({n: made[p] for n, p in module._parameters.items() if p is not None})
    return model.to(device)


def loss_function(workload: Workload) -> LossFunction:
    """Return the loss on which MeZO trains such a task."""
    return classification_loss if workload.num_candidates > 1 else teacher_forcing_loss


def micro_batches(workload: Workload, count: int) -> list[MicroBatch]:
    """Return the batch in our trainer's layout, in `count` equal parts.

    Raises:
        UserError: `count` does not divide the batch.
    """
    build = candidate_batch if workload.num_candidates > 1 else teacher_forcing_batch
    return [build(part, _PAD) for part in _split(workload, count)]


def published_batch(workload: Workload, rank: int, num_ranks: int) -> MicroBatch:
    """Return a rank's share of the batch in MeZO's layout, with one sequence per candidate.

    Raises:
        UserError: the ranks do not divide the batch.
    """
    share = _split(workload, num_ranks)[rank]
    if workload.num_candidates == 1:
        return teacher_forcing_batch(share, _PAD)
    return candidate_batch(share, _PAD, deduplicate=False)


def _split(workload: Workload, count: int) -> list[Sequence[EncodedExample]]:
    if workload.batch_size % count:
        raise UserError(
            "the batch does not split into equal parts",
            got=f"{workload.batch_size} examples, {count} parts",
            expected="a multiple of the number of parts",
            fix="change --batch, --micro-batches or the number of ranks",
        )
    size = workload.batch_size // count
    examples = _examples(workload)
    return [examples[start : start + size] for start in range(0, workload.batch_size, size)]


def _examples(workload: Workload) -> list[EncodedExample]:
    """Return random examples. All have the same length, so that no layout pays for padding."""
    generator = torch.Generator().manual_seed(workload.length)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(_FIRST_WORD, VOCABULARY_SIZE, (count,), generator=generator).tolist())

    candidates = [tokens(workload.candidate_tokens) for _ in range(workload.num_candidates)]
    lengths = (workload.candidate_tokens,) * workload.num_candidates
    examples = []
    for index in range(workload.batch_size):
        prompt = tokens(workload.length - workload.candidate_tokens)
        sequences = tuple((*prompt, *candidate) for candidate in candidates)
        examples.append(EncodedExample(sequences, lengths, index % workload.num_candidates, False))
    return examples
