"""The components that a configuration names: of the algorithm, and its task."""

from __future__ import annotations

from dataclasses import fields, replace

from lezo_ds.config.schema import RESUME_MAY_DIFFER, ZEROTH_ORDER, DataConfig, RunConfig, ZoConfig
from lezo_ds.errors import UserError
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Task
from lezo_ds.tasks.custom import CUSTOM, Description, make_task
from lezo_ds.tasks.metrics import find_score
from lezo_ds.zo.estimators import ESTIMATORS, Estimator
from lezo_ds.zo.layers import LAYER_POLICIES, LayerPolicy, num_dropped
from lezo_ds.zo.passes import passes_of_step
from lezo_ds.zo.schedules import SCHEDULES, LearningRates

DESCRIBING_KEYS = tuple(field.name for field in fields(Description) if field.name != "metric")
"""Keys of the section data that describe a task. A metric may be set for any task."""


def make_estimator(zo: ZoConfig) -> Estimator:
    return ESTIMATORS.find(zo.estimator)(
        perturbation_scale=zo.perturbation_scale, num_directions=zo.directions, **zo.estimator_options
    )


def make_layer_policy(zo: ZoConfig, num_layers: int, *, trains_outside: bool = True) -> LayerPolicy:
    """Return the policy for `num_layers` blocks; `trains_outside`: whether other weights are trained, too."""
    assert zo.sparsity is not None, "zeroth-order training has a sparsity"
    dropped = num_dropped(zo.sparsity, num_layers)
    if dropped == num_layers and not trains_outside:
        raise UserError(
            f"zo.sparsity={zo.sparsity} drops all {num_layers} blocks, and nothing outside them is trained",
            fix="set zo.sparsity=0.5, or zo.only_blocks=false and peft.kind=none",
        )
    policy = LAYER_POLICIES.find(zo.layer_policy)
    return policy(num_layers, dropped, trains_outside=trains_outside, **zo.layer_policy_options)


def make_schedule(zo: ZoConfig, num_steps: int | None) -> LearningRates:
    assert zo.learning_rate is not None, "zeroth-order training has a learning rate"
    schedule = SCHEDULES.find(zo.lr_schedule)
    if schedule.depends_on_length and num_steps is None:
        raise UserError(
            f"zo.lr_schedule={zo.lr_schedule} depends on the number of steps, which is not set",
            fix="pass num_steps to initialize, or set zo.lr_schedule=constant",
        )
    return LearningRates(schedule, zo.learning_rate, zo.warmup_steps, num_steps)


def may_differ_on_resume(config: RunConfig) -> frozenset[str]:
    """Return the keys that may differ on resumption: train.steps only if the learning rate ignores it."""
    depends = config.method == "adamw" or SCHEDULES.find(config.zo.lr_schedule).depends_on_length
    return RESUME_MAY_DIFFER - ({"train.steps"} if depends else set())


def num_passes(config: RunConfig) -> int:
    """Return how many forward passes a zeroth-order step has, on all ranks together."""
    num_micro_batches = config.train.batch_size // config.train.micro_batch_size
    num_probes = make_estimator(config.zo).num_probes
    return len(passes_of_step(num_micro_batches, num_probes, config.zo.probes_per_pass))


def copies_per_pass(config: RunConfig) -> int:
    """Return how many copies of the batch a training pass runs: one for each probe, or the batch itself."""
    if config.method not in ZEROTH_ORDER:
        return 1
    return min(config.zo.probes_per_pass, make_estimator(config.zo).num_probes)


def find_task(data: DataConfig) -> Task:
    """Return the task that a configuration names or describes, with the metric that it asks for."""
    task = described_task(data) if data.task == CUSTOM else TASKS.find(data.task)
    if data.metric is not None:
        task = replace(task, metric=data.metric)
    find_score(task.metric, task.kind)
    return task


def described_task(data: DataConfig) -> Task:
    """Return the task that a configuration with `data.task` custom describes. Nothing is imported."""
    if data.prompt is None and data.messages is None:
        fix = 'add a template of the text that the model reads, such as "{text} This ticket is about"'
        raise UserError(f"data.task={CUSTOM} needs data.prompt or data.messages", fix=fix)
    if data.train is None and data.path is None:
        raise UserError("a task of your own needs data.train", fix="add data.train=FILE")
    return make_task(Description(**{name: getattr(data, name) for name in (*DESCRIBING_KEYS, "metric")}))
