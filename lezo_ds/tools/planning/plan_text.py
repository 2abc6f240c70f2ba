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
_NOTABLY = 1.1  # a smaller difference is less than what the estimate does not know


def plan_text(plan: Plan) -> str:
    """Return a plan as lines, each with a heading and a fact, without the command."""
    model, config, chosen = plan.model, plan.chosen.config, plan.chosen
    size = f"{model.num_parameters:,} parameters in {model.num_blocks} blocks"
    gpus = "1 GPU" if plan.num_gpus == 1 else f"{plan.num_gpus} GPUs"
    batch = f"batches of {config.train.batch_size}" if config.method in TRAINED else "examples"
    longest = f"at most {plan.inputs.length} tokens ({plan.inputs.source})"
    lines = [
        ("model", f"{config.model.path}: {model.class_name}, {size}, {config.model.dtype}"),
        ("hardware", f"{gpus} of {plan.gpu_bytes / GIB:g} GiB{_nodes_text(plan)}"),
        ("inputs", f"{config.data.task}, {batch}, {longest}"),
        *_option_lines(plan),
        ("memory a rank", str(chosen.memory)),
    ]
    if chosen.memory.host:
        hosts = chosen.memory.host * plan.num_gpus / GIB
        lines.append(("host memory", f"{hosts:.0f} GiB for all ranks together"))
    if chosen.traffic is not None:
        lines.append(("traffic a step", _traffic_text(plan, chosen.traffic)))
        lines += _time_lines(plan)
    return "\n".join(f"{heading:15} {text}" for heading, text in lines)


def plan_command(plan: Plan, recipe: str | None, overrides: Sequence[str]) -> str:
    """Return the command that starts the chosen run from the working directory.

    Args:
        plan: from `make_plan`.
        recipe: name or file of the recipe that was planned for; None if everything is in the overrides.
        overrides: the overrides that were planned for.
    """
    node_size = plan.cluster.node_size(plan.num_gpus)
    words = deepspeed_command(node_size, ["--hostfile", "HOSTFILE"] if node_size < plan.num_gpus else ())
    words += [] if recipe is None else ["--config", recipe]
    asked, chosen = (flatten(config_to_dict(c)) for c in (plan.recipe, plan.chosen.config))
    changed = {key: value for key, value in chosen.items() if asked[key] != value}
    kept = [override for override in overrides if override.partition("=")[0] not in changed]
    return shlex.join(words + kept + [f"{key}={_yaml(value)}" for key, value in changed.items()])


def _yaml(value: object) -> str:
    return "null" if value is None else str(value)


def _option_lines(plan: Plan) -> list[tuple[str, str]]:
    rows = [
        ["shared by", "updates    ", "micro-batch", "probes a pass", "eval batch", "GiB a rank", "s a step"]
    ]
    for option in plan.options:
        config = option.config
        row = [
            str(config.partition_size or plan.num_gpus),
            config.zo.update_precision if config.method in ZEROTH_ORDER else "-",
            str(config.train.micro_batch_size) if config.method in TRAINED else "-",
            str(config.zo.probes_per_pass) if config.method in ZEROTH_ORDER else "-",
            str(config.train.eval_batch_size),
            f"{option.memory.total / GIB:.2f}",
            f"~{_seconds(option.time.total)}" if option.time else "-",
        ]
        remark = "chosen" if option is plan.chosen else "fits" if option.fits else "does not fit"
        rows.append([*row, remark + (", weights in the host's memory" if option.memory.host else "")])
    widths = [*map(len, rows[0]), 0]
    texts = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in rows]
    return [("" if index else "options", text) for index, text in enumerate(texts)]


def _nodes_text(plan: Plan) -> str:
    node_size = plan.cluster.node_size(plan.num_gpus)
    return f", {node_size} on each of {plan.num_gpus // node_size} nodes" if node_size < plan.num_gpus else ""


def _time_lines(plan: Plan) -> list[tuple[str, str]]:
    """Return the estimate of a step's time, what it assumes, and the faster option that was not chosen."""
    time = plan.chosen.time
    if time is None:
        unknown = "the answers' lengths are not known" if plan.cluster.gpu else "give --gpu for an estimate"
        return [("time a step", f"not estimated: {unknown}")]
    parts = ", ".join(f"{name} {_seconds(seconds)} s" for name, seconds in time.parts.items())
    lines = [
        ("time a step", f"about {_seconds(time.total)} s, the longest of {parts}"),
        ("", f"assumed: {'; '.join(time.assumptions)}. Nothing of this was measured on a GPU."),
    ]
    fastest = plan.fastest
    assert fastest.time is not None
    if time.total > _NOTABLY * fastest.time.total:
        changes = f"zo.update_precision={fastest.config.zo.update_precision}"
        text = f"{changes} would be {time.total / fastest.time.total:.1f} times as fast"
        lines.append(("faster", f"{text}: about {_seconds(fastest.time.total)} s a step"))
    return lines


def _seconds(value: float) -> str:
    """Return seconds with two digits that count, since more would promise too much.

    >>> _seconds(1.184), _seconds(0.0123), _seconds(23.7)
    ('1.2', '0.012', '24')
    """
    return f"{float(f'{value:.2g}'):g}"


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
