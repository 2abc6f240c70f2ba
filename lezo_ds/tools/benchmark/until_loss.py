"""Time until good: each variant trains a recipe's model until the validation loss is low enough."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Sequence

import torch

from lezo_ds import distributed
from lezo_ds.config import RunConfig
from lezo_ds.engine.lezo_engine import LezoEngine
from lezo_ds.errors import UserError
from lezo_ds.runs.run import eval_interval
from lezo_ds.tools.benchmark.measure import Row, time_once
from lezo_ds.tools.benchmark.recipe_inputs import RecipeInputs
from lezo_ds.tools.benchmark.settings import Variant
from lezo_ds.tools.benchmark.steps import Steps, start_steps

logger = logging.getLogger(__name__)


def measure_until_loss(
    config: RunConfig, variants: Sequence[Variant], *, until_loss: float, threads: int = 1
) -> list[Row]:
    """Train with each variant until the validation loss is low enough, and return the rows. A collective.

    Each variant starts from the recipe's weights and ends when an evaluation finds a loss of `until_loss` or
    less, after `train.steps` steps, or when the loss is not finite. Evaluations are due before the first step
    and every `train.eval_every` steps. They do not count in the seconds. The variants run one after the
    other. They get the same examples, but "mezo_reference" and "naive_zero3" draw their noise and their
    dropped blocks from other generators than our step, so each follows a trajectory of its own.

    Args:
        config: the recipe.
        variants: at least one; ratios are relative to the first.
        until_loss: the validation loss to reach.
        threads: CPU threads of this rank.

    Raises:
        UserError: a recipe that cannot be compared, or whose validation has to generate answers.
        DivergenceError: a variant of ours skipped 10 steps in a row.
    """
    distributed.init_distributed()
    torch.set_num_threads(threads)
    inputs = RecipeInputs(config)
    if inputs.data.dev.prompts:
        raise UserError(
            "--until-loss needs a task with candidates",
            got=f"data.task={config.data.task}, whose validation generates answers",
            expected="a task of classification or multiple choice",
            fix="choose another recipe, or leave out --until-loss",
        )
    started = functools.cache(inputs.start_engine)

    def fresh_engine() -> LezoEngine:
        engine = started()
        engine.load_model(None, 0)
        return engine

    rows: list[Row] = []
    for variant in variants:
        steps = start_steps(variant, inputs, plain=inputs.plain_model, engine=fresh_engine)
        found = _train(variant, steps, inputs, until_loss=until_loss)
        # A speedup of something that did not get there means nothing.
        both = [row for row in (rows[0] if rows else found, found) if row["loss"] <= until_loss]
        ratio = both[0]["seconds"] / both[1]["seconds"] if len(both) == 2 and both[1]["seconds"] else None
        rows.append(found | {"ratio": ratio, "load": os.getloadavg()[0]})
    who = {"measured": "until loss", "until_loss": until_loss, "reference": variants[0].text}
    origin = {**inputs.columns, "ranks": distributed.world_size(), "threads": threads}
    return [origin | who | row for row in rows]


def _train(variant: Variant, steps: Steps, inputs: RecipeInputs, *, until_loss: float) -> Row:
    num_steps = inputs.config.train.steps
    assert num_steps is not None, "a zeroth-order recipe has a number of steps"
    every = eval_interval(inputs.config, num_steps)
    done, seconds, fed_tokens = 0, 0.0, 0
    loss = inputs.validation_loss(steps.model)
    _log(variant, done, seconds, loss)
    while math.isfinite(loss) and loss > until_loss and done < num_steps:
        for step in range(done, min(done + every, num_steps)):
            seconds += time_once(steps.step)
            fed_tokens += steps.fed_tokens(step)
            done += 1
        loss = inputs.validation_loss(steps.model)
        _log(variant, done, seconds, loss)
    return {
        "variant": variant.text,
        "sparsity": variant.sparsity,
        "loss": loss,
        "steps": done,
        "forward_passes": done * steps.num_probes,
        "seconds": seconds,
        "fed_tokens": round(fed_tokens / done) if done else None,
    }


def _log(variant: Variant, step: int, seconds: float, loss: float) -> None:
    if distributed.rank() == 0:
        text = "%s, step %d: validation loss %.4f after %.1f seconds of training"
        logger.info(text, variant.text, step, loss, seconds)
