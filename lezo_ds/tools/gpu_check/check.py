"""The whole check: its sections one after the other, each in its own process, as one table and one JSON."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from lezo_ds import distributed
from lezo_ds.config import Dtype
from lezo_ds.errors import LezoError
from lezo_ds.files import failures_named, make_directory, write_atomically
from lezo_ds.tools.benchmark.command import origin_columns
from lezo_ds.tools.benchmark.host import measure_host
from lezo_ds.tools.benchmark.measure import Row as Figures
from lezo_ds.tools.benchmark.settings import Setting, typical_setting
from lezo_ds.tools.gpu_check import bits, speed
from lezo_ds.tools.gpu_check.rows import Row

T = TypeVar("T")

Found = tuple[list[Row], list[Figures]]
"""Rows for the reader, and rows of the benchmark's table."""

Section = tuple[str, Callable[[], Found]]
"""A name and what to run. It must be picklable."""

JSON_NAME = "gpu.json"
TASKS = ("sst2", "boolq")
_SMALL = "opt-tiny"
_SHAPES = {"cuda": ("opt-1.3b", "opt-13b"), "cpu": (_SMALL,)}
_NOISE_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 18}


def run_check(shapes: Sequence[str] | None, out: Path, *, minutes: float, rounds: int) -> None:
    """Run all sections, print the table and write `out`/gpu.json.

    A section that fails does not end the others. A section that would start after `minutes` is not run.

    Args:
        shapes: keys of SHAPES, whose steps are timed; None for those that suit the device.
        out: directory of the JSON, which is made.
        minutes: time after which no section starts, and the one that runs ends.
        rounds: timed steps or calls of each kind.

    Raises:
        LezoError: a section failed or was not run, or something is not as it must be.
    """
    with failures_named(out):
        make_directory(out)
    end = time.monotonic() + 60 * minutes
    rows, figures = [], []
    about = _in_process(_about, end - time.monotonic())
    device = str(about["device"])
    for name, section in sections(shapes or _SHAPES[device], device, rounds):
        print(f"{name} ...", flush=True)
        found, measured = _run_section(name, section, end)
        rows += found
        figures += measured
        content = {**about, "rows": [asdict(row) for row in rows], "benchmark": figures}
        with failures_named(out):
            write_atomically(out / JSON_NAME, json.dumps(content, indent=1) + "\n")
    print(table(rows))
    wrong = [row for row in rows if row.passed is False]
    if wrong:
        first = ": ".join(filter(None, (wrong[0].section, wrong[0].what, wrong[0].found)))
        raise LezoError(f"{len(wrong)} of {len(rows)} findings are not as they must be; the first is {first}")


def sections(shapes: Sequence[str], device: str, rounds: int) -> Iterator[Section]:
    """Yield the parts of the check, the most important first.

    Args:
        shapes: of the models whose steps are timed.
        device: "cuda" or "cpu".
        rounds: timed steps or calls of each kind.
    """
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16")
    yield "noise: exact bits", partial(_bits, bits.noise_rows)
    if device == "cuda":  # a CPU runs norms with torch's own operators
        yield "norm: rounded once", partial(_bits, bits.norm_rows)
    for dtype in dtypes:
        yield f"engine: exact bits, {dtype}", partial(_engine_bits, setting_of(_SMALL, dtype, "sst2"))
    yield "noise: speed", partial(speed.noise_speed_rows, "bf16", _NOISE_ELEMENTS[device], rounds=rounds)
    yield "host", partial(_host, rounds)
    for shape in shapes:
        for task in TASKS:
            setting = setting_of(shape, "bf16", task)
            yield f"steps: {shape}, {task}", partial(_steps, setting, rounds)
        yield f"launches: {shape}", partial(_launches, setting_of(shape, "bf16", "sst2"))


def setting_of(shape: str, dtype: Dtype, task: str) -> Setting:
    """Return random inputs of a task's typical size for one rank."""
    # Low bits leave no room for the reference next to a large model.
    return replace(typical_setting(shape, task), dtype=dtype, update_precision="stochastic")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a text table."""
    marks = {True: "ok", False: "WRONG", None: ""}
    cells = [(row.section, row.what, marks[row.passed], row.found) for row in rows]
    widths = [max(map(len, column)) for column in list(zip(*cells, strict=True))[:-1]]
    return "\n".join("  ".join([*map(str.ljust, row[:-1], widths), row[-1]]) for row in cells)


def _run_section(name: str, section: Callable[[], Found], end: float) -> Found:
    remaining = end - time.monotonic()
    if remaining <= 0:
        return [Row(name, "", "not run, because the time is over", passed=False)], []
    try:
        return _in_process(section, remaining)
    except TimeoutError:
        return [Row(name, "", "not finished when the time was over", passed=False)], []
    except RuntimeError as error:
        return [Row(name, "", f"failed: {error}", passed=False)], []


def _in_process(function: Callable[[], T], seconds: float) -> T:
    """Return what a function returns in a process of its own, which ends with all memory that it holds.

    Raises:
        TimeoutError: it did not return in time. The process is killed.
        RuntimeError: it raised an error, or the process crashed.
    """
    # A pool cannot end a process that hangs, or waits forever for one that crashed.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(function, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise TimeoutError(f"no result after {seconds:.0f} seconds")
        returned, problem = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if problem:
        raise RuntimeError(problem)
    result: T = returned
    return result


def _send(function: Callable[[], object], sender: Connection) -> None:
    try:
        result = function(), ""
    except Exception as error:  # what a GPU, a driver or a library raises; not all of them can be pickled
        result = None, " ".join(f"{type(error).__name__}: {error}".split())
    sender.send(result)


def _about() -> dict[str, object]:
    distributed.init_distributed()
    device = distributed.device()
    facts: dict[str, object] = {"device": device.type, **origin_columns()}
    if device.type == "cuda":
        facts |= {"memory_bytes": torch.cuda.get_device_properties(device).total_memory}
    return facts


def _bits(rows: Callable[[torch.device], list[Row]]) -> Found:
    distributed.init_distributed()
    return rows(distributed.device()), []


def _engine_bits(setting: Setting) -> Found:
    distributed.init_distributed()
    return bits.engine_rows(setting), []


def _host(rounds: int) -> Found:
    return [Row("host", name, f"{value:g}") for name, value in measure_host(rounds).items()], []


def _steps(setting: Setting, rounds: int) -> Found:
    distributed.init_distributed()
    rows, figures = speed.step_rows(setting, rounds=rounds)
    return [*rows, *speed.memory_rows(setting, figures)], figures


def _launches(setting: Setting) -> Found:
    distributed.init_distributed()
    return speed.launch_rows(setting), []
