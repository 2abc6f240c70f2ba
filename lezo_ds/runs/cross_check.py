"""Before anything is scored or trained, a few records are scored a second way.

A pass of a run, or of an evaluation, lays out records in shared rows, selects logits, and runs
wrapped modules on sharded weights. A mistake in any of these gives numbers that repeat to the bit
and are not the model's. So they are compared with those of the plainest pass that there is:

    training   a batch of records, laid out as in a step, at a probe of scale 0: the second of two,
               if a pass of a step has several; of an evaluation, at the weights themselves
    alone      one sequence in a row of its own length, by the modules' own forward methods

The numbers are log-probabilities of the tokens that the loss reads. If the objective reads answers,
they are those of the tokens that training's pass has written, and the model alone must put no other
token first.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.config import RunConfig
from lezo_ds.data.examples import TokenIds
from lezo_ds.data.generation import up_to_stop
from lezo_ds.data.packing import can_pack
from lezo_ds.data.reader import EncodedSplit, Reader
from lezo_ds.data.task_data import TaskData
from lezo_ds.engine import ModelEngine
from lezo_ds.errors import LezoError, UserError, cut, one_line
from lezo_ds.forward.batch import MicroBatch, to_device
from lezo_ds.sharding.tensor_parallel import USE_ZERO3

logger = logging.getLogger(__name__)

NUM_NEW_TOKENS = 4
"""Most tokens that are written for a comparison."""

TOLERANCE: Mapping[str, float] = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 5e-2}
"""How far two mean log-probabilities may be apart, in parts of one more than their size.

The products of the two passes have other numbers of rows, and so round in other ways.
"""

_REPORT = (
    "set train.micro_batch_size=1 zo.probes_per_pass=1, or report this with the model's config.json"
)


class Reading(NamedTuple):
    """The scores of one sequence in both passes.

    Attributes:
        row: index of its record among the training records.
        training: log-probabilities in training's pass, float32 [tokens, entries].
        alone: likewise, by the model alone.
    """

    row: int
    training: Tensor
    alone: Tensor

    @property
    def difference(self) -> float:
        """The mean distance of the scores, in parts of one more than their mean size.

        It is infinite if training's pass has a number that is not finite.
        """
        if not self.training.isfinite().all():
            return math.inf
        distance = (self.training - self.alone).abs().mean()
        return float(distance / (1 + self.alone.abs().mean()))


class ReadSequence(NamedTuple):
    """A sequence of a batch whose logits a loss reads.

    Attributes:
        row: index of its record among the training records.
        ids: its tokens, without those after the last logits that are read.
        selected: which of the batch's selected logits are its own, int64 [n].
        positions: where these are in the sequence, int64 [n].
    """

    row: int
    ids: list[int]
    selected: Tensor
    positions: Tensor


def check_scoring(
    engine: ModelEngine, reader: Reader, split: EncodedSplit, config: RunConfig
) -> None:
    """Compare a pass of an evaluation of a split with the model alone. A collective.

    Raises:
        UserError: as by `cross_check`.
    """
    packed = can_pack(engine.module.config, config.data.max_length)
    packed = packed and not split.longest_prompt and config.peft.kind != "prefix"
    few = split.first(config.train.micro_batch_size)
    data = TaskData(reader, few, few, few, packed, few.num_start if packed else 0)
    cross_check(engine, data, config, range(len(few)))


def cross_check(
    engine: ModelEngine, data: TaskData, config: RunConfig, rows: Sequence[int]
) -> None:
    """Compare a training pass of some records with the model alone. A collective.

    Args:
        engine: at the weights to compare at.
        data: with the training records.
        config: of the run.
        rows: indices of records in `data.train`. One micro-batch of them is read.

    Raises:
        UserError: they differ by more than rounding, or are not finite. All ranks raise.
    """
    began = time.monotonic()
    rows = rows[: config.train.micro_batch_size]
    try:
        # Those of rank 0: processors that round differently have one verdict.
        readings = distributed.broadcast_object(read_twice(engine, data, rows))
    except Exception as error:  # of any type, as of a tensor that does not fit
        known = distributed.lost_rank(error) or distributed.out_of_memory(error)
        if isinstance(error, LezoError) or known is not None:
            raise
        problem = cut(one_line(error), 200)
        raise UserError(
            f"{type(engine.module).__name__} does not run in a training pass: "
            f"{type(error).__name__}: {problem}",
            fix=_REPORT if engine.tensor_parallel == 1 else USE_ZERO3,
        ) from error
    for reading in readings:
        if not reading.alone.isfinite().all():
            raise UserError(
                f"{type(engine.module).__name__} gives record {data.train.index[reading.row]} "
                f"values that are not finite in {config.model.dtype}",
                fix="set another model.dtype, or use another model or step; if training diverged, "
                "start again in another run_dir with a third of zo.learning_rate",
            )
    worst = max(readings, key=lambda reading: reading.difference)
    allowed = TOLERANCE[config.model.dtype]
    if worst.difference <= allowed:
        if distributed.rank() == 0:
            logger.info(
                "check passed: %d sequences have the same loss in the plain model "
                "(largest difference %.1e, %.1f s)",
                len(readings),
                worst.difference,
                time.monotonic() - began,
            )
        return
    raise UserError(
        f"record {data.train.index[worst.row]} has a mean log-probability of "
        f"{float(worst.training.mean()):.4f} a token in a pass of several, and of "
        f"{float(worst.alone.mean()):.4f} by the model alone, which is more than rounding in "
        f"{config.model.dtype} explains",
        fix=_REPORT,
    )


def read_twice(engine: ModelEngine, data: TaskData, rows: Sequence[int]) -> list[Reading]:
    """Return the scores of some sequences of a batch in both passes. A collective.

    Args:
        engine: at the weights to compare at.
        data: with the training records.
        rows: indices of the records of the batch in `data.train`.
    """
    if data.train.longest_prompt:
        return _read_answers_twice(engine, data, rows)
    batch = to_device(data.training_batch(rows), engine.device)
    sequences = _sequences(data.reader.objective_batch(data.train, rows), rows)
    training = _scores(engine.run_at_theta(batch), batch).cpu()
    readings = []
    for place in _shortest_and_longest([len(sequence.ids) for sequence in sequences]):
        sequence = sequences[place]
        alone = _scores_alone(engine, sequence, batch).cpu()
        readings.append(Reading(sequence.row, training[sequence.selected], alone))
    return readings


def _sequences(batch: MicroBatch, rows: Sequence[int]) -> list[ReadSequence]:
    """Return the sequences of a batch that has each of them in a row of its own."""
    selection = batch.selection
    assert selection is not None, "an objective that reads logits selects them"
    tokens = batch.inputs["input_ids"]
    records_of_rows = torch.arange(len(tokens)) * len(rows) // len(tokens)
    if batch.token_examples is not None:
        records_of_rows = batch.token_examples[:, 0]
    sequences = []
    for row, record in enumerate(records_of_rows.tolist()):
        (selected,) = torch.nonzero(selection.rows == row, as_tuple=True)
        positions = selection.positions[selected]
        ids = tokens[row, : int(positions.max()) + 1].tolist()
        sequences.append(ReadSequence(rows[record], ids, selected, positions))
    return sequences


def _shortest_and_longest(lengths: Sequence[int]) -> list[int]:
    """Return the indices of the shortest and the longest sequence, or of the only one.

    No more are scored alone: under ZeRO-3, each takes as long as a gather of the whole model.
    Of equally short ones, the last one is least likely to be the first in a shared row.

    >>> _shortest_and_longest([5, 9, 2, 2]), _shortest_and_longest([5])
    ([3, 1], [0])
    """
    by_length = sorted(range(len(lengths)), key=lambda index: (lengths[index], -index))
    return list(dict.fromkeys((by_length[0], by_length[-1])))


def _scores(outputs: Tensor, batch: MicroBatch) -> Tensor:
    """Return the log-probabilities of all selected logits, float32 [N, entries].

    The entries are those of the vocabulary that the batch selects, or one: the target.

    Args:
        outputs: of a pass of the batch: log-probabilities [N], or logits [N, K] or [N, vocabulary].
        batch: which selects them.
    """
    if outputs.dim() == 1:
        return outputs[:, None]
    log_probabilities = outputs.float().log_softmax(dim=1)
    assert batch.selection is not None
    if batch.selection.vocabulary is not None:
        return log_probabilities
    return log_probabilities.gather(1, batch.labels["target_ids"][:, None])


def _scores_alone(engine: ModelEngine, sequence: ReadSequence, batch: MicroBatch) -> Tensor:
    """Return what `_scores` has of a sequence, by the model alone. A collective."""
    assert batch.selection is not None
    selected = sequence.selected.to(engine.device)
    logits = engine.forward_alone(sequence.ids)[sequence.positions.to(engine.device)]
    labels = {}
    if "target_ids" in batch.labels:
        labels["target_ids"] = batch.labels["target_ids"][selected]
    if batch.selection.vocabulary is not None:
        logits = logits[:, batch.selection.vocabulary]
    return _scores(logits, replace(batch, labels=labels))


def _read_answers_twice(engine: ModelEngine, data: TaskData, rows: Sequence[int]) -> list[Reading]:
    """Return the scores of the tokens that a pass writes after prompts, and of the first choices.

    A collective.
    """
    batch = data.reader.prompt_batch(data.train, rows)
    assert batch.prompts is not None
    num_tokens = min(NUM_NEW_TOKENS, batch.prompts.settings.max_new_tokens)
    settings = replace(batch.prompts.settings, max_new_tokens=num_tokens)
    shorter = replace(batch.prompts, settings=settings)
    batch = to_device(replace(batch, prompts=shorter), engine.device)
    written = engine.run_at_theta(batch).tolist()  # without keys, the first choices
    prompts = [data.train.prompts[row] for row in rows]
    readings = []
    for place in _shortest_and_longest([len(prompt) for prompt in prompts]):
        answer = distributed.broadcast_object(up_to_stop(written[place], settings))
        scores = _choices_alone(engine, prompts[place], answer).cpu()
        readings.append(Reading(rows[place], scores[:, :1], scores[:, 1:]))
    return readings


def _choices_alone(engine: ModelEngine, prompt: TokenIds, answer: Sequence[int]) -> Tensor:
    """Return the log-probabilities of an answer's tokens and of the model's first choices there.

    A collective. The result is float32 [tokens, 2].
    """
    logits = engine.forward_alone([*prompt, *answer[:-1]])[len(prompt) - 1 :]
    log_probabilities = logits.float().log_softmax(dim=1)
    of_answer = log_probabilities.gather(1, torch.tensor(answer, device=logits.device)[:, None])
    return torch.cat([of_answer, log_probabilities.amax(dim=1, keepdim=True)], dim=1)
