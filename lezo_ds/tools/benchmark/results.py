"""What was measured and on what, and its JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lezo_ds.errors import UserError
from lezo_ds.files import write_atomically
from lezo_ds.noise import UpdatePrecision
from lezo_ds.tools.benchmark.shapes import Workload


@dataclass(frozen=True)
class ModelSettings:
    """The model that is run.

    Attributes:
        shape: a key of SHAPES.
        num_blocks: blocks of the model, None for the shape's own number.
        dtype: of the weights, "fp32", "bf16" or "fp16".
        precision: how our updates are stored in 16 bits.
        deepspeed: path of the DeepSpeed JSON; None for DeepSpeed's own settings.
        partition_size: number of ranks that share the weights under ZeRO-3; None for all.
    """

    shape: str
    num_blocks: int | None = None
    dtype: str = "fp32"
    precision: UpdatePrecision = "fp32_master"
    deepspeed: str | None = None
    partition_size: int | None = None


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        model: that is run.
        workload: a step's batch.
        num_micro_batches: that our step runs the batch in; None for one a rank.
        rounds: timed steps of each variant.
        threads: of an operation, for each rank on a CPU.
    """

    model: ModelSettings
    workload: Workload
    num_micro_batches: int | None = None
    rounds: int = 5
    threads: int = 1


class Elapsed(NamedTuple):
    """Time an action took.

    Attributes:
        seconds: until all ranks had done it.
        cpu_seconds: that this rank's processor worked, in all threads.
    """

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Timing:
    """How a variant did, on rank 0.

    Attributes:
        name: of the variant.
        elapsed: of each timed step. On a machine with other work on it the processor's time is the fairer
            measure of what a CPU has to do.
        stages: share of a step in each of STAGES; they add up to 1. From other steps than the timed ones.
        host_stages: seconds of the host in each of them, by step.
        weight_bytes: what this rank holds of the model between steps.
        peak_bytes: peak memory of a step above what all variants hold between steps; None if unknown.
        gathered_bytes: of weights that a rank receives or has in the gathers of a step.
        other_bytes: of everything else it sends in a step.
    """

    name: str
    elapsed: tuple[Elapsed, ...]
    stages: Mapping[str, float]
    host_stages: Mapping[str, float]
    weight_bytes: int
    peak_bytes: int | None
    gathered_bytes: int
    other_bytes: int

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(step.seconds for step in self.elapsed)

    @property
    def cpu_seconds(self) -> float:
        """Median processor time of a step."""
        return statistics.median(step.cpu_seconds for step in self.elapsed)

    def median(self, processor: bool) -> float:
        """Return the median processor time of a step, or else the median time."""
        return self.cpu_seconds if processor else self.seconds

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median; 0 for fewer than two steps."""
        if len(self.elapsed) < 2:
            return 0.0
        low, _, high = statistics.quantiles([step.seconds for step in self.elapsed], method="inclusive")
        return (high - low) / 2 / self.seconds


@dataclass(frozen=True)
class Replay:
    """Training some steps, and replaying their records.

    Attributes:
        num_steps: how many.
        train: all of them, without a journal.
        replay: all of them.
    """

    num_steps: int
    train: Elapsed
    replay: Elapsed


@dataclass(frozen=True)
class Cell:
    """The measurements with one set of settings.

    Attributes:
        settings: what was measured.
        num_ranks: that shared the model and the batch.
        num_parameters: of the model.
        load: of the machine over the last minute, at the end.
        timings: of the variants; ratios are taken to the first.
        replays: by the name of the variant.
    """

    settings: Settings
    num_ranks: int
    num_parameters: int
    load: float
    timings: tuple[Timing, ...]
    replays: Mapping[str, Replay] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelTiming:
    """One operation on many elements.

    Attributes:
        name: of the operation.
        elapsed: of each timed call.
        num_bytes: that it must read and write.
    """

    name: str
    elapsed: tuple[Elapsed, ...]
    num_bytes: int

    @property
    def seconds(self) -> float:
        """Median time of a call."""
        return statistics.median(call.seconds for call in self.elapsed)

    @property
    def cpu_seconds(self) -> float:
        """Median processor time of a call."""
        return statistics.median(call.cpu_seconds for call in self.elapsed)


@dataclass(frozen=True)
class Kernels:
    """The operations of the noise backend, after a copy and PyTorch's own noise.

    Attributes:
        dtype: of the weights.
        num_elements: that each call works on.
        threads: of a call on a CPU.
        timings: the first is the copy, the second PyTorch's `normal_` and `add_`.
    """

    dtype: str
    num_elements: int
    threads: int
    timings: tuple[KernelTiming, ...]


@dataclass(frozen=True)
class Results:
    """What one command measured.

    Attributes:
        facts: versions, hardware and command.
        cells: of steps.
        kernels: of the noise.
    """

    facts: Mapping[str, Any]
    cells: tuple[Cell, ...] = ()
    kernels: tuple[Kernels, ...] = ()

    def with_cell(self, cell: Cell) -> Results:
        """Return these and one cell more."""
        return replace(self, cells=(*self.cells, cell))

    def with_kernels(self, kernels: Kernels) -> Results:
        """Return these and the noise's operations."""
        return replace(self, kernels=(*self.kernels, kernels))


def write_results(results: Results, path: Path) -> None:
    """Write results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(results), indent=1) + "\n")


def read_results(path: Path) -> Results:
    """Read what `write_results` wrote.

    Raises:
        UserError: there is no such file, or it is something else.
    """
    try:
        found = json.loads(path.read_text())
        cells = tuple(_cell(cell) for cell in found["cells"])
        kernels = tuple(_kernels(entry) for entry in found["kernels"])
        return Results(found["facts"], cells, kernels)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} holds no results of a benchmark",
            got=str(error),
            expected="a JSON that launch/benchmark.py --out wrote",
            fix="run it again",
        ) from error


def _cell(found: dict[str, Any]) -> Cell:
    settings = found["settings"]
    model = {name: value for name, value in settings["model"].items() if name != "noise"}  # in older files
    made = {
        "settings": Settings(
            **settings | {"model": ModelSettings(**model), "workload": Workload(**settings["workload"])}
        ),
        "timings": tuple(_timed(Timing, timing) for timing in found["timings"]),
        "replays": {name: _replay(**replay) for name, replay in found["replays"].items()},
    }
    return Cell(**found | made)


def _replay(num_steps: int, train: Sequence[float], replay: Sequence[float]) -> Replay:
    return Replay(num_steps, Elapsed(*train), Elapsed(*replay))


def _kernels(found: dict[str, Any]) -> Kernels:
    return Kernels(**found | {"timings": tuple(_timed(KernelTiming, entry) for entry in found["timings"])})


def _timed(kind: type[Any], found: dict[str, Any]) -> Any:  # noqa: ANN401
    return kind(**found | {"elapsed": tuple(Elapsed(*elapsed) for elapsed in found["elapsed"])})
