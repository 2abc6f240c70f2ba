"""The components of the algorithm that a configuration names."""

from __future__ import annotations

from lezo_ds.config.schema import RESUME_MAY_DIFFER, ZEROTH_ORDER, RunConfig, ZoConfig
from lezo_ds.errors import UserError
from lezo_ds.zo.estimators import ESTIMATORS, Estimator
from lezo_ds.zo.layers import LAYER_POLICIES, LayerPolicy, num_dropped
from lezo_ds.zo.passes import passes_of_step
from lezo_ds.zo.schedules import SCHEDULES, LearningRates

PASSES_OF_BACKPROPAGATION = 3
"""Forward passes that a step of AdamW counts as: its backward pass takes about the time of two."""


def make_estimator(zo: ZoConfig) -> Estimator:
    """Return the estimator of a run."""
    return ESTIMATORS.find(zo.estimator)(
        perturbation_scale=zo.perturbation_scale, num_directions=zo.directions, **zo.estimator_options
    )


def make_layer_policy(zo: ZoConfig, num_layers: int, *, trains_outside: bool = True) -> LayerPolicy:
    """Return the layer policy of a run on a model with `num_layers` transformer blocks.

    Args:
        zo: the settings.
        num_layers: number of the model's transformer blocks.
        trains_outside: whether weights outside the blocks are trained.
    """
    assert zo.sparsity is not None, "zeroth-order training has a sparsity"
    dropped = num_dropped(zo.sparsity, num_layers)
    if dropped == num_layers and not trains_outside:
        raise UserError(
            f"zo.sparsity={zo.sparsity} drops all {num_layers} blocks, and nothing outside them is trained",
            fix="set zo.sparsity=0.5, or zo.only_blocks=false and peft.kind=none",
        )
    policy = LAYER_POLICIES.find(zo.layer_policy)
    return policy(num_layers=num_layers, num_dropped=dropped, **zo.layer_policy_options)


def make_schedule(zo: ZoConfig, num_steps: int | None) -> LearningRates:
    """Return the learning rate of each step of a run."""
    assert zo.learning_rate is not None, "zeroth-order training has a learning rate"
    schedule = SCHEDULES.find(zo.lr_schedule)
    if schedule.depends_on_length and num_steps is None:
        raise UserError(
            f"zo.lr_schedule={zo.lr_schedule} depends on the number of steps, which is not set",
            fix="pass num_steps to initialize, or set zo.lr_schedule=constant",
        )
    return LearningRates(schedule, zo.learning_rate, zo.warmup_steps, num_steps)


def may_differ_on_resume(config: RunConfig) -> frozenset[str]:
    """Return the dotted keys that may differ between a zeroth-order run and its resumption.

    With another number of steps, a schedule that depends on it would have given other learning rates from the
    first step on.
    """
    if SCHEDULES.find(config.zo.lr_schedule).depends_on_length:
        return RESUME_MAY_DIFFER - {"train.steps"}
    return RESUME_MAY_DIFFER


def num_passes(config: RunConfig) -> int:
    """Return how many forward passes a zeroth-order step has, on all ranks together."""
    num_micro_batches = config.train.batch_size // config.train.micro_batch_size
    num_probes = make_estimator(config.zo).num_probes
    return len(passes_of_step(num_micro_batches, num_probes, config.zo.probes_per_pass))


def forward_passes_per_step(config: RunConfig) -> int:
    """Return how many times a step runs its batch through the model, in units of a forward pass."""
    if config.method in ZEROTH_ORDER:
        return make_estimator(config.zo).num_probes
    return PASSES_OF_BACKPROPAGATION if config.method == "adamw" else 0


def copies_per_pass(config: RunConfig) -> int:
    """Return how many copies of the batch a training pass runs: one for each probe, or the batch itself."""
    if config.method not in ZEROTH_ORDER:
        return 1
    return min(config.zo.probes_per_pass, make_estimator(config.zo).num_probes)
