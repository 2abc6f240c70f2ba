"""The process group of a quorum: the first rank of each member, over gloo, on CPUs."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from lezo_ds import distributed
from lezo_ds.replicas.member import Member
from lezo_ds.replicas.transport import NO_ANSWER

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_CONNECT_SECONDS_A_MEMBER = 0.1


class ReplicaGroup:
    """The group that this replica is in, on rank 0. It lasts as long as its members stay the same.

    Attributes:
        name: of the group, which the members meet by; "" outside of a group.
        store_address: HOST:PORT of this replica's store, where they meet if it is the first member.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._store = distributed.open_store(host)
        self.store_address = f"{host}:{self._store.port}"
        self.name = ""
        self._group: Any = None

    def form(self, members: Sequence[Member], position: int) -> None:
        """Connect the members, unless they are those of the last round.

        Raises:
            OSError, RuntimeError: a member has died after it asked for the quorum.
        """
        num = len(members)
        last_groups = {member.group for member in members}
        if self.name and last_groups == {self.name} and self._group.size() == num:
            return
        self.leave()
        logger.info("this is replica %d of %d", position + 1, num)
        first = members[0]
        if not reaches(first.store):  # TCPStore would try for long
            raise OSError(f"no server listens at {first.store}")
        # All members are here at the same time, so they meet soon.
        limit = timedelta(seconds=_CONNECT_SECONDS + _CONNECT_SECONDS_A_MEMBER * num)
        self._group = distributed.join_group(
            first.store, first.next_group, position, num, self._host, limit
        )
        self.name = first.next_group

    def leave(self) -> None:
        """Leave the group. The others notice it at once, if they wait for this replica in a sum."""
        if self._group is not None:
            self._group.abort()
            self._group = None
            self.name = ""

    def sum(self, values: Sequence[float], seconds: float) -> list[float]:
        """Return the sums of all members' float64 values. RuntimeError: a member has left."""
        sums = torch.tensor(values, dtype=torch.float64)
        self._group.allreduce([sums], timeout=timedelta(seconds=seconds)).wait()
        return sums.tolist()


def reaches(address: str) -> bool:
    """Return whether somebody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except NO_ANSWER:
        return False
    return True
