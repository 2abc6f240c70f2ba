"""A plan as text, a line a fact, and the speeds it is timed with."""

from __future__ import annotations

from dataclasses import dataclass

from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig
from lezo_ds.engine.step_plan import scalar_bytes
from lezo_ds.tools.planning.plan import GIB, Option, Plan, parts_text, plan_command, typical_length
from lezo_ds.tools.planning.run_memory import longest_length
from lezo_ds.tools.planning.speed import Speeds, StepTime, StepWork, step_time

GIGA = 1e9


@dataclass(frozen=True)
class TimedBy:
    """Speeds, and where they come from.

    Attributes:
        speeds: of a rank's hardware.
        source: in words.
    """

    speeds: Speeds
    source: str


def plan_text(plan: Plan, timed_by: TimedBy | None) -> str:
    """Return the plan in lines of a heading and a fact.

    Args:
        plan: from `make_plan`.
        timed_by: what the time is estimated from; None for no estimate.
    """
    request, model, chosen = plan.request, plan.model, plan.chosen
    gpus = "1 GPU" if request.num_gpus == 1 else f"{request.num_gpus} GPUs"
    config = chosen.config
    lines = [
        _line(
            "model",
            f"{config.model.path}: {model.name}, {model.num_parameters:,} parameters in {model.num_blocks} "
            f"blocks, {config.model.dtype}",
        ),
        _line("hardware", f"{gpus} of {request.gpu_bytes / GIB:g} GiB"),
        _line("inputs", _inputs_text(plan)),
        *_option_lines(plan, timed_by),
        _line(
            "memory a rank",
            f"{chosen.memory.total / GIB:.1f} of {request.gpu_bytes / GIB:g} GiB: "
            f"{parts_text(chosen.memory)}",
        ),
    ]
    if chosen.memory.host:
        hosts = chosen.memory.host * request.num_gpus / GIB
        lines.append(_line("host memory", f"{hosts:.0f} GiB for all ranks together"))
    if chosen.work is not None:
        lines.append(_line("traffic a step", _traffic_text(chosen.work, config)))
        lines += _time_lines(chosen.work, config, timed_by)
    return "\n".join([*lines, _line("command", plan_command(plan))])


def _line(heading: str, text: str) -> str:
    return f"{heading:15} {text}"


def _inputs_text(plan: Plan) -> str:
    request, config = plan.request, plan.chosen.config
    typical, longest = typical_length(request), longest_length(config, plan.model)
    what = f"batches of {config.train.batch_size} examples" if config.method in TRAINED else "examples"
    if request.length is not None:
        return f"{config.data.task}, {what} of {typical} tokens"
    return (
        f"{config.data.task}, {what} of {typical} tokens, and of {longest} in memory: assumed, give --length"
    )


def _option_lines(plan: Plan, timed_by: TimedBy | None) -> list[str]:
    seconds = "  s a step" if timed_by else ""
    lines = [_line("options", f"shared by  updates      micro-batch  eval batch  GiB a rank{seconds}")]
    return lines + [_line("", _option_text(plan, option, timed_by)) for option in plan.options]


def _option_text(plan: Plan, option: Option, timed_by: TimedBy | None) -> str:
    choice, method = option.choice, option.config.method
    precision = choice.precision if method in ZEROTH_ORDER else "-"
    micro = choice.micro_batch_size if method in TRAINED else "-"
    seconds = "-"
    if timed_by is not None and option.work is not None and option.fits:
        seconds = f"{step_time(option.work, timed_by.speeds).longest:.3f}"
    remark = "chosen" if option is plan.chosen else "fits" if option.fits else "does not fit"
    where = ", weights in the host's memory" if choice.offload else ""
    columns = (
        f"{choice.partition_size:9}",
        f"{precision:11}",
        f"{micro:>11}",
        f"{choice.eval_batch_size:10}",
        f"{option.memory.total / GIB:10.1f}",
        *([f"{seconds:>8}"] if timed_by else []),
        remark + where,
    )
    return "  ".join(columns)


def _traffic_text(work: StepWork, config: RunConfig) -> str:
    num_passes = config.train.batch_size // config.train.micro_batch_size * config.zo.directions
    gathered = f"{work.gathered_bytes / GIGA:.2f} GB of weights" if work.gathered_bytes else "no weights"
    host = f", {work.host_bytes / GIGA:.2f} GB of weights from its host" if work.host_bytes else ""
    return f"each rank receives {gathered}{host}, and {scalar_bytes(num_passes)} bytes of all else"


def _time_lines(work: StepWork, config: RunConfig, timed_by: TimedBy | None) -> list[str]:
    if timed_by is None:
        wanted = "give --gpu, or --tflops, --memory-bandwidth and --link-bandwidth"
        return [_line("time", f"not estimated: {wanted}")]
    time = step_time(work, timed_by.speeds)
    steps = config.train.steps or 0
    hours = f"{steps * time.shortest / 3600:.1f} to {steps * time.longest / 3600:.1f} h"
    return [
        _line(
            "time", f"ESTIMATE, not measured: {time.shortest:.3f} to {time.longest:.3f} s a step, as gathers"
        ),
        _line("", f"are hidden behind the rest or not; {steps:,} steps {hours}, evaluations not counted"),
        _line("stages", _milliseconds(time)),
        _line("speeds", timed_by.source),
    ]


def _milliseconds(time: StepTime) -> str:
    stages = {"forward": time.forward, "perturb": time.perturb, "gather": time.gather, "update": time.update}
    return " + ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in stages.items()) + " ms"
