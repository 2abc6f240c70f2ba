"""The memory of a configured run: its config, its model's facts and its batches, brought together."""

from __future__ import annotations

from lezo_ds.config import TRAINED, RunConfig
from lezo_ds.data.batching import PAD_MULTIPLE
from lezo_ds.data.generation import MAX_NEW_TOKENS
from lezo_ds.data.task_data import EncodedSplit, TaskData
from lezo_ds.ds_config import load_ds_config
from lezo_ds.model.batch import MicroBatch
from lezo_ds.tasks import get_task
from lezo_ds.tools.benchmark.shapes import TASKS
from lezo_ds.tools.planning.memory import ForwardInputs, Memory, Training, memory_of, sharding_of
from lezo_ds.tools.planning.model_facts import ModelFacts

LONGEST = 4
"""How many times longer than a task's typical input its longest is assumed to be."""

_ICL_INPUTS = 33  # the demonstrations of the papers, and the question


def run_memory(
    config: RunConfig,
    model: ModelFacts,
    world_size: int,
    inputs: tuple[ForwardInputs | None, ForwardInputs],
    *,
    on_cpu: bool,
    reserve: int,
) -> Memory:
    """Return what each rank of a run needs.

    Args:
        config: of the run.
        model: with the adapter that the config asks for.
        world_size: number of ranks.
        inputs: a micro-batch of training (None for methods that do not train), and one of evaluation.
        on_cpu: the ranks compute on CPUs.
        reserve: bytes that belong to no tensor.

    Raises:
        UserError: the DeepSpeed JSON cannot be used.
    """
    ds_config = load_ds_config(
        config.deepspeed, config.model.dtype, world_size, config.train.micro_batch_size
    )
    size = config.partition_size or world_size
    train, evaluate = inputs
    training = Training(config.method, config.zo.update_precision, config.zo.forward, train, evaluate)
    return memory_of(model, sharding_of(ds_config, size, on_cpu=on_cpu), training, reserve)


def data_inputs(config: RunConfig, data: TaskData) -> tuple[ForwardInputs | None, ForwardInputs]:
    """Return the largest forward passes of a run, from its examples."""
    train = None
    if config.method in TRAINED:
        rows = _longest(data.train, config.train.micro_batch_size)
        train = _batch_inputs(data.objective_batch(data.train, rows))
    sequences = [
        (len(ids) - 1, length)
        for split in (data.dev, data.test)
        for example in split.encoded
        for ids, length in zip(example.sequences, example.option_lengths, strict=True)
    ]
    longest = sorted(sequences, reverse=True)[: config.train.eval_batch_size]
    num_written = 0 if data.generation is None else data.generation.max_new_tokens
    num_targets = sum(length for _, length in longest)
    return train, ForwardInputs(len(longest), _padded(longest[0][0]), num_targets, None, num_written)


def typical_inputs(
    config: RunConfig, model: ModelFacts, length: int | None
) -> tuple[ForwardInputs | None, ForwardInputs]:
    """Return the forward passes of a run whose examples are not at hand.

    Args:
        config: of the run.
        model: its model.
        length: of the longest input in tokens; None for LONGEST times what is typical of the task.
    """
    length = length or longest_length(config, model)
    workload = TASKS[config.data.task.lower()]
    train = None
    if config.method in TRAINED:
        rows = config.train.micro_batch_size
        if workload.num_candidates > 1 and workload.candidate_tokens == 1:
            train = ForwardInputs(rows, _padded(length), rows, workload.num_candidates)
        else:
            train = ForwardInputs(rows, _padded(length), rows * workload.candidate_tokens)
    num_written = MAX_NEW_TOKENS if get_task(config.data.task).kind == "generation" else 0
    rows = config.train.eval_batch_size
    num_targets = rows * workload.candidate_tokens
    return train, ForwardInputs(rows, _padded(length), num_targets, None, num_written)


def longest_length(config: RunConfig, model: ModelFacts) -> int:
    """Return how long a task's longest input is assumed to be, in tokens."""
    inputs = _ICL_INPUTS if config.method == "icl" else LONGEST
    longest = min(config.data.max_length, inputs * TASKS[config.data.task.lower()].length)
    return min(longest, model.max_length or longest)


def _longest(split: EncodedSplit, count: int) -> list[int]:
    lengths = [example.num_tokens for example in split.encoded]
    return sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True)[:count]


def _batch_inputs(batch: MicroBatch) -> ForwardInputs:
    rows, length = batch.inputs["input_ids"].shape
    if batch.generation is not None:
        return ForwardInputs(rows, length, rows, None, batch.generation.max_new_tokens)
    assert batch.selection is not None, "losses read the logits they need"
    vocabulary = batch.selection.vocabulary
    num_logits = None if vocabulary is None else len(vocabulary)
    return ForwardInputs(rows, length, len(batch.selection.rows), num_logits)


def _padded(length: int) -> int:
    return -(-length // PAD_MULTIPLE) * PAD_MULTIPLE
