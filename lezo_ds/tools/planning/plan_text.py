"""A plan as text: one line per fact, the options as a table, and the command that starts the run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from lezo_ds.config import (
    TRAINED,
    ZEROTH_ORDER,
    config_to_dict,
    flatten,
    make_estimator,
    make_layer_policy,
)
from lezo_ds.engine.step_plan import plan_format_of, scalar_bytes
from lezo_ds.shipped import deepspeed_command
from lezo_ds.tools.planning.memory import GIB
from lezo_ds.tools.planning.options import Plan
from lezo_ds.tools.planning.traffic import StepTraffic

_GIGA = 1e9


def plan_text(plan: Plan) -> str:
    """Return a plan as lines, each with a heading and a fact, without the command."""
    model, config, chosen = plan.model, plan.chosen.config, plan.chosen
    size = f"{model.num_parameters:,} parameters in {model.num_blocks} blocks"
    gpus = "1 GPU" if plan.num_gpus == 1 else f"{plan.num_gpus} GPUs"
    batch = f"batches of {config.train.batch_size}" if config.method in TRAINED else "examples"
    longest = f"at most {plan.inputs.length} tokens ({plan.inputs.source})"
    lines = [
        ("model", f"{config.model.path}: {model.class_name}, {size}, {config.model.dtype}"),
        ("hardware", f"{gpus} of {plan.gpu_bytes / GIB:g} GiB"),
        ("inputs", f"{config.data.task}, {batch}, {longest}"),
        *_option_lines(plan),
        ("memory a rank", str(chosen.memory)),
    ]
    if chosen.memory.host:
        hosts = chosen.memory.host * plan.num_gpus / GIB
        lines.append(("host memory", f"{hosts:.0f} GiB for all ranks together"))
    if chosen.traffic is not None:
        lines.append(("traffic a step", _traffic_text(plan, chosen.traffic)))
    return "\n".join(f"{heading:15} {text}" for heading, text in lines)


def plan_command(plan: Plan, recipe: str | None, overrides: Sequence[str]) -> str:
    """Return the command that starts the chosen run from the working directory.

    Args:
        plan: from `make_plan`.
        recipe: name or file of the recipe that was planned for; None if everything is in the overrides.
        overrides: the overrides that were planned for.
    """
    words = deepspeed_command(plan.num_gpus)
    words += [] if recipe is None else ["--config", recipe]
    asked, chosen = (flatten(config_to_dict(c)) for c in (plan.recipe, plan.chosen.config))
    changed = {key: value for key, value in chosen.items() if asked[key] != value}
    kept = [override for override in overrides if override.partition("=")[0] not in changed]
    return shlex.join(words + kept + [f"{key}={_yaml(value)}" for key, value in changed.items()])


def _yaml(value: object) -> str:
    return "null" if value is None else str(value)


def _option_lines(plan: Plan) -> list[tuple[str, str]]:
    rows = [["shared by", "updates    ", "micro-batch", "probes a pass", "eval batch", "GiB a rank"]]
    for option in plan.options:
        config = option.config
        row = [
            str(config.partition_size or plan.num_gpus),
            config.zo.update_precision if config.method in ZEROTH_ORDER else "-",
            str(config.train.micro_batch_size) if config.method in TRAINED else "-",
            str(config.zo.probes_per_pass) if config.method in ZEROTH_ORDER else "-",
            str(config.train.eval_batch_size),
            f"{option.memory.total / GIB:.2f}",
        ]
        remark = "chosen" if option is plan.chosen else "fits" if option.fits else "does not fit"
        rows.append([*row, remark + (", weights in the host's memory" if option.memory.host else "")])
    widths = [*map(len, rows[0]), 0]
    texts = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in rows]
    return [("" if index else "options", text) for index, text in enumerate(texts)]


def _traffic_text(plan: Plan, traffic: StepTraffic) -> str:
    gathered = f"{traffic.gathered / _GIGA:.2f} GB of weights" if traffic.gathered else "no weights"
    host = f", {traffic.from_host / _GIGA:.2f} GB of weights from its host" if traffic.from_host else ""
    config = plan.chosen.config
    plan_format = plan_format_of(
        make_estimator(config.zo), make_layer_policy(config.zo, plan.model.num_blocks)
    )
    num_micro_batches = config.train.batch_size // config.train.micro_batch_size
    scalars = scalar_bytes(plan_format, num_micro_batches)
    return f"each rank receives {gathered}{host}, and {scalars} bytes of everything else"
