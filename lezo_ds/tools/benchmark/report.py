"""Results as Markdown, and where they are written."""

from __future__ import annotations

import datetime
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lezo_ds import distributed
from lezo_ds.files import write_atomically
from lezo_ds.runs.run_directory import environment
from lezo_ds.tools.benchmark.growth import Series, find_series
from lezo_ds.tools.benchmark.results import Cell, Kernels, Results, write_results
from lezo_ds.tools.benchmark.shapes import SHAPES
from lezo_ds.tools.benchmark.stages import STAGES

logger = logging.getLogger(__name__)

_STEP_HEADERS = (
    *("variant", "step, s", "spread", "speedup", "processor, s", "speedup", "tokens/s"),
    *STAGES,
    *("gather on the host, s", "peak, MB", "gathered / model", "other bytes"),
)


def machine_facts() -> dict[str, Any]:
    """Return what is measured on, when, and by which command."""
    distributed.init_distributed()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    return {
        **environment(distributed.world_size(), str(distributed.device())),
        "date": now,
        "processor": _processor(),
    }


def save(results: Results, out: Path | None) -> None:
    """Print the results or, to OUT.json and OUT.md, write them. Rank 0 does."""
    if distributed.rank() != 0:
        return
    if out is None:
        print(to_markdown([results]), end="")
        return
    write_results(results, out.with_name(out.name + ".json"))
    write_report([results], out)


def write_report(results: Sequence[Results], out: Path, *, processor: bool = False) -> None:
    """Write OUT.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out.with_name(out.name + ".md"), to_markdown(results, processor=processor))


def draw(results: Sequence[Results], out: Path, *, processor: bool = False) -> None:
    """Draw OUT-*.png of what the results allow; without matplotlib, say so."""
    try:
        from lezo_ds.tools.benchmark import pictures  # matplotlib is only needed here
    except ImportError:
        logger.warning("no pictures: matplotlib is not installed (pip install -e '.[benchmark]')")
        return
    pictures.draw([cell for entry in results for cell in entry.cells], out, processor=processor)


def to_markdown(results: Sequence[Results], *, processor: bool = False) -> str:
    """Return results as Markdown; how a step grows, by processor time if that is asked for."""
    parts = []
    for entry in results:
        parts.append(_facts(entry.facts))
        parts += [_kernels(kernels) for kernels in entry.kernels]
        parts += [_cell(cell) for cell in entry.cells]
    series = find_series((cell for entry in results for cell in entry.cells), processor=processor)
    if series:
        clock = "processor time" if processor else "time"
        parts.append(f"How the {clock} of a step grows, a + b x:\n\n" + _growth(series))
    return "\n".join(parts)


def _facts(facts: Mapping[str, Any]) -> str:
    hardware = facts["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    place = hardware["gpu"] or f"{facts['processor']}, {hardware['cores']} cores"
    command = shlex.join(facts["command"])
    ranks = _count(facts["world_size"], "rank")
    return f"{place}, {ranks}, {facts['date']}; {versions}\n\n```bash\n{command}\n```\n"


def _cell(cell: Cell) -> str:
    settings, workload = cell.settings, cell.settings.workload
    model = settings.model
    facts = [
        f"{model.shape}'s shape, {model.num_blocks or SHAPES[model.shape].num_blocks} blocks",
        f"{cell.num_parameters:,} parameters in {model.dtype}",
        *([model.precision] if model.dtype != "fp32" else []),
        f"{workload.batch_size} examples of {workload.length} tokens, "
        + _count(workload.num_candidates, "candidate"),
        _count(cell.num_ranks, "rank"),
        _count(settings.num_micro_batches or cell.num_ranks, "micro-batch"),
        _count(settings.threads, "thread") + " a rank",
        *([model.deepspeed] if model.deepspeed else []),
        *([f"shared by {model.partition_size}"] if model.partition_size else []),
        f"load of the machine {cell.load:.1f}",
    ]
    rows = []
    first = cell.timings[0]
    model_bytes = cell.num_parameters * {"fp32": 4}.get(model.dtype, 2)
    for timing in cell.timings:
        rows.append(
            (
                timing.name,
                f"{timing.seconds:.4g}",
                f"{timing.spread:.0%}",
                f"{first.seconds / timing.seconds:.2f}",
                f"{timing.cpu_seconds:.4g}",
                f"{first.cpu_seconds / timing.cpu_seconds:.2f}",
                f"{workload.num_tokens / timing.seconds:.0f}",
                *(f"{timing.stages[name]:.0%}" for name in STAGES),
                f"{timing.host_stages['gather']:.2g}",
                "unknown" if timing.peak_bytes is None else f"{timing.peak_bytes / 1e6:.0f}",
                f"{timing.gathered_bytes / model_bytes:.2f}",
                f"{timing.other_bytes}",
            )
        )
    text = ", ".join(facts) + ":\n\n" + _table(_STEP_HEADERS, rows)
    for name, replay in cell.replays.items():
        gain = replay.train.seconds / replay.replay.seconds
        cpu_gain = replay.train.cpu_seconds / replay.replay.cpu_seconds
        text += (
            f"\n{replay.num_steps} steps of {name}: trained in {replay.train.seconds:.3g} s, replayed in "
            f"{replay.replay.seconds:.3g} s, {gain:.1f} times as fast ({cpu_gain:.1f} by processor time).\n"
        )
    return text


def _kernels(kernels: Kernels) -> str:
    copy, reference = kernels.timings[:2]
    rows = []
    for timing in kernels.timings:
        speed = timing.num_bytes / timing.seconds
        rows.append(
            (
                timing.name,
                f"{timing.seconds * 1e3:.3g}",
                f"{speed / 1e9:.3g}",
                f"{speed / (copy.num_bytes / copy.seconds):.0%}",
                f"{reference.seconds / timing.seconds:.2f}",
                f"{reference.cpu_seconds / timing.cpu_seconds:.2f}",
            )
        )
    headers = ("operation", "ms", "GB/s", "of a copy's", f"speedup to {reference.name}", "by processor time")
    threads = _count(kernels.threads, "thread")
    text = f"Noise on {kernels.num_elements:,} weights in {kernels.dtype}, {threads}:\n\n"
    return text + _table(headers, rows)


def _growth(series: Sequence[Series]) -> str:
    rows = [
        (
            entry.axis,
            entry.label,
            ", ".join(f"{x:g}: {y:.3g}" for x, y in entry.points),
            f"{entry.intercept:.3g}",
            f"{entry.slope:.3g}",
            f"{entry.bend:.0%}",
        )
        for entry in series
    ]
    return _table(("x", "variant", "x: seconds", "a, s", "b, s", "farthest from the line"), rows)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), "a processor"
    )
