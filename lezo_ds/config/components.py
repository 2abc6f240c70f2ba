"""What the values of a configuration stand for: components and numbers, and what training needs.

What needs user code is checked here, when a component is made, and not by `schema`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lezo_ds.config.schema import CUSTOM, MOST_ITEMS, RunConfig, ZoConfig, keys_with, refuse_if
from lezo_ds.errors import UserError
from lezo_ds.registry import names_code, options_of
from lezo_ds.user_code import call_of_user
from lezo_ds.zo.estimators import ESTIMATORS, Estimator
from lezo_ds.zo.laws import LAWS, PerturbationLaw, TrainedPart
from lezo_ds.zo.layers import LAYER_POLICIES, LayerPolicy, num_dropped
from lezo_ds.zo.passes import can_group
from lezo_ds.zo.schedules import SCHEDULES, LearningRates


def make_estimator(zo: ZoConfig) -> Estimator:
    """Return the estimator with its options.

    Raises:
        UserError: No component has its name, it has no such option, or it fails.
    """
    estimator = ESTIMATORS.find(zo.estimator)
    _check_options("zo.estimator_options", zo.estimator_options, estimator, Estimator)
    name = f"zo.estimator={zo.estimator}"
    made = call_of_user(
        name,
        estimator,
        perturbation_scale=zo.perturbation_scale,
        num_directions=zo.directions,
        **zo.estimator_options,
    )
    call_of_user(name, made.checked_probes, ())
    return made


def make_law(zo: ZoConfig) -> PerturbationLaw:
    """Return what a direction of the run is. UserError: no law has this name, or it fails."""
    law = zo.law or ("low-rank" if zo.noise_rank else "dense")
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
        UserError: No component has its name, it has no such option, it fails, or nothing would be
            trained.
    """
    assert zo.sparsity is not None, "check_zo requires it"
    dropped = num_dropped(zo.sparsity, num_layers)
    refuse_if(
        dropped == num_layers and not trains_outside,
        f"zo.sparsity={zo.sparsity} drops all {num_layers} blocks, and nothing outside them is "
        "trained",
        "set zo.sparsity=0.5, or zo.only_blocks=false and peft.kind=none",
    )
    policy = _find_policy(zo)
    return call_of_user(
        f"zo.layer_policy={zo.layer_policy}",
        policy,
        num_layers,
        dropped,
        trains_outside=trains_outside,
        **zo.layer_policy_options,
    )


def _find_policy(zo: ZoConfig) -> type[LayerPolicy]:
    policy = LAYER_POLICIES.find(zo.layer_policy)
    _check_options("zo.layer_policy_options", zo.layer_policy_options, policy, LayerPolicy)
    return policy


def _check_options(key: str, values: Mapping[str, Any], component: type, kind: type) -> None:
    """Refuse an option that a component does not have, or that has another type."""
    defaults = options_of(component, kind)
    for name, value in values.items():
        default = defaults.get(name)
        is_integer_for_float = type(value) is int and isinstance(default, float)
        if type(value) is type(default) or is_integer_for_float:
            continue
        known = ", ".join(f"{option}={shown!r}" for option, shown in defaults.items())
        problem = f"{key}.{name}={value!r} is not an option of {component.__name__}"
        fix = f"its options and their defaults: {known or 'none'}"
        if name in defaults:
            problem = f"{key}.{name}={value!r} is not of the type of its default, {default!r}"
            fix = "correct it"
            if isinstance(default, str):  # which YAML reads as a number
                fix = f"write it in quotes, with others for a shell: '{key}.{name}=\"{value}\"'"
        raise UserError(problem, fix=fix)


def make_schedule(zo: ZoConfig, num_steps: int | None) -> LearningRates:
    """Return the learning rate of each step of a run of `num_steps` steps; None: of any length.

    Raises:
        UserError: The schedule depends on the number of steps, which is None; or the decay of a
            step is the whole weight.
    """
    assert zo.learning_rate is not None, "check_zo requires it"
    refuse_if(
        zo.learning_rate * zo.weight_decay >= 1,
        f"zo.learning_rate={zo.learning_rate} times zo.weight_decay={zo.weight_decay} is not below "
        "1: a step would leave nothing of a weight, or turn its sign",
        "set a smaller zo.weight_decay, such as 0.01",
    )
    schedule = SCHEDULES.find(zo.lr_schedule)
    refuse_if(
        schedule.depends_on_length and num_steps is None,
        f"zo.lr_schedule={zo.lr_schedule} depends on the number of steps, which is not set",
        "pass num_steps to initialize, or set zo.lr_schedule=constant",
    )
    return LearningRates(schedule, zo.learning_rate, zo.warmup_steps, num_steps)


def may_differ_on_resume(config: RunConfig) -> frozenset[str]:
    """Return the keys that may change when a run resumes.

    train.steps may not if the learning rate of a step depends on it. How answers are written may,
    if a run writes none.
    """
    may_differ = keys_with("may_differ_on_resume")
    if config.data.messages is not None and config.train.objective == "task":
        may_differ |= {"generation.stop", "generation.max_new_tokens"}
    if SCHEDULES.find(config.zo.lr_schedule).depends_on_length:
        may_differ -= {"train.steps"}
    return may_differ


def is_replayable(config: RunConfig) -> bool:
    """Return whether a base model and a journal give the weights of a run on any machine."""
    # A prefix starts from a forward pass, which another machine does not repeat bit for bit. So the
    # run keeps a snapshot of step 0.
    return config.peft.kind != "prefix"


def eval_every(config: RunConfig) -> int:
    """Return the number of steps between evaluations, by default a tenth of the run."""
    return config.train.eval_every or max(1, (config.train.steps or 0) // 10)


def num_passes(config: RunConfig) -> int:
    """Return how many forward passes a step has, on all ranks together."""
    num_micro_batches = config.train.batch_size // config.train.micro_batch_size
    num_probes = make_estimator(config.zo).num_probes
    return num_micro_batches * math.ceil(num_probes / probes_per_pass(config.zo))


def probes_per_pass(zo: ZoConfig) -> int:
    """Return how many probes of a step a forward pass runs: by default, as many as the law says.

    It affects the last bits of losses, so it depends on nothing but the settings.
    """
    most = zo.probes_per_pass or make_law(zo).most_probes
    return min(most, make_estimator(zo).num_probes)


def num_groups(config: RunConfig) -> int:
    """Return how many groups of examples, each with directions of its own, a step has."""
    batch_size = config.train.batch_size
    return batch_size // (config.zo.examples_per_direction or batch_size)


def num_directions(config: RunConfig) -> int:
    """Return how many directions a step measures, those of all groups of examples."""
    return config.zo.directions * num_groups(config)


def with_steps(config: RunConfig, num_examples: int) -> RunConfig:
    """Return the configuration of a run on some examples, with the train.steps of train.epochs.

    Raises:
        UserError: The steps are too many, or another key does not fit their number.
    """
    if config.train.epochs is None:
        return config
    num_steps = max(1, round(config.train.epochs * num_examples / config.train.batch_size))
    refuse_if(
        num_steps > MOST_ITEMS,
        f"train.epochs={config.train.epochs:g} is {num_steps:.3g} steps on {num_examples} "
        f"examples, not at most {MOST_ITEMS}",
        "lower train.epochs",
    )
    check_zo(config.zo, config.peft.kind, config.model.bits, num_steps)
    return config.with_section("train", steps=num_steps)


def check_training(config: RunConfig) -> None:
    """Refuse, before anything is loaded, a configuration with which no run can train.

    This imports the user's modules that the configuration names in the section zo.

    Raises:
        UserError: A key that training needs is not set, or two values contradict each other.
    """
    length = config.train.steps or config.train.epochs
    refuse_if(length is None, "training needs train.steps", "add train.steps=... or train.epochs=")
    refuse_if(
        config.train.steps is not None and config.train.epochs is not None,
        "train.steps and train.epochs both say how long the run is",
        "remove one of them",
    )
    check_data(config)
    # `with_steps` checks the number that the examples decide. This one breaks no rule.
    num_steps = config.train.steps or config.zo.warmup_steps + 1
    check_zo(config.zo, config.peft.kind, config.model.bits, num_steps)
    _check_groups(config)
    refuse_if(
        config.elastic.lighthouse is not None and not is_replayable(config),
        f"replicas cannot train with peft.kind={config.peft.kind}",
        "set peft.kind=lora, or elastic.lighthouse=null",
    )
    check_world(config.model_copy(update={"partition_size": None}), world_size=1)


def check_data(config: RunConfig, split: str | None = None) -> None:
    """Raise UserError if a user-defined task has no records, or neither right answers nor a reward.

    Args:
        config: The configuration.
        split: The only split to read, "dev" or "test", or None for all.
    """
    data = config.data
    files = {"dev": data.validation, "test": data.test}
    if split is None or files[split] is None:
        refuse_if(
            data.train is None and any(files.values()),
            "data.validation and data.test need data.train",
            "add data.train",
        )
        refuse_if(
            data.task == CUSTOM and data.train is None and data.path is None,
            "a task of your own needs data.train",
            "add data.train=FILE",
        )
    refuse_if(
        data.num_demonstrations > 0 and data.train is None and any(files.values()),
        "data.num_demonstrations shows training examples, and there is no data.train",
        "add data.train=FILE",
    )
    is_choice = data.labels is not None or data.choices is not None
    refuse_if(
        is_choice and data.label_field is None,
        "data.labels and data.choices need the column of the right answer",
        "add data.label_field=COLUMN",
    )
    has_answers = is_choice or data.completion is not None
    refuse_if(
        data.prompt is not None
        and not has_answers
        and not any(map(names_code, config.train.objectives)),
        "no key says what the model must answer",
        "set data.labels, data.choices, data.completion, or a reward: train.objective=module:name",
    )


def check_zo(zo: ZoConfig, peft_kind: str, bits: int | None, num_steps: int | None) -> None:
    """Refuse settings with which zeroth-order training cannot work.

    A recipe and `lezo_ds.initialize` have the same rules, which are here.

    Args:
        zo: The settings.
        peft_kind: The adapter to train, or "none".
        bits: In which the matrices of the base are stored; None for a dtype.
        num_steps: Number of steps of the run, if it is known.

    Raises:
        UserError: Two values contradict each other, or one that is needed is not set.
    """
    needed = {"zo.learning_rate": zo.learning_rate, "zo.sparsity": zo.sparsity}
    missing = [key for key, value in needed.items() if value is None]
    names = " and ".join(missing)
    refuse_if(bool(missing), f"training needs {names}", f"set {names}")
    refuse_if(
        bits == 4 and peft_kind == "none",
        "model.bits=4 has steps so long that training its codes diverges, and peft.kind=none "
        "trains them",
        "set peft.kind=lora, or model.bits=8",
    )
    law = make_law(zo)
    refuse_if(
        law.perturbs == "products" and peft_kind == "prefix",
        "zo.noise_rank perturbs matrices, and a prefix has none",
        "set zo.noise_rank=0, or peft.kind=lora",
    )
    refuse_if(
        zo.examples_per_direction is not None and not law.takes_groups,
        f"zo.examples_per_direction={zo.examples_per_direction} needs directions of low rank",
        "set zo.noise_rank=1, or zo.examples_per_direction=null",
    )
    refuse_if(
        num_steps is not None and zo.warmup_steps >= num_steps,
        f"zo.warmup_steps={zo.warmup_steps} is not below train.steps={num_steps}",
        "set zo.warmup_steps=0",
    )
    make_schedule(zo, num_steps)
    _find_policy(zo)
    estimator = make_estimator(zo)
    if zo.examples_per_direction is None:
        call_of_user(f"zo.estimator={zo.estimator}", estimator.check_groups, 1)


def _check_groups(config: RunConfig) -> None:
    """Check that the batch splits into groups of examples, which the estimator takes."""
    size = config.zo.examples_per_direction
    batch_size = config.train.batch_size
    micro_batch_size = config.train.micro_batch_size
    if size is not None and batch_size % micro_batch_size == 0:  # `check_world` refuses another
        refuse_if(
            not can_group(size, batch_size, batch_size // micro_batch_size),
            f"zo.examples_per_direction={size} does not divide train.batch_size={batch_size} and "
            f"train.micro_batch_size={micro_batch_size} into whole groups",
            "set zo.examples_per_direction=1, or null",
        )
    check = make_estimator(config.zo).check_groups
    call_of_user(f"zo.estimator={config.zo.estimator}", check, num_groups(config))


def check_partition(partition_size: int | None, world_size: int) -> None:
    """Refuse shard groups into which the ranks do not split evenly."""
    refuse_if(
        partition_size is not None and world_size % partition_size != 0,
        f"partition_size={partition_size} does not divide {world_size} ranks",
        "set partition_size=1, or null, or start more ranks: deepspeed --num_gpus N",
    )


def check_world(config: RunConfig, world_size: int) -> None:
    """Refuse a batch or a partition that does not split evenly among `world_size` ranks."""
    check_partition(config.partition_size, world_size)
    batch_size = config.train.batch_size
    micro_batch_size = config.train.micro_batch_size
    is_whole = batch_size % micro_batch_size == 0
    # Replicas may come and go, so they split the passes among their ranks evenly or not.
    if is_whole and (config.elastic.lighthouse or num_passes(config) % world_size == 0):
        return
    fitting = [
        str(size) for size in range(1, batch_size + 1) if batch_size % (size * world_size) == 0
    ]
    if fitting:
        fix = (
            f"set train.micro_batch_size to one of {', '.join(fitting)}, or, to resume a run, "
            "use fewer ranks"
        )
    else:
        per_rank = math.ceil(batch_size / world_size)
        fix = (
            f"set train.batch_size={per_rank * world_size} train.micro_batch_size={per_rank}, "
            "or use fewer ranks"
        )
    raise UserError(
        f"train.batch_size={batch_size} does not split into micro-batches of "
        f"train.micro_batch_size={micro_batch_size}, equally many for each of {world_size} ranks",
        fix=fix,
    )
