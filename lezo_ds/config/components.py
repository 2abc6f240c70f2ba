"""What the values of a configuration stand for: components, the task, and numbers of passes."""

from __future__ import annotations

import dataclasses
import math

from lezo_ds.config.schema import READER, ZEROTH_ORDER, DataConfig, RunConfig, ZoConfig
from lezo_ds.errors import UserError
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Task
from lezo_ds.tasks.custom import CUSTOM, Description, make_task
from lezo_ds.tasks.metrics import find_score
from lezo_ds.user_code import call_of_user
from lezo_ds.zo.estimators import ESTIMATORS, Estimator
from lezo_ds.zo.laws import LAWS, PerturbationLaw, TrainedPart
from lezo_ds.zo.layers import LAYER_POLICIES, LayerPolicy, num_dropped
from lezo_ds.zo.schedules import SCHEDULES, LearningRates

DESCRIBING_KEYS = tuple(field.name for field in dataclasses.fields(Description))
"""Keys of the section data that describe a task. A metric may be set for any task."""


def make_estimator(zo: ZoConfig) -> Estimator:
    """Return the estimator with its options. UserError: no component has its name, or it fails."""
    return call_of_user(
        f"zo.estimator={zo.estimator}",
        ESTIMATORS.find(zo.estimator),
        perturbation_scale=zo.perturbation_scale,
        num_directions=zo.directions,
        **zo.estimator_options,
    )


def make_law(zo: ZoConfig) -> PerturbationLaw:
    """Return what a direction of the run is. UserError: no law has this name, or it fails."""
    law = zo.law
    if law is None:
        law = "low-rank" if zo.noise_rank else "dense"
    return call_of_user(f"zo.law={law}", LAWS.find(law), zo.noise_distribution, zo.noise_rank)


def trained_part(zo: ZoConfig) -> TrainedPart:
    """Return the part of the weights, or of the adapter, that is perturbed and updated."""
    part = make_law(zo).perturbs
    return "blocks" if part == "all" and zo.only_blocks else part


def make_layer_policy(zo: ZoConfig, num_layers: int, *, trains_outside: bool = True) -> LayerPolicy:
    """Return the layer policy with its options.

    Args:
        zo: The section zo, with a sparsity.
        num_layers: The number of transformer blocks.
        trains_outside: Whether weights outside the blocks are trained, too.

    Raises:
        UserError: No component has its name, it fails, or nothing would be trained.
    """
    assert zo.sparsity is not None, "zeroth-order training has a sparsity"
    dropped = num_dropped(zo.sparsity, num_layers)
    if dropped == num_layers and not trains_outside:
        raise UserError(
            f"zo.sparsity={zo.sparsity} drops all {num_layers} blocks, and nothing outside them is "
            "trained",
            fix="set zo.sparsity=0.5, or zo.only_blocks=false and peft.kind=none",
        )
    return call_of_user(
        f"zo.layer_policy={zo.layer_policy}",
        LAYER_POLICIES.find(zo.layer_policy),
        num_layers,
        dropped,
        trains_outside=trains_outside,
        **zo.layer_policy_options,
    )


def make_schedule(zo: ZoConfig, num_steps: int | None) -> LearningRates:
    """Return the learning rate of each step of a run of `num_steps` steps; None: of any length.

    Raises:
        UserError: The schedule depends on the number of steps, which is None.
    """
    assert zo.learning_rate is not None, "zeroth-order training has a learning rate"
    schedule = SCHEDULES.find(zo.lr_schedule)
    if schedule.depends_on_length and num_steps is None:
        raise UserError(
            f"zo.lr_schedule={zo.lr_schedule} depends on the number of steps, which is not set",
            fix="pass num_steps to initialize, or set zo.lr_schedule=constant",
        )
    return LearningRates(schedule, zo.learning_rate, zo.warmup_steps, num_steps)


def find_task(data: DataConfig) -> Task:
    """Return the task that a configuration names or describes, with the metric that it asks for.

    Raises:
        UserError: No component has its name, the description is incomplete, or the metric does not
            fit the task.
    """
    task = described_task(data) if data.task == CUSTOM else TASKS.find(data.task)
    if isinstance(task, type):
        task = call_of_user(f"data.task={data.task}", task)
    if data.metric is not None:
        task = dataclasses.replace(task, metric=data.metric)
    find_score(task)
    return task


def described_task(data: DataConfig) -> Task:
    """Return the task that a configuration with `data.task` custom describes. It imports nothing.

    Raises:
        UserError: The description is incomplete.
    """
    if data.prompt is None and data.messages is None:
        raise UserError(
            f"data.task={CUSTOM} needs data.prompt or data.messages",
            fix="add a template of the text that the model reads, such as "
            '"{text} This ticket is about"',
        )
    return make_task(Description(**{name: getattr(data, name) for name in DESCRIBING_KEYS}))


def may_differ_on_resume(config: RunConfig) -> frozenset[str]:
    """Return the keys that may change when a run resumes.

    train.steps may not if the learning rate of a step depends on it. How answers are written may,
    if a run writes none.
    """
    may_differ = READER.may_differ
    if config.data.messages is not None and config.train.objective == "task":
        may_differ |= {"generation.stop", "generation.max_new_tokens"}
    schedule = SCHEDULES.find(config.zo.lr_schedule)
    if config.method == "adamw" or schedule.depends_on_length:
        may_differ -= {"train.steps"}
    return may_differ


def is_replayable(config: RunConfig) -> bool:
    """Return whether a base model and a journal give the weights of a run on any machine."""
    # A prefix starts from a forward pass, which another machine does not repeat bit for bit.
    return config.method in ZEROTH_ORDER and config.peft.kind != "prefix"


def eval_every(config: RunConfig) -> int:
    """Return the number of steps between evaluations, by default a tenth of the run."""
    return config.train.eval_every or max(1, (config.train.steps or 0) // 10)


def num_passes(config: RunConfig) -> int:
    """Return how many forward passes a zeroth-order step has, on all ranks together."""
    num_micro_batches = config.train.batch_size // config.train.micro_batch_size
    num_probes = make_estimator(config.zo).num_probes
    return num_micro_batches * math.ceil(num_probes / probes_per_pass(config.zo))


def probes_per_pass(zo: ZoConfig) -> int:
    """Return how many probes of a step a forward pass runs.

    It affects the last bits of losses, so it depends on nothing but the settings.
    """
    most = zo.probes_per_pass or make_law(zo).most_probes
    return min(most, make_estimator(zo).num_probes)


def num_groups(config: RunConfig) -> int:
    """Return how many groups of examples, each with directions of its own, a step has."""
    batch_size = config.train.batch_size
    return batch_size // (config.zo.examples_per_direction or batch_size)


def num_directions(config: RunConfig) -> int:
    """Return how many directions a zeroth-order step measures, those of all groups of examples."""
    return config.zo.directions * num_groups(config)


def copies_per_pass(config: RunConfig) -> int:
    """Return how many copies of the batch a training pass runs: one a probe, or only the batch."""
    if config.method not in ZEROTH_ORDER:
        return 1
    return probes_per_pass(config.zo)
