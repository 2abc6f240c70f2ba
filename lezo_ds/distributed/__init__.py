"""The process group: how ranks join it, the device of each, and the scalars that they exchange.

    start        joins the group under any launcher, and turns failed messages into LostRankError
    heartbeat    finds a rank that has ended or hangs
    accelerator  the device of this rank, and what decides the last bits of its results
    collectives  sums, broadcasts and gathers of scalars and small objects

Only this room and sharding import deepspeed.comm and torch.distributed.
"""

from lezo_ds.distributed.accelerator import (
    cpu_name,
    describe_arithmetic,
    device,
    free_memory,
    local_rank,
    out_of_memory,
    supports_fp16,
)
from lezo_ds.distributed.collectives import (
    barrier,
    broadcast_bytes,
    broadcast_object,
    gather_objects,
    on_rank_zero,
    rank,
    sum_tensor,
    sum_vector,
    world_size,
)
from lezo_ds.distributed.start import (
    address_towards,
    init_distributed,
    is_loopback,
    join_group,
    lost_rank,
    lost_ranks_reported,
    open_store,
    shut_down,
)
