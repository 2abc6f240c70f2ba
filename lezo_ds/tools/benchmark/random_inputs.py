"""Random models of given sizes, and random examples of equal lengths."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig

from lezo_ds import distributed
from lezo_ds.config import ZoConfig
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.data.batches import candidate_batch, teacher_forcing_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.objectives import classification_loss, teacher_forcing_loss
from lezo_ds.engine import LezoEngine, initialize
from lezo_ds.forward.batch import LossFunction, MicroBatch
from lezo_ds.noise import noise_backend
from lezo_ds.sharding import zero3
from lezo_ds.sharding.checkpoint_files import DTYPES, build_on_meta
from lezo_ds.tools.benchmark.inputs import Inputs, equal_parts
from lezo_ds.tools.benchmark.settings import Setting, Variant
from lezo_ds.tools.opt_shapes import VOCABULARY_SIZE, opt_config
from lezo_ds.tools.workloads import Workload

_STORED_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PAD = 1
_FIRST_WORD = 3  # the ids below are OPT's special tokens
_WEIGHT_SEED = 20240
_STANDARD_DEVIATION = 0.02


class RandomInputs(Inputs):
    """A random model of a shape of OPT, and one batch of random tokens, the same at every step.

    All examples have the same length, so that no layout pays for padding.

    Raises:
        UserError: the batch does not split into as many parts as there are micro-batches or ranks.
    """

    seed = 0

    def __init__(self, setting: Setting) -> None:
        ranks = distributed.world_size()
        micro_batches = setting.micro_batches or ranks
        self._setting = setting
        self._opt_config = opt_config(setting.shape, setting.layers)
        split = partial(split_batch, setting.workload, vocabulary_size=self._opt_config.vocab_size)
        self._batches = split(micro_batches)
        self._published_batches = split(ranks, published=True)
        self.loss = loss_function(setting.workload)
        weights = build_on_meta(self._opt_config, torch.float32).parameters()
        self.columns = vars(setting) | {
            "micro_batches": micro_batches,
            "parameters": sum(values.numel() for values in weights),
        }

    @property
    def zo(self) -> ZoConfig:
        """Settings of a step that changes the weights very little."""
        return ZoConfig(
            learning_rate=1e-7,
            perturbation_scale=1e-3,
            sparsity=0.0,
            update_precision=self._setting.update_precision,
        )

    def batches(self, step: int) -> list[MicroBatch]:
        """Return the same micro-batches at every step."""
        return self._batches

    def published_batches(self, step: int) -> list[MicroBatch]:
        """Return the same share of each rank at every step."""
        return self._published_batches

    def plain_model(self) -> nn.Module:
        """Return an unsharded model with random weights."""
        return plain_model(self._opt_config, self._setting.dtype, distributed.device())

    def start_engine(self) -> LezoEngine:
        """Return our engine on a sharded model with random weights. A collective."""
        setting = self._setting
        ds_config = load_ds_config(setting.ds_config, setting.dtype, distributed.world_size(), 1)
        with tempfile.TemporaryDirectory() as directory:
            write_empty_model(self._opt_config, setting.dtype, Path(directory))
            engine = initialize(
                model=directory,
                config=self.zo_config(Variant.parse("ours")),
                ds_config=ds_config,
                dtype=setting.dtype,
                partition_size=setting.partition_size,
            )
        fill_with_random_weights(engine)
        return engine


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


def split_batch(
    workload: Workload, count: int, *, published: bool = False, vocabulary_size: int = VOCABULARY_SIZE
) -> list[MicroBatch]:
    """Return a random batch in `count` equal parts, the same on all ranks.

    Args:
        workload: size of the batch.
        count: number of parts.
        published: use the layout of MeZO's code, with one sequence per candidate, instead of our trainer's.
        vocabulary_size: all tokens are below it.

    Raises:
        UserError: `count` does not divide the batch.
    """
    parts = equal_parts(_examples(workload, vocabulary_size), count)
    if workload.num_candidates == 1:
        return [teacher_forcing_batch(part, _PAD) for part in parts]
    return [candidate_batch(part, _PAD, deduplicate=not published) for part in parts]


def _examples(workload: Workload, vocabulary_size: int) -> list[EncodedExample]:
    generator = torch.Generator().manual_seed(workload.length)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(_FIRST_WORD, vocabulary_size, (count,), generator=generator).tolist())

    candidates = [tokens(workload.candidate_tokens) for _ in range(workload.num_candidates)]
    lengths = (workload.candidate_tokens,) * workload.num_candidates
    examples = []
    for index in range(workload.batch_size):
        prompt = tokens(workload.length - workload.candidate_tokens)
        sequences = tuple((*prompt, *candidate) for candidate in candidates)
        examples.append(EncodedExample(sequences, lengths, index % workload.num_candidates, False))
    return examples


def fill_with_random_weights(engine: LezoEngine) -> None:
    """Give the model weights as OPT initializes them, the same for all shardings."""
    noise = noise_backend(engine.device)
    for parameter in engine.weights.parameters:
        element = (parameter.named.parameter_id, parameter.start, parameter.count)
        values = noise.draw(_WEIGHT_SEED, *element, engine.device).mul_(_STANDARD_DEVIATION)
        engine.weights.fill(parameter, values.add_(1.0 if parameter.name.endswith("norm.weight") else 0.0))
    zero3.finish_updates()
