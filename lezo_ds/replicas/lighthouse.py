"""The link to torchft's lighthouse, which makes a quorum of the replicas that ask at the same time.

The lighthouse waits with a quorum for every replica whose heart beats. So a replica that is away is
silent, and so is one that hangs.

An id is NUMBER@HOST:PORT, with the address of the replica's journal transport.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torchft.coordination import LighthouseClient

from lezo_ds.errors import LezoError, LostRankError, cut
from lezo_ds.replicas.patience import in_background
from lezo_ds.replicas.transport import NO_ANSWER

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_NOTICE_SECONDS = 10.0
_BEAT_SECONDS = 0.1
_MOST_PAGE_BYTES = 4 << 20
_ID = r"\d{4,}@([\w.-]+:\d+)"
_LAST_MEMBER = re.compile(rf"<b>\s*{_ID}\s*</b>")
_BEATING = re.compile(rf'class="heartbeat\s*">\s*{_ID}:')


class NoQuorumError(LezoError):
    """There is no quorum yet, and the replica was asked to wait no longer."""


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

        Other programs at this lighthouse have other ids, and are left out.

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
                members = asked.result().participants
                return [member.data for member in members if re.fullmatch(_ID, member.replica_id)]
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

    def live_addresses(self) -> list[str]:
        """Return the addresses of replicas that may have lines; none if the lighthouse is away.

        They are those whose hearts beat, and the members of the last quorum: one may be away to
        evaluate. All others have ended, and their ports may be those of other programs by now.

        torchft (nightly 2026.10.26) has no call that names the replicas, so this reads its page for
        people:

            <b>0001@10.0.0.7:41234</b>                           a member of the last quorum
            <li class="heartbeat">0001@10.0.0.7:41234: seen ...  its heart beats
            <li class="heartbeat old">0002@10.0.0.8:45678: ...   its heart has stopped, for good
        """
        # A proxy would not know a private network.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self._url}/status", timeout=_CONNECT_SECONDS) as answer:
                page = answer.read(_MOST_PAGE_BYTES).decode("utf-8", "replace")
        except NO_ANSWER:
            return []
        return list(dict.fromkeys(_BEATING.findall(page) + _LAST_MEMBER.findall(page)))
