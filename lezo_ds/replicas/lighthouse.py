"""The link to torchft's lighthouse, which makes a quorum of the replicas that ask at the same time.

The lighthouse waits with a quorum for every replica whose heart beats. So a replica that is away is
silent, and so is one that hangs. Members are in the order of their ids.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torchft.coordination import LighthouseClient

from lezo_ds.distributed.workers import NoQuorumError
from lezo_ds.errors import LostRankError, cut
from lezo_ds.replicas.patience import in_background

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_NOTICE_SECONDS = 10.0
_BEAT_SECONDS = 0.1


class Lighthouse:
    """The lighthouse as rank 0 of a replica sees it.

    Attributes:
        beats_until: time on the monotonic clock when the replica's heart stops: -inf while it is
            away, inf while it waits for a quorum, and during a round the end of its patience.
    """

    def __init__(self, url: str, replica_id: str, seconds: float) -> None:
        """`seconds` is how long to wait for the lighthouse and for enough replicas."""
        self.beats_until = -math.inf
        self._url = url
        self._replica_id = replica_id
        self._seconds = seconds
        self._client: Any = None
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            with suppress(RuntimeError, OSError):  # the lighthouse is away
                if time.monotonic() < self.beats_until:
                    self._client.heartbeat(self._replica_id)
            time.sleep(_BEAT_SECONDS)

    def wait_for_quorum(
        self, statement: Mapping[str, Any], gives_up: Callable[[], bool]
    ) -> list[Any]:
        """Return what the members of the next quorum say of themselves, in the order of their ids.

        Args:
            statement: what this replica says of itself, in JSON's types.
            gives_up: whether to wait no longer. It is asked every ten seconds.

        Raises:
            NoQuorumError: this replica gives up.
            LostRankError: there is no lighthouse, or there are too few replicas, for long.
        """
        deadline = time.monotonic() + self._seconds
        while True:
            limit = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            try:
                if self._client is None:
                    self._client = LighthouseClient(self._url, timedelta(seconds=_CONNECT_SECONDS))
                self.beats_until = math.inf
                ask = partial(self._client.quorum, self._replica_id, limit, data=statement)
                # In the background, because no signal reaches the main thread inside torchft's
                # call.
                asked = in_background(ask)
                while wait([asked], timeout=_NOTICE_SECONDS).not_done:
                    logger.warning("waiting for replicas, or for the lighthouse %s", self._url)
                    if gives_up():
                        raise NoQuorumError
                return [member.data for member in asked.result().participants]
            except (RuntimeError, OSError) as error:
                if time.monotonic() > deadline:
                    raise LostRankError(
                        f"{self._url} gives no quorum: {cut(str(error), 200)}; fix: start the "
                        "lighthouse or more replicas, then run the same command again"
                    ) from error
                logger.warning("waiting for the lighthouse %s", self._url)
                if gives_up():
                    raise NoQuorumError from error
                time.sleep(1)
