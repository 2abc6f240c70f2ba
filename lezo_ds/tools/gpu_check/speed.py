"""Speed, launches and memory of steps of random models, and the speed of the noise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from lezo_ds import distributed
from lezo_ds.config import Dtype, config_from_dict
from lezo_ds.tools.benchmark import table
from lezo_ds.tools.benchmark.measure import WARM_UP_STEPS, measure_steps
from lezo_ds.tools.benchmark.measure import Row as Figures
from lezo_ds.tools.benchmark.noise import measure_noise
from lezo_ds.tools.benchmark.random_inputs import RandomInputs
from lezo_ds.tools.benchmark.settings import Setting, Variant
from lezo_ds.tools.benchmark.stages import synchronize
from lezo_ds.tools.benchmark.steps import start_steps
from lezo_ds.tools.gpu_check.rows import Row
from lezo_ds.tools.planning.inputs import assumed_inputs
from lezo_ds.tools.planning.memory import GIB, rank_memory
from lezo_ds.tools.planning.model_sizes import model_sizes

VARIANTS = ("mezo_reference", "ours:0", "ours:0.75")


def step_rows(setting: Setting, *, rounds: int) -> tuple[list[Row], list[Figures]]:
    """Time steps against MeZO's published algorithm. A collective.

    Returns:
        Rows for the reader, and the rows of the benchmark's table.
    """
    variants = [Variant.parse(text) for text in VARIANTS]
    figures = measure_steps(partial(RandomInputs, setting), variants, rounds=rounds)
    where = f"{setting.shape}, {setting.dtype}, {setting.task}"
    rows = []
    for row in figures:
        stages = ", ".join(f"{name} {1e3 * row[f'{name}_seconds']:.1f}" for name in table.STAGES)
        found = f"{1e3 * row['seconds_median']:.1f} ms a step, {row['ratio']:.2f} times as fast as the first"
        found += f"; stages in ms: {stages}"
        if row["peak_bytes"] is not None:
            weights, peak = row["weight_bytes"] / GIB, row["peak_bytes"] / GIB
            found += f"; weights {weights:.2f} GiB, peak above them {peak:.2f}"
        rows.append(Row("steps", f"{where}, {row['variant']}", found))
    return rows, figures


def launch_rows(setting: Setting) -> list[Row]:
    """Count what a step launches on the device, and measure for how much of the step the device works."""
    inputs = RandomInputs(setting)
    engine = inputs.start_engine()
    rows = []
    for text in VARIANTS[1:]:
        steps = start_steps(Variant.parse(text), inputs, plain=inputs.plain_model, engine=lambda: engine)
        for _ in range(WARM_UP_STEPS):
            steps.step()
        rows.append(Row("launches", f"{setting.shape}, {setting.dtype}, {text}", _launches(steps.step)))
    return rows


def _launches(step: Callable[[], object]) -> str:
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    seconds = time.perf_counter() - start
    on_gpu = distributed.device().type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler's library writes to the terminal
    with profile(activities=activities) as profiler:
        step()
        synchronize()
    events = profiler.events() or ()
    if not on_gpu:
        operators = sum(event.name.startswith("aten::") for event in events)
        return f"{operators} calls of torch operators; {1e3 * seconds:.1f} ms a step; no GPU, no kernels"
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    busy = sum(event.time_range.elapsed_us() for event in kernels) / 1e6
    share = 1 - min(busy / seconds, 1.0)
    return (
        f"{len(kernels)} kernels and copies, {1e3 * busy:.1f} ms of work in {1e3 * seconds:.1f} ms a step: "
        f"the GPU waits for the host during {share:.0%}"
    )


def memory_rows(setting: Setting, figures: list[Figures]) -> list[Row]:
    """Compare the peak memory of our steps with what `lezo-ds plan` says.

    Args:
        setting: what was measured.
        figures: of `step_rows`.
    """
    rows = []
    for row in figures:
        if not row["variant"].startswith("ours") or row["peak_bytes"] is None:
            continue
        values = {
            "run_dir": "none",
            "model.path": setting.shape,
            "model.dtype": setting.dtype,
            "data.task": setting.task,
            "zo.learning_rate": 1e-7,
            "zo.sparsity": row["sparsity"],
            "zo.update_precision": setting.update_precision,
            "train.steps": 1,
            "train.batch_size": setting.batch,
            "train.micro_batch_size": setting.batch,
        }
        config = config_from_dict(values, "the check")
        model = model_sizes(config)
        inputs = assumed_inputs(config, model, setting.length)
        on_gpu = distributed.device().type == "cuda"
        memory = rank_memory(config, model, inputs, world_size=1, on_gpu=on_gpu)
        running = sum(size for name, size in memory.parts.items() if name not in ("reserve", "loading"))
        measured = row["weight_bytes"] + row["peak_bytes"]
        found = f"{measured / GIB:.2f} GiB measured, {running / GIB:.2f} planned, without the reserve"
        what = f"{setting.shape}, {setting.dtype}, {setting.task}, {row['variant']}"
        rows.append(Row("memory", what, found, measured <= 1.2 * running if on_gpu else None))
    return rows


def noise_speed_rows(dtype: Dtype, num_elements: int, *, rounds: int) -> tuple[list[Row], list[Figures]]:
    """Measure the noise in bytes a second, against a copy. A collective."""
    figures = measure_noise(dtype, num_elements, rounds=rounds)
    copy = next(row["bytes_per_second"] for row in figures if row["variant"] == "copy")
    rows = []
    for row in figures:
        speed = row["bytes_per_second"]
        found = f"{speed / 1e9:.1f} GB/s, {speed / copy:.0%} of a copy"
        rows.append(Row("noise speed", f"{dtype}, {row['variant']}", found))
    return rows, figures
