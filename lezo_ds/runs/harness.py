"""Tasks of lm-evaluation-harness on a sharded model, for `lezo-ds evaluate --lm-eval`.

The harness reads, batches and scores its requests as for its own class of models of transformers.
Only the model that it calls is ours. All ranks have all batches, and each runs some of them. So the
scores are the same on any number of ranks:

    batches          0    1    2         a forward pass is a collective, so a rank without a batch
    rank 0 runs      0         2         left runs one token
    rank 1 runs           1   (one token)

Ranks that split the weights by tensor parallelism run the same batches.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import make_table
from torch import Tensor
from transformers import GenerationConfig

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.data.encode import load_tokenizer
from lezo_ds.data.generation import runs_in_step
from lezo_ds.engine import ModelEngine
from lezo_ds.errors import UserError, first_line
from lezo_ds.files import DAMAGE
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.runs.directory import RunDirectory, append_lines
from lezo_ds.runs.opening import Opened


class _Model:
    """What the harness calls in place of a model of transformers: a part of the calls of each rank.

    A call of another rank returns NaN, or no new token.
    """

    def __init__(self, engine: ModelEngine) -> None:
        self._engine = engine
        self._module: Any = engine.module
        self._num_calls = 0
        self.config: Any = self._module.config
        self.device = engine.device
        self.dtype = next(engine.module.parameters()).dtype
        with suppress(OSError):  # a model without such a file has the defaults
            settings = GenerationConfig.from_pretrained(engine.base.directory)
            self._module.generation_config = settings

    def __call__(self, input_ids: Tensor) -> SimpleNamespace:
        """Return the logits of token ids [rows, tokens]. A collective."""
        if self._is_own_call():
            logits = self._engine.forward(MicroBatch({"input_ids": input_ids}, weight=0.0))
        else:
            unknown = torch.tensor(math.nan, dtype=self.dtype, device=self.device)
            vocabulary = self.config.get_text_config().vocab_size
            logits = unknown.expand(*input_ids.shape, vocabulary)
        return SimpleNamespace(logits=logits)

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Return token ids [rows, tokens] with new ones, as transformers does. A collective."""
        if not self._is_own_call():
            return input_ids
        synced = runs_in_step(self._module)
        tokens: Tensor = self._module.generate(input_ids, **options, synced_gpus=synced)
        return tokens

    def _is_own_call(self) -> bool:
        worker = self._num_calls % self._engine.num_workers
        self._num_calls += 1
        return worker == self._engine.worker

    def finish(self, call: Callable[[Tensor], object]) -> None:
        """Call the model with one token until all ranks have run equally many calls."""
        while self._num_calls % self._engine.num_workers:
            call(torch.zeros((1, 1), dtype=torch.int64, device=self.device))


class ShardedLM(HFLM):  # type: ignore[misc]
    """The harness's model of transformers, whose batches ranks share."""

    def __init__(self, engine: ModelEngine, directory: str, batch_size: int) -> None:
        self._calls = _Model(engine)
        super().__init__(self._calls, tokenizer=directory, batch_size=batch_size)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **options: Any) -> list[Any]:
        own = super()._loglikelihood_tokens(requests, **options)
        self._calls.finish(self._calls)
        merged = _merged(own, lambda answer: not math.isnan(answer[0]))
        if any(math.isnan(total) for total, _ in merged):
            raise UserError(
                "the model computes scores that are not finite",
                fix="use the weights of another step, or model.dtype=fp32",
            )
        return merged

    def generate_until(self, requests: Sequence[Any], **options: Any) -> list[Any]:
        own = super().generate_until(requests, **options)
        self._calls.finish(partial(self._calls.generate, max_new_tokens=1))
        return _merged(own, bool)


def _merged(own: list[Any], is_known: Callable[[Any], bool]) -> list[Any]:
    """Return for each request the answer of the rank that knows it. A collective."""
    by_request = zip(*distributed.gather_objects(own), strict=True)
    return [next(filter(is_known, answers), answers[0]) for answers in by_request]


def run_tasks(opened: Opened, names: str, limit: int | None) -> dict[str, Any]:
    """Score weights on tasks of the harness. A collective.

    Args:
        opened: the weights.
        names: tasks that the harness knows, or paths of YAML files, separated by commas.
        limit: most examples of a task; None for all.

    Returns:
        What --json prints, and the harness's own table under "table". Ranks but 0 have neither.

    Raises:
        UserError: the harness does not know a task, or cannot read it or its data set.
    """
    tasks = EvaluatorConfig(tasks=names)
    try:
        manager = tasks.process_tasks()
    except ValueError as error:
        raise UserError(f"--lm-eval: {error}", fix="see lm-eval ls tasks") from error
    config = opened.config
    directory = str(resolve_model(config.model.path))
    load_tokenizer(directory)  # the harness would take an empty one if its files are not there
    engine = opened.load_engine()
    model = ShardedLM(engine, directory, config.train.eval_batch_size)
    with ExitStack() as hidden:
        if engine.global_rank > 0:  # rank 0 shows the progress
            hidden.enter_context(redirect_stdout(io.StringIO()))
            hidden.enter_context(redirect_stderr(io.StringIO()))
        try:
            found = simple_evaluate(model, tasks=tasks.tasks, limit=limit, task_manager=manager)
        except DAMAGE as error:  # the file defines no task, or the data set is missing
            raise UserError(
                f"--lm-eval: {first_line(error)}",
                fix="correct the task, or download its data set first",
            ) from error
    if engine.global_rank > 0:
        return {}
    scores = {**opened.source, "limit": limit, "results": found["results"]}
    if "run" in scores:  # which keeps them
        append_lines(RunDirectory(scores["run"]).harness_scores, [scores])
    return {**scores, "table": make_table(found)}
