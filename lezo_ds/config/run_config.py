"""A run's configuration: from a recipe and overrides, the rules between its values, and what they name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lezo_ds.config.paper import paper_recipe
from lezo_ds.config.paths import ROOT, expand, find_file, resolve_paths
from lezo_ds.config.schema import READER, TRAINED, ZEROTH_ORDER, DataConfig, RunConfig, ZoConfig
from lezo_ds.config.yaml_text import read_recipe
from lezo_ds.errors import UserError, did_you_mean
from lezo_ds.registry import FOLDERS, names_code, options_of
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Task
from lezo_ds.tasks.custom import CUSTOM, Description, make_task
from lezo_ds.tasks.metrics import find_score
from lezo_ds.zo.estimators import ESTIMATORS, Estimator
from lezo_ds.zo.laws import DenseLaw, PerturbationLaw
from lezo_ds.zo.layers import LAYER_POLICIES, LayerPolicy, num_dropped
from lezo_ds.zo.schedules import SCHEDULES, LearningRates

DESCRIBING_KEYS = tuple(
    field.name for field in dataclasses.fields(Description) if field.name != "metric"
)
"""Keys of the section data that describe a task. A metric may be set for any task."""


def load_config(source: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a recipe, changed by `key=value` overrides, of which the last counts.

    `source` is a YAML file, the name of one in launch/recipes, "paper" (see `paper_recipe`), or None.
    """
    if source is None:
        return config_from_dict({}, "the command line", overrides)
    if source == "paper":
        values, overrides = paper_recipe(overrides)
        return config_from_dict(values, "--config paper", overrides)
    name = expand(str(source), "--config")
    path = find_file(name)
    shipped = {file.stem: file for file in sorted((ROOT / "launch" / "recipes").glob("*.yaml"))}
    if not path.is_file() and path.suffix not in (".yaml", ".yml"):
        if name not in shipped:
            text = f"--config {name} is neither a file nor one of paper, {', '.join(shipped)}"
            raise UserError(text, fix=did_you_mean(name, shipped, "name a YAML file"))
        path = shipped[name]
    FOLDERS[:] = [str(path.parent.absolute())]
    return config_from_dict(read_recipe(path), str(path), overrides, folder=path.parent)


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as nested plain dicts, as in config.yaml and the journal."""
    return dataclasses.asdict(config)


def config_from_dict(
    values: Mapping[str, Any],
    where: str,
    overrides: Sequence[str] = (),
    *,
    recorded: bool = False,
    folder: Path | None = None,
) -> RunConfig:
    """Return the configuration that nested plain dicts hold: the inverse of `config_to_dict`.

    `where` names their source in messages. `recorded` values come from a run: their paths stay, and they are
    not checked against each other, which would import the user's modules that they name. `folder` is that of
    the recipe that holds the values (see `resolve_paths`).
    """
    flat = READER.flatten(values)
    if not recorded:
        flat = resolve_paths(flat, folder)
    flat |= resolve_paths(dict(READER.override(text) for text in overrides), None)
    if flat.get("data.prompt") is not None or flat.get("data.messages") is not None:
        flat.setdefault("data.task", CUSTOM)
    config: RunConfig = READER.read(flat, f"{where} and the command line" if overrides else where)
    return config if recorded else _checked(config)


def _checked(config: RunConfig) -> RunConfig:
    """Return the configuration with all options of its components, if its values fit each other."""
    _check_data(config)
    if config.method not in TRAINED:
        return config
    zo, steps = config.zo, config.train.steps
    if config.elastic.lighthouse and (
        config.method not in ZEROTH_ORDER or config.peft.kind == "prefix"
    ):
        text = f"replicas cannot train with method={config.method} and peft.kind={config.peft.kind}"
        raise UserError(text, fix="set method=lezo and peft.kind=lora, or elastic.lighthouse=null")
    needed: dict[str, object] = {"train.steps": steps}
    if config.method in ZEROTH_ORDER:
        needed |= {"zo.learning_rate": zo.learning_rate, "zo.sparsity": zo.sparsity}
        if steps is not None and zo.warmup_steps >= steps:
            text = f"zo.warmup_steps={zo.warmup_steps} is not below train.steps={steps}"
            raise UserError(text, fix="set zo.warmup_steps=0")
        estimator, policy = ESTIMATORS.find(zo.estimator), LAYER_POLICIES.find(zo.layer_policy)
        zo = replace(
            zo, estimator_options=_options("estimator", zo.estimator_options, estimator, Estimator)
        )
        of_policy = _options("layer_policy", zo.layer_policy_options, policy, LayerPolicy)
        config = replace(config, zo=replace(zo, layer_policy_options=of_policy))
    if missing := [key for key, value in needed.items() if value is None]:
        raise UserError(
            f"method={config.method} needs {', '.join(missing)}", fix=f"add {missing[0]}=..."
        )
    check_world(replace(config, partition_size=None), world_size=1)
    return config


def _options(key: str, values: Mapping[str, Any], component: type, kind: type) -> dict[str, Any]:
    """Return all options of a component, with their defaults. UserError: an unknown one, or another type."""
    defaults = options_of(component, kind)
    for name, value in values.items():
        default = defaults.get(name)
        if type(value) is not type(default) and not (
            isinstance(default, float) and type(value) is int
        ):
            known = ", ".join(f"{option}={shown!r}" for option, shown in defaults.items())
            text = f"zo.{key}_options.{name}={value!r} is no option of {component.__name__}"
            raise UserError(text, fix=f"its options and their defaults: {known or 'none'}")
    return {**defaults, **values}


def check_world(config: RunConfig, world_size: int) -> None:
    """Refuse a batch or a partition that does not split evenly among `world_size` ranks."""
    size, batch, micro = (
        config.partition_size,
        config.train.batch_size,
        config.train.micro_batch_size,
    )
    if size is not None and world_size % size:
        text = f"partition_size={size} does not divide {world_size} ranks"
        raise UserError(text, fix="set partition_size=1, or null")
    if batch % micro == 0 and (config.elastic.lighthouse or num_passes(config) % world_size == 0):
        return
    sizes = [str(size) for size in range(1, batch + 1) if batch % (size * world_size) == 0]
    above = math.ceil(batch / world_size) * world_size
    fix = f"set train.batch_size={above} train.micro_batch_size={above // world_size}, or use fewer ranks"
    if sizes:
        fix = f"set train.micro_batch_size to one of {', '.join(sizes)}"
    text = f"train.batch_size={batch} does not split into micro-batches of train.micro_batch_size={micro}"
    raise UserError(f"{text}, equally many for each of {world_size} ranks", fix=fix)


def _check_data(config: RunConfig) -> None:
    data = config.data
    if data.task == CUSTOM:
        if not (_described_task(data).has_answers or names_code(config.train.objective)):
            fix = "add data.labels, data.choices, data.completion, or a reward: train.objective=module:name"
            raise UserError("data.prompt alone does not say what the model shall answer", fix=fix)
    elif described := [
        name for name in DESCRIBING_KEYS if getattr(data, name) not in (None, False)
    ]:
        text = f"data.{described[0]} cannot change data.task={data.task}"
        raise UserError(text, fix=f"set data.task={CUSTOM}")
    if data.train is None and (data.validation is not None or data.test is not None):
        raise UserError("data.validation and data.test need data.train", fix="add data.train")
    if data.train is not None and data.path is not None:
        raise UserError(
            "data.train and data.path both say where the data is", fix="remove data.path"
        )
    if config.method == "icl" and (data.messages is not None or data.chat_template):
        text = f"method={config.method} shows no examples in a chat template"
        raise UserError(
            text, fix="set method=zero_shot, or write the examples into the conversations"
        )
    keys = config.generation
    if keys.stop is not None and not all(keys.stop):
        raise UserError("generation.stop has an empty string", fix="remove it")
    if keys.temperature == 0 and (keys.num_samples > 1 or keys.top_p is not None):
        text = "generation.num_samples and top_p need a temperature: without one, all answers are the same"
        raise UserError(text, fix="set generation.temperature=1")


def make_estimator(zo: ZoConfig) -> Estimator:
    return ESTIMATORS.find(zo.estimator)(
        perturbation_scale=zo.perturbation_scale,
        num_directions=zo.directions,
        **zo.estimator_options,
    )


def make_law(zo: ZoConfig) -> PerturbationLaw:
    """Return what a direction of the run is."""
    return DenseLaw(entries=zo.noise_distribution)


def make_layer_policy(zo: ZoConfig, num_layers: int, *, trains_outside: bool = True) -> LayerPolicy:
    """Return the policy for `num_layers` blocks; `trains_outside`: whether other weights are trained, too."""
    assert zo.sparsity is not None, "zeroth-order training has a sparsity"
    dropped = num_dropped(zo.sparsity, num_layers)
    if dropped == num_layers and not trains_outside:
        text = f"zo.sparsity={zo.sparsity} drops all {num_layers} blocks, and nothing outside them is trained"
        raise UserError(text, fix="set zo.sparsity=0.5, or zo.only_blocks=false and peft.kind=none")
    policy = LAYER_POLICIES.find(zo.layer_policy)
    return policy(num_layers, dropped, trains_outside=trains_outside, **zo.layer_policy_options)


def make_schedule(zo: ZoConfig, num_steps: int | None) -> LearningRates:
    assert zo.learning_rate is not None, "zeroth-order training has a learning rate"
    schedule = SCHEDULES.find(zo.lr_schedule)
    if schedule.depends_on_length and num_steps is None:
        text = f"zo.lr_schedule={zo.lr_schedule} depends on the number of steps, which is not set"
        raise UserError(text, fix="pass num_steps to initialize, or set zo.lr_schedule=constant")
    return LearningRates(schedule, zo.learning_rate, zo.warmup_steps, num_steps)


def may_differ_on_resume(config: RunConfig) -> frozenset[str]:
    """Return the keys that may differ on resumption: train.steps only if the learning rate ignores it."""
    depends = config.method == "adamw" or SCHEDULES.find(config.zo.lr_schedule).depends_on_length
    return READER.may_differ - ({"train.steps"} if depends else set())


def eval_every(config: RunConfig) -> int:
    """Return the number of steps between evaluations, by default a tenth of the run."""
    return config.train.eval_every or max(1, (config.train.steps or 0) // 10)


def num_passes(config: RunConfig) -> int:
    """Return how many forward passes a zeroth-order step has, on all ranks together."""
    num_micro_batches = config.train.batch_size // config.train.micro_batch_size
    return num_micro_batches * math.ceil(
        make_estimator(config.zo).num_probes / config.zo.probes_per_pass
    )


def copies_per_pass(config: RunConfig) -> int:
    """Return how many copies of the batch a training pass runs: one for each probe, or the batch itself."""
    if config.method not in ZEROTH_ORDER:
        return 1
    return min(config.zo.probes_per_pass, make_estimator(config.zo).num_probes)


def find_task(data: DataConfig) -> Task:
    """Return the task that a configuration names or describes, with the metric that it asks for."""
    task = _described_task(data) if data.task == CUSTOM else TASKS.find(data.task)
    if data.metric is not None:
        task = replace(task, metric=data.metric)
    find_score(task.metric, task.kind)
    return task


def _described_task(data: DataConfig) -> Task:
    """Return the task that a configuration with `data.task` custom describes. Nothing is imported."""
    if data.prompt is None and data.messages is None:
        fix = (
            'add a template of the text that the model reads, such as "{text} This ticket is about"'
        )
        raise UserError(f"data.task={CUSTOM} needs data.prompt or data.messages", fix=fix)
    if data.train is None and data.path is None:
        raise UserError("a task of your own needs data.train", fix="add data.train=FILE")
    return make_task(
        Description(**{name: getattr(data, name) for name in (*DESCRIBING_KEYS, "metric")})
    )
