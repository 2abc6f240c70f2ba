"""The longest inputs of a run, which decide its memory: measured in its data, or assumed without it."""

from __future__ import annotations

from dataclasses import dataclass

from lezo_ds.config import TRAINED, RunConfig, find_task
from lezo_ds.data.batches import PAD_MULTIPLE
from lezo_ds.data.objectives import load_objective
from lezo_ds.data.task_data import TaskData
from lezo_ds.tools.planning.model_sizes import ModelSizes
from lezo_ds.tools.workloads import WORKLOADS, typical_workload

LONGEST = 4
"""The longest input of a task is assumed to be this many times longer than a typical one."""

_ICL_INPUTS = 33  # 32 demonstrations, as in the papers, and the question


@dataclass(frozen=True)
class InputSizes:
    """Sizes of the largest forward passes.

    Attributes:
        length: tokens of the longest input, padding included.
        answer_tokens: tokens of the longest answer whose probability is computed.
        num_labels: number of vocabulary entries that training compares; None if it reads all of them.
        new_tokens: tokens that the model writes after each prompt in an evaluation; 0 if it writes none.
        trains_on_answers: whether the model writes answers in training, too.
        source: where the length comes from, in words.
    """

    length: int
    answer_tokens: int
    num_labels: int | None
    new_tokens: int
    trains_on_answers: bool
    source: str


def measured_inputs(config: RunConfig, data: TaskData) -> InputSizes:
    """Return the sizes of a run's longest inputs, from its examples."""
    splits = [data.train] if config.method in TRAINED else []
    splits += [data.dev, data.test]
    examples = [example for split in splits for example in split.encoded]
    lengths = [example.num_tokens for example in examples]
    lengths += [len(ids) for split in splits for ids in split.prompts]
    batch = data.objective_batch(data.train, [0])
    vocabulary = None if batch.selection is None else batch.selection.vocabulary
    return InputSizes(
        length=_padded(max(lengths)),
        answer_tokens=max((length for example in examples for length in example.option_lengths), default=1),
        num_labels=None if vocabulary is None else len(vocabulary),
        new_tokens=0 if data.generation is None else data.generation.max_new_tokens,
        trains_on_answers=data.objective.reads_answers,
        source="measured in the data",
    )


def assumed_inputs(config: RunConfig, model: ModelSizes, length: int | None = None) -> InputSizes:
    """Return the sizes of a run's longest inputs without looking at its data.

    Args:
        config: configuration of the run.
        model: sizes of its model.
        length: tokens of the longest input; None for LONGEST times the task's typical length.
    """
    task = find_task(config.data)
    workload = typical_workload(task)
    factor = _ICL_INPUTS if config.method.startswith("icl") else LONGEST
    longest = min(config.data.max_length, factor * workload.length)
    source = f"assumed: {factor} times the typical {workload.length} tokens"
    if task.name not in WORKLOADS:
        source = f"assumed: {factor} times {workload.length}, since no typical length of {task.name} is known"
    by_label = workload.num_candidates > 1 and workload.candidate_tokens == 1
    trains_on_answers = load_objective(config.train.objective, task).reads_answers
    return InputSizes(
        length=_padded(length or min(longest, model.max_length or longest)),
        answer_tokens=workload.candidate_tokens * (1 if by_label else LONGEST),
        num_labels=workload.num_candidates if by_label else None,
        new_tokens=config.generation.max_new_tokens if task.kind == "generation" or trains_on_answers else 0,
        trains_on_answers=trains_on_answers,
        source="given" if length else source,
    )


def _padded(length: int) -> int:
    return -(-length // PAD_MULTIPLE) * PAD_MULTIPLE
