"""The process group: how ranks join it, the device of each rank, and the scalars that ranks exchange."""

from deepspeed.comm import barrier

from lezo_ds.distributed.accelerator import arithmetic_facts, cpu_name, device, local_rank
from lezo_ds.distributed.collectives import (
    broadcast_bytes,
    broadcast_object,
    counted_bytes,
    gather_objects,
    on_rank_zero,
    rank,
    sum_integers,
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
