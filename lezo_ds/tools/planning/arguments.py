"""The command line of launch/plan.py."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import get_args

from lezo_ds.config import Dtype, Method, PeftKind
from lezo_ds.errors import UserError
from lezo_ds.tools.planning.memory import GPU_RESERVE
from lezo_ds.tools.planning.plan import GIB, Request
from lezo_ds.tools.planning.speed import Speeds
from lezo_ds.tools.planning.text import GIGA, TimedBy

TERA = 1e12
REACHED = 0.7
"""Share of the published peaks that a step is assumed to reach."""

_HOST_BANDWIDTH = 25.0


@dataclass(frozen=True)
class Gpu:
    """A GPU's published figures.

    Attributes:
        gigabytes: its memory, in GiB.
        tflops: of dense 16-bit matrix products.
        memory_bandwidth: in GB/s.
        link_bandwidth: from the GPUs of its host, in GB/s: NVLink, or PCIe where there is none.
    """

    gigabytes: float
    tflops: float
    memory_bandwidth: float
    link_bandwidth: float


GPUS = {
    "a100-40g": Gpu(40, 312, 1555, 300),
    "a100-80g": Gpu(80, 312, 2039, 300),
    "h100": Gpu(80, 989, 3350, 450),
    "h200": Gpu(140, 989, 4800, 450),
    "rtx-4090": Gpu(24, 165, 1008, 25),
}


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add what `read_request` and `read_speeds` read."""
    parser.add_argument("model", metavar="MODEL", help="hub id, directory, or one of OPT's: opt-30b")
    parser.add_argument("--gpus", type=_positive, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--gpu", choices=GPUS, help="kind; gives the published figures of the options below")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of each, in GiB")
    parser.add_argument("--method", choices=get_args(Method), default="lezo", help="as in a recipe")
    parser.add_argument("--peft", choices=get_args(PeftKind), default="none", help="what is trained")
    parser.add_argument("--task", default="sst2", help="whose inputs are run")
    parser.add_argument("--dtype", choices=get_args(Dtype), help="of the weights; fp16, and bf16 for adamw")
    parser.add_argument("--batch", type=_positive, metavar="N", help="examples of a step; the papers'")
    parser.add_argument(
        "--length", type=_positive, metavar="N", help="tokens of an input; typical of the task"
    )
    parser.add_argument(
        "--offload", action="store_true", help="weights in the host's memory, even if they fit"
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=GPU_RESERVE / GIB,
        metavar="GIB",
        help="memory of each GPU that is not for tensors (%(default)s: assumed)",
    )
    parser.add_argument("--tflops", type=float, metavar="T", help="that matrix products reach on a GPU")
    parser.add_argument("--memory-bandwidth", type=float, metavar="GB/S", help="that a copy on a GPU reaches")
    parser.add_argument("--link-bandwidth", type=float, metavar="GB/S", help="that a rank receives with")
    parser.add_argument("--host-bandwidth", type=float, metavar="GB/S", help="from a host to its GPU")


def read_request(arguments: argparse.Namespace) -> Request:
    """Return what is to be planned.

    Raises:
        UserError: the memory of a GPU is not known.
    """
    gigabytes = arguments.gpu_memory or (GPUS[arguments.gpu].gigabytes if arguments.gpu else None)
    if gigabytes is None:
        raise UserError(
            "the memory of a GPU is not known",
            got="neither --gpu-memory nor --gpu",
            expected="one of them",
            fix="give --gpu-memory 40, or --gpu a100-40g",
        )
    return Request(
        model=arguments.model,
        num_gpus=arguments.gpus,
        gpu_bytes=int(gigabytes * GIB),
        method=arguments.method,
        peft=arguments.peft,
        task=arguments.task,
        dtype=arguments.dtype,
        batch_size=arguments.batch,
        length=arguments.length,
        offload=arguments.offload,
        reserve=int(arguments.reserve * GIB),
    )


def read_speeds(arguments: argparse.Namespace) -> TimedBy | None:
    """Return what times are estimated from: what is given, or REACHED of what is published."""
    gpu = GPUS.get(arguments.gpu)
    peaks = (gpu.tflops, gpu.memory_bandwidth, gpu.link_bandwidth) if gpu else (None, None, None)
    given = (arguments.tflops, arguments.memory_bandwidth, arguments.link_bandwidth, arguments.host_bandwidth)
    units = ("TFLOP/s", "GB/s of memory", "GB/s between ranks", "GB/s from the host")
    values, sources = [], []
    for unit, value, peak in zip(units, given, (*peaks, _HOST_BANDWIDTH), strict=True):
        if value is not None:
            values.append(value)
            sources.append(f"{value:.4g} {unit} (given)")
        elif peak is not None:
            values.append(REACHED * peak)
            sources.append(f"{values[-1]:.4g} {unit}")
        else:
            return None
    tflops, memory, link, host = values
    assumed = "" if None not in given else f"; where not given {REACHED:.0%} of published peaks: assumed"
    speeds = Speeds(tflops * TERA, memory * GIGA, link * GIGA, host * GIGA)
    return TimedBy(speeds, ", ".join(sources) + assumed)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number
