"""The hardware that a plan is for, and what is assumed of it."""

from __future__ import annotations

from dataclasses import dataclass

from lezo_ds.errors import UserError

DEFAULT_GPUS_PER_NODE = 8
DEFAULT_NODE_LINK = 25.0
"""GB/s that a rank receives from other nodes: one InfiniBand port of 200 Gb/s a GPU."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU. All but the memory are the vendor's figures, or follow from them.

    Attributes:
        gigabytes: memory in GiB.
        link: GB/s that a rank receives from GPUs of its node: 0.8 of NVLink's or PCIe's speed one way.
        host_link: GB/s that it receives from its host: 0.8 of PCIe's.
        teraflops: 16-bit matrix products, without sparsity.
        bandwidth: GB/s of its memory.
        teraops: 32-bit instructions: multiprocessors x 128 lanes x clock.
    """

    gigabytes: int
    link: float
    host_link: float
    teraflops: float
    bandwidth: float
    teraops: float


GPUS = {
    "a100-40g": Gpu(40, link=240, host_link=25, teraflops=312, bandwidth=1555, teraops=19.5),
    "a100-80g": Gpu(80, link=240, host_link=25, teraflops=312, bandwidth=2039, teraops=19.5),
    "h100": Gpu(80, link=360, host_link=50, teraflops=989, bandwidth=3350, teraops=33.5),
    "h200": Gpu(140, link=360, host_link=50, teraflops=989, bandwidth=4800, teraops=33.5),
    "rtx-4090": Gpu(24, link=25, host_link=25, teraflops=165, bandwidth=1008, teraops=41.3),
}
"""Kinds of GPU by name (NVIDIA's data sheets and white papers)."""


@dataclass(frozen=True)
class Cluster:
    """Where the GPUs are, and how fast they reach each other.

    Attributes:
        gpu: their kind; None if only their memory is known. Then no time is estimated.
        gpus_per_node: number of GPUs in a node; None for DEFAULT_GPUS_PER_NODE, or all of them if they are
            fewer.
        link: GB/s that a rank receives inside its node; None for the figure of the kind.
        node_link: GB/s that a rank receives from other nodes; None for DEFAULT_NODE_LINK.
    """

    gpu: Gpu | None = None
    gpus_per_node: int | None = None
    link: float | None = None
    node_link: float | None = None

    def node_size(self, num_gpus: int) -> int:
        """Return the number of GPUs in each node.

        Raises:
            UserError: the GPUs do not fill whole nodes.
        """
        size = self.gpus_per_node or min(num_gpus, DEFAULT_GPUS_PER_NODE)
        if num_gpus % size and num_gpus > size:
            raise UserError(
                "the GPUs do not fill whole nodes",
                got=f"{num_gpus} GPUs, {size} on each node",
                expected="a multiple of the GPUs on a node",
                fix="change --gpus or --gpus-per-node",
            )
        return min(size, num_gpus)
