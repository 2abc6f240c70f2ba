"""What variants run: models of given sizes, and random batches, the same for all ranks and layouts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig

from lezo_ds.data.batching import candidate_batch, teacher_forcing_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.objectives import classification_loss, teacher_forcing_loss
from lezo_ds.errors import UserError
from lezo_ds.model.batch import LossFunction, MicroBatch
from lezo_ds.sharding.checkpoint_files import DTYPES, build_on_meta
from lezo_ds.tools.opt_shapes import VOCABULARY_SIZE
from lezo_ds.tools.workloads import Workload

_STORED_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PAD = 1
_FIRST_WORD = 3  # the ids below are OPT's special tokens


def write_empty_model(config: OPTConfig, dtype: str, directory: Path) -> None:
    """Write a model directory whose weights are zeros.

    The weights are a hole in the file, so a model larger than memory and disk can be written in a moment.
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


def plain_model(config: OPTConfig, dtype: str, device: torch.device) -> nn.Module:
    """Return an unsharded model with random weights, the same on all ranks, to run only."""
    torch.manual_seed(0)
    with device:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    return model.eval().requires_grad_(False)


def loss_function(workload: Workload) -> LossFunction:
    """Return the loss on which MeZO trains such a task."""
    return classification_loss if workload.num_candidates > 1 else teacher_forcing_loss


def split_batch(workload: Workload, count: int, *, published: bool = False) -> list[MicroBatch]:
    """Return a random batch in `count` equal parts, the same on all ranks.

    Args:
        workload: size of the batch.
        count: number of parts.
        published: use the layout of MeZO's code, with one sequence per candidate, instead of our trainer's.

    Raises:
        UserError: `count` does not divide the batch.
    """
    if workload.batch_size % count:
        raise UserError(
            "the batch does not split into equal parts",
            got=f"{workload.batch_size} examples, {count} parts",
            expected="a multiple of the number of parts",
            fix="change --batch, --micro-batches or the number of ranks",
        )
    size = workload.batch_size // count
    examples = _examples(workload)
    parts = [examples[start : start + size] for start in range(0, workload.batch_size, size)]
    if workload.num_candidates == 1:
        return [teacher_forcing_batch(part, _PAD) for part in parts]
    return [candidate_batch(part, _PAD, deduplicate=not published) for part in parts]


def _examples(workload: Workload) -> list[EncodedExample]:
    # All have the same length, so that no layout pays for padding.
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
