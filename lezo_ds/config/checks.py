"""The rules between the values of a configuration. `schema` has those of single values.

They are checked before anything is loaded, for a configuration from the user: that of a recorded
run has passed them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lezo_ds.config.components import (
    DESCRIBING_KEYS,
    described_task,
    is_replayable,
    make_estimator,
    make_law,
    make_schedule,
    num_groups,
    num_passes,
)
from lezo_ds.config.schema import (
    MOST_ITEMS,
    READER,
    TRAINED,
    ZEROTH_ORDER,
    PeftConfig,
    ReadingConfig,
    RunConfig,
    ZoConfig,
)
from lezo_ds.errors import UserError
from lezo_ds.registry import names_code, options_of
from lezo_ds.tasks.custom import CUSTOM
from lezo_ds.tasks.template import field_text
from lezo_ds.user_code import call_of_user
from lezo_ds.zo.estimators import ESTIMATORS, Estimator
from lezo_ds.zo.layers import LAYER_POLICIES, LayerPolicy
from lezo_ds.zo.passes import can_group


def checked(config: RunConfig) -> RunConfig:
    """Return the configuration with all options of its components.

    This imports the user's modules that the configuration names in the section zo.

    Raises:
        UserError: Two values contradict each other, or the method needs a value that is not set.
    """
    check_reading(config.reading)
    if config.method not in TRAINED:
        if config.peft.path is not None:
            raise UserError(
                f"peft.path is an adapter, and method={config.method} scores the model without one",
                fix=f"run lezo-ds evaluate --model {config.peft.path}, or set peft.path=null",
            )
        return config
    _check_training(config)
    needed: dict[str, object] = {"train.steps": config.train.steps or config.train.epochs}
    if config.method in ZEROTH_ORDER:
        _refuse_missing(config.method, needed | _needed(config.zo))
        _check_groups(config)
        num_steps = config.train.steps
        if num_steps is None:
            # `with_steps` checks their number, which the examples decide. This one breaks no rule.
            num_steps = config.zo.warmup_steps + 1
        zo = checked_optimizer(config.zo, config.peft, config.model.bits, num_steps)
        config = replace(config, zo=zo)
        _ask_estimator(zo, num_groups(config))
    _refuse_missing(config.method, needed)
    check_world(replace(config, partition_size=None), world_size=1)
    return config


def with_steps(config: RunConfig, num_examples: int) -> RunConfig:
    """Return the configuration of a run on some examples, with the train.steps of train.epochs.

    Raises:
        UserError: The steps are too many, or another key does not fit their number.
    """
    if config.train.epochs is None:
        return config
    num_steps = max(1, round(config.train.epochs * num_examples / config.train.batch_size))
    if num_steps > MOST_ITEMS:
        raise UserError(
            f"train.epochs={config.train.epochs:g} is {num_steps:.3g} steps on {num_examples} "
            f"examples, not at most {MOST_ITEMS}",
            fix="lower train.epochs",
        )
    steps = checked(replace(config, train=replace(config.train, steps=num_steps, epochs=None)))
    return replace(steps, train=replace(steps.train, epochs=config.train.epochs))


def check_arguments(
    model: object, zo: object, ds_config: object, peft: object, values: Mapping[str, object]
) -> RunConfig:
    """Refuse arguments of `lezo_ds.initialize` of a wrong type, or that a recipe refuses, too.

    Return the configuration that the model and `values` stand for.

    Args:
        model: A name or path.
        zo: Its `config`, a ZoConfig.
        ds_config: A mapping, a name or path, or None.
        peft: A PeftConfig or None.
        values: The others, by the keys of a recipe.
    """
    path = (str, os.PathLike)
    none = type(None)
    expected = (
        ("model", model, path, "pass the model's directory or its id on the Hub"),
        ("config", zo, ZoConfig, "pass lezo_ds.config.ZoConfig(...)"),
        ("ds_config", ds_config, (*path, Mapping, none), "pass DeepSpeed's JSON as a dict or file"),
        ("peft", peft, (PeftConfig, none), "pass lezo_ds.config.PeftConfig(...) or None"),
    )
    for name, value, type_of_value, fix in expected:
        if not isinstance(value, type_of_value):
            kind = type(value).__name__
            raise UserError(f"{name} in lezo_ds.initialize is of type {kind}", fix=fix)
    flat = {"run_dir": "", "model.path": str(model), **values}
    run: RunConfig = READER.read(flat, "lezo_ds.initialize")
    return run


def checked_optimizer(
    zo: ZoConfig, peft: PeftConfig | None, bits: int | None, num_steps: int | None
) -> ZoConfig:
    """Return the settings of zeroth-order training with all options of its components.

    A recipe and `lezo_ds.initialize` have the same rules, which are here.

    Args:
        zo: The settings.
        peft: The adapter to train, if there is one.
        bits: In which the matrices of the base are stored; None for a dtype.
        num_steps: Number of steps of the run, if it is known.

    Raises:
        UserError: Two values contradict each other, or one that is needed is not set.
    """
    kind = "none" if peft is None else peft.kind
    _check_optimizer(zo, kind, bits, num_steps)
    _refuse_missing("lezo", _needed(zo))
    estimator = ESTIMATORS.find(zo.estimator)
    policy = LAYER_POLICIES.find(zo.layer_policy)
    zo = replace(
        zo,
        estimator_options=_all_options(
            "zo.estimator_options", zo.estimator_options, estimator, Estimator
        ),
        layer_policy_options=_all_options(
            "zo.layer_policy_options", zo.layer_policy_options, policy, LayerPolicy
        ),
    )
    make_schedule(zo, num_steps)
    if zo.examples_per_direction is None:
        _ask_estimator(zo, 1)
    return zo


def _ask_estimator(zo: ZoConfig, number: int) -> None:
    """Ask the estimator, which may be the user's own, whether it takes this number of groups."""
    call_of_user(f"zo.estimator={zo.estimator}", make_estimator(zo).check_groups, number)


def _refuse_if(is_broken: bool, problem: str, fix: str) -> None:
    if is_broken:
        raise UserError(problem, fix=fix)


def _refuse_missing(method: str, needed: Mapping[str, object]) -> None:
    missing = [key for key, value in needed.items() if value is None]
    if missing:
        raise UserError(f"method={method} needs {', '.join(missing)}", fix=f"add {missing[0]}=...")


def _needed(zo: ZoConfig) -> dict[str, object]:
    return {"zo.learning_rate": zo.learning_rate, "zo.sparsity": zo.sparsity}


def check_reading(reading: ReadingConfig) -> None:
    """Refuse values that contradict each other, of those by which a model reads and answers.

    Raises:
        UserError: The first contradiction.
    """
    data = reading.data
    generation = reading.generation
    if data.task == CUSTOM:
        task = described_task(data)
        _refuse_if(
            data.train is None and data.path is None,
            "a task of your own needs data.train",
            "add data.train=FILE",
        )
        _refuse_if(
            not (task.has_answers or any(map(names_code, reading.objectives))),
            "data.prompt alone does not say what the model shall answer",
            "add data.labels, data.choices, data.completion, or a reward: "
            "train.objective=module:name",
        )
    else:
        for name in DESCRIBING_KEYS:
            _refuse_if(
                getattr(data, name) not in (None, False),
                f"data.{name} cannot change data.task={data.task}",
                f"set data.task={CUSTOM}",
            )
    _refuse_if(
        bool(data.chat_template_kwargs) and not data.in_chat,
        "data.chat_template_kwargs needs data.chat_template=true or data.messages",
        "add data.chat_template=true",
    )
    _refuse_if(
        reading.method == "icl" and data.in_chat,
        "method=icl shows no examples in a chat template",
        "set method=zero_shot, or write the examples into the conversations",
    )
    _refuse_if(
        data.train is None and (data.validation is not None or data.test is not None),
        "data.validation and data.test need data.train",
        "add data.train",
    )
    _refuse_if(
        data.train is not None and data.path is not None,
        "data.train and data.path both say where the data is",
        "remove data.path",
    )
    _refuse_if("" in (generation.stop or ()), "generation.stop has an empty string", "remove it")
    is_drawn = generation.num_samples > 1 or generation.top_p is not None
    _refuse_if(
        is_drawn and generation.temperature == 0,
        "generation.num_samples and top_p need a temperature: without one, all answers are the "
        "same",
        "set generation.temperature=1",
    )


def _check_training(config: RunConfig) -> None:
    """Check the rules of training but those of `_check_optimizer` and `_check_groups`."""
    _refuse_if(
        config.train.steps is not None and config.train.epochs is not None,
        "train.steps and train.epochs both say how long the run is",
        "remove one of them",
    )
    if config.method not in ZEROTH_ORDER:
        _check_bits(config.method, config.peft.kind, config.model.bits)
    _refuse_if(
        config.peft.path is not None and config.peft.kind != "lora",
        f"peft.path is a LoRA adapter, and peft.kind={config.peft.kind}",
        "set peft.kind=lora, or peft.path=null",
    )
    _refuse_if(
        config.elastic.lighthouse is not None and not is_replayable(config),
        f"replicas cannot train with method={config.method} and peft.kind={config.peft.kind}",
        "set method=lezo and peft.kind=lora, or elastic.lighthouse=null",
    )


def _check_optimizer(zo: ZoConfig, peft_kind: str, bits: int | None, num_steps: int | None) -> None:
    """Check the rules of zeroth-order training that need no batch."""
    law = make_law(zo)
    _check_bits("lezo", peft_kind, bits)
    _refuse_if(
        law.perturbs == "products" and peft_kind == "prefix",
        "zo.noise_rank perturbs matrices, and a prefix has none",
        "set zo.noise_rank=0, or peft.kind=lora",
    )
    _refuse_if(
        zo.examples_per_direction is not None and not law.takes_groups,
        f"zo.examples_per_direction={zo.examples_per_direction} needs directions of low rank",
        "set zo.noise_rank=1, or zo.examples_per_direction=null",
    )
    _refuse_if(
        num_steps is not None and zo.warmup_steps >= num_steps,
        f"zo.warmup_steps={zo.warmup_steps} is not below train.steps={num_steps}",
        "set zo.warmup_steps=0",
    )


def _check_bits(method: str, peft_kind: str, bits: int | None) -> None:
    needs_weights = method not in ZEROTH_ORDER or peft_kind == "none"
    _refuse_if(
        bits is not None and needs_weights,
        f"model.bits={bits} stores weights that cannot change, and method={method} with "
        f"peft.kind={peft_kind} changes them or needs their gradients",
        "set method=lezo peft.kind=lora, or model.bits=null",
    )


def _check_groups(config: RunConfig) -> None:
    """Check the rules of groups of examples and the batch of a recipe."""
    size = config.zo.examples_per_direction
    batch_size = config.train.batch_size
    micro_batch_size = config.train.micro_batch_size
    if size is not None and batch_size % micro_batch_size == 0:  # `check_world` refuses another
        _refuse_if(
            not can_group(size, batch_size, batch_size // micro_batch_size),
            f"zo.examples_per_direction={size} does not divide train.batch_size={batch_size} and "
            f"train.micro_batch_size={micro_batch_size} into whole groups",
            "set zo.examples_per_direction=1, or null",
        )


def check_partition(partition_size: int | None, world_size: int) -> None:
    """Refuse shard groups into which the ranks do not split evenly."""
    if partition_size is not None and world_size % partition_size != 0:
        raise UserError(
            f"partition_size={partition_size} does not divide {world_size} ranks",
            fix="set partition_size=1, or null, or start more ranks: deepspeed --num_gpus N",
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
        fix = f"set train.micro_batch_size to one of {', '.join(fitting)}"
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


def _all_options(
    key: str, values: Mapping[str, Any], component: type, kind: type
) -> dict[str, Any]:
    """Return all options of a component: those in `values`, and the defaults of the others.

    An option that takes a text takes a number as its text: `blocks=1` is the text "1".

    Raises:
        UserError: The component has no such option, or one of another type.
    """
    defaults = options_of(component, kind)
    options = dict(defaults)
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(default, str) and isinstance(value, int | float):
            value = field_text(name, value)
        is_integer_for_float = type(value) is int and isinstance(default, float)
        if type(value) is not type(default) and not is_integer_for_float:
            known = ", ".join(f"{option}={shown!r}" for option, shown in defaults.items())
            raise UserError(
                f"{key}.{name}={value!r} is no option of {component.__name__}",
                fix=f"its options and their defaults: {known or 'none'}",
            )
        options[name] = value
    return options
