"""The command line of launch/plan.py, and the published speeds of GPUs that it knows."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NamedTuple

from lezo_ds.errors import UserError

if TYPE_CHECKING:  # imports torch, which --help does not need
    from lezo_ds.tools.planning.step_cost import Speeds

REACHED = 0.7
"""Share of the published peaks that a step is assumed to reach."""

_GIB = 1 << 30
_HOST_BANDWIDTH = 25.0  # GB/s, of PCIe 4.0 with 16 lanes


class PublishedGpu(NamedTuple):
    """The published figures of a GPU.

    Attributes:
        gigabytes: memory in GiB.
        tflops: dense 16-bit matrix products in TFLOP/s.
        memory_bandwidth: bandwidth of its memory in GB/s.
        link_bandwidth: bandwidth from the other GPUs of its host in GB/s: NVLink, or PCIe if it has none.
    """

    gigabytes: float
    tflops: float
    memory_bandwidth: float
    link_bandwidth: float


GPUS = {
    "a100-40g": PublishedGpu(40, 312, 1555, 300),
    "a100-80g": PublishedGpu(80, 312, 2039, 300),
    "h100": PublishedGpu(80, 989, 3350, 450),
    "h200": PublishedGpu(140, 989, 4800, 450),
    "rtx-4090": PublishedGpu(24, 165, 1008, 25),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe, the hardware and its speeds."""
    add = parser.add_argument
    add("--config", metavar="RECIPE", help="name of a recipe, or a YAML file, as for launch/train.py")
    add(
        "--gpus", type=_positive_int, required=True, metavar="N", help="number of GPUs, with one rank on each"
    )
    add("--gpu", choices=GPUS, help="kind of GPU, whose published figures are used below")
    add("--gpu-memory", type=_positive, metavar="GIB", help="memory of each GPU in GiB")
    add(
        "--length",
        type=_positive_int,
        metavar="N",
        help="tokens of every input (default: typical of the task)",
    )
    add("--reserve", type=float, metavar="GIB", help="GPU memory in GiB that holds no tensor (default: 2)")
    add("--tflops", type=_positive, metavar="T", help="TFLOP/s that matrix products reach")
    add("--memory-bandwidth", type=_positive, metavar="GB/S", help="bandwidth that copies on a GPU reach")
    add("--link-bandwidth", type=_positive, metavar="GB/S", help="bandwidth at which a rank receives weights")
    add("--host-bandwidth", type=_positive, metavar="GB/S", help="bandwidth from the host to a GPU")
    add("overrides", nargs="*", metavar="key=value", help="change a key of the recipe")


def gpu_bytes(arguments: argparse.Namespace) -> int:
    """Return the memory of a GPU in bytes.

    Raises:
        UserError: it is not known.
    """
    if arguments.gpu_memory is None and arguments.gpu is None:
        raise UserError(
            "the memory of a GPU is not known",
            got="neither --gpu-memory nor --gpu",
            expected="one of them",
            fix="give --gpu-memory 40, or --gpu a100-40g",
        )
    return int((arguments.gpu_memory or GPUS[arguments.gpu].gigabytes) * _GIB)


def reserve_bytes(arguments: argparse.Namespace) -> int | None:
    """Return the GPU memory that holds no tensor in bytes; None if it was not given."""
    return None if arguments.reserve is None else int(arguments.reserve * _GIB)


def hardware_speeds(arguments: argparse.Namespace) -> Speeds | None:
    """Return the given speeds, and the share REACHED of published ones for the others.

    None if a speed is neither given nor published.
    """
    from lezo_ds.tools.planning.step_cost import Speeds

    gpu = GPUS.get(arguments.gpu)
    sources = (
        ("TFLOP/s", 1e12, arguments.tflops, gpu and gpu.tflops),
        ("GB/s of memory", 1e9, arguments.memory_bandwidth, gpu and gpu.memory_bandwidth),
        ("GB/s between ranks", 1e9, arguments.link_bandwidth, gpu and gpu.link_bandwidth),
        ("GB/s from the host", 1e9, arguments.host_bandwidth, _HOST_BANDWIDTH),
    )
    values, words = [], []
    for unit, scale, given, published in sources:
        value, source = given, "given"
        if given is None and published is not None:
            value, source = REACHED * published, f"assumed: {REACHED:.0%} of the published peak"
        if value is None:
            return None
        values.append(value * scale)
        words.append(f"{value:.4g} {unit} ({source})")
    operations, memory, link, host = values
    return Speeds(operations, memory, link, host, source=", ".join(words))


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return number


def _positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
