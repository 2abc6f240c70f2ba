"""The replicas that do a step together: torchft's quorum, and one all-reduce among their first ranks.

A replica is one launch of one or many ranks. Its state is its base weights and its journal, and the number of
the journal's lines says how far it is. Only rank 0 talks to other replicas.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import secrets
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

import torch
from torchft.coordination import LighthouseClient

from lezo_ds import distributed
from lezo_ds.errors import DesyncError, LezoError, LostRankError, UserError, cut
from lezo_ds.journal import Journal
from lezo_ds.replicas.transport import JournalTransport, Lines
from lezo_ds.zo.passes import Pass

logger = logging.getLogger(__name__)

FEW_LINES = 2  # that a replica may take over while the others wait
_CONNECT_SECONDS = 5.0
_LEAST_PATIENCE = 10.0
_MOST_FAILURES = 3
_ADDRESS = re.compile(r"\d{4,}@([\w.-]+:\d+)")  # in a replica's id, on the lighthouse's page


class StepLostError(LezoError):
    """A replica left during the round. It has changed nothing, and the others repeat it."""


class Place(NamedTuple):
    """The part of this replica in a round."""

    position: int
    first_worker: int  # a worker is a rank of any participant, or a group that splits the weights
    num_workers: int
    addresses: Sequence[str]  # of the participants' transports
    news: Sequence[Mapping[str, Any]]  # evaluations that participants bring along
    lines: Lines | None  # to take over first
    has_left: bool  # to take over many lines, while the others go on


class Replicas:
    """The link of this replica to the others. Those with a lower `number` come first in a round."""

    def __init__(self, lighthouse: str, number: int, journal: Path, seconds: float) -> None:
        self.place: Place | None = None  # in the last round
        self.journal: Journal | None = None  # on rank 0, once it is open
        self.news: list[Mapping[str, Any]] = []  # evaluations to bring along to the next quorum
        self.num_workers = 1  # of this replica
        self.stops_all = False  # whether all replicas shall stop
        self.digest = ""  # of the weights, in a step that checks them
        self._lighthouse, self._number = lighthouse, number
        self._seconds = seconds  # to wait for the lighthouse, and at most for a replica
        self._client: Any = None
        self._is_member = False
        self._members: list[dict[str, Any]] = []  # what they say of themselves
        self._group: Any = None  # of the members
        self._group_name = ""
        self._position = -1  # of this one
        self._age = self._failures = self._num_before = 0
        self._longest = seconds  # of a round
        self._hangs_at = math.inf
        distributed.on_rank_zero(lambda: self._listen(journal))

    def _listen(self, journal: Path) -> None:
        secret = os.environ.get("LEZO_SECRET", "")
        try:
            parts = urlsplit(self._lighthouse)
            # Without http://, there is no hostname.
            self._host = host = distributed.address_towards(
                parts.hostname or ".invalid", parts.port or 80
            )
        except (OSError, ValueError) as error:
            text = (
                f"elastic.lighthouse={self._lighthouse} names no host that can be reached ({error})"
            )
            raise UserError(text, fix="set elastic.lighthouse=http://HOST:29510") from error
        if not secret and not distributed.is_loopback(host):
            text = f"elastic.lighthouse={self._lighthouse} is on another machine, and LEZO_SECRET is not set"
            raise UserError(text, fix="export LEZO_SECRET=... with the same value for all replicas")
        self._transport = JournalTransport(journal, host, secret.encode())
        self._store = distributed.open_store(host)
        self._store_address = f"{host}:{self._store.port}"
        self._id = f"{self._number:04}@{self._transport.address}"
        self._asking = ThreadPoolExecutor(1)  # signals reach the main thread meanwhile
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            with suppress(RuntimeError, OSError):  # the lighthouse is away
                if self._is_member and time.monotonic() < self._hangs_at:
                    self._client.heartbeat(self._id)
            time.sleep(0.1)

    def share(self, passes: Sequence[Pass], worker: int) -> list[Pass]:
        """Return the passes of a worker of this replica: every n-th of all, and one that does not count.

        The workers of a replica gather weights together, so all run as many passes as the first one.
        """
        assert self.place is not None
        first, step = self.place.first_worker, self.place.num_workers
        own = list(passes[first + worker :: step])
        return own + [passes[0]._replace(counts=False)] * (len(passes[first::step]) - len(own))

    def newer_lines(self) -> Lines | None:
        """Return, on rank 0, lines that a member of the last quorum has and this journal lacks."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        page = ""
        with (
            suppress(OSError),
            opener.open(f"{self._lighthouse}/status", timeout=_CONNECT_SECONDS) as answer,
        ):
            page = answer.read(4 << 20).decode("utf-8", "replace")
        for address in dict.fromkeys(_ADDRESS.findall(page)):
            with suppress(OSError):  # that replica has ended
                if (
                    address != self._transport.address
                    and (lines := self._transport.fetch(address)).data
                ):
                    return lines
        return None

    def meet(self) -> Place:
        """Join the quorum of the next round, and return this replica's place in it. A collective."""
        self.place = distributed.on_rank_zero(self._meet)
        return self.place

    def _meet(self) -> Place:
        quorum = self._wait_for_quorum()
        self._members = members = [member.data for member in quorum.participants]
        addresses = [member["address"] for member in members]
        self._position = position = addresses.index(self._transport.address)
        # Replicas that start together on unlike machines have different headers.
        counts = Counter(member["run"] for member in members)
        first = max(members, key=lambda member: (member["lines"], counts[member["run"]]))
        far = [
            m
            for m in members
            if m["run"] != first["run"] or first["lines"] - m["lines"] > FEW_LINES
        ]
        is_far, lines = members[position] in far, None
        try:
            if not far:
                self._form_group()
            if is_far or members[position]["lines"] < first["lines"]:
                lines = self._transport.fetch(first["address"])
        except (RuntimeError, OSError):
            self._lose_round()
        if is_far:
            self.leave()
        elif far:
            raise StepLostError("a replica takes over many lines first")
        self._began = time.monotonic()
        # A replica that hangs must not stop the others for long, and one that is slow does not hang.
        longest = min(member["longest"] for member in members)  # a new one does not know
        self._patience = min(self._seconds, max(_LEAST_PATIENCE, 4 * longest) * 2**self._failures)
        self._hangs_at = self._began + self._patience
        workers = [member["workers"] for member in members]
        news = [evaluation for member in members for evaluation in member["news"]]
        return Place(
            position, sum(workers[:position]), sum(workers), addresses, news, lines, is_far
        )

    def _wait_for_quorum(self) -> Any:
        assert self.journal is not None
        facts = {
            "run": self.journal.header_checksum,
            "lines": len(self.journal.records),
            "workers": self.num_workers,
            "news": self.news,
            "age": self._age,
            "longest": self._longest,
            "group": self._group_name,
            "next_group": secrets.token_hex(8),
            "address": self._transport.address,
            "store": self._store_address,
        }
        deadline = time.monotonic() + self._seconds
        self._hangs_at = math.inf
        while True:
            left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            try:
                if self._client is None:
                    self._client = LighthouseClient(
                        self._lighthouse, timedelta(seconds=_CONNECT_SECONDS)
                    )
                self._is_member = True
                asked = self._asking.submit(self._client.quorum, self._id, left, data=facts)
                while wait([asked], timeout=_LEAST_PATIENCE).not_done:
                    logger.warning(
                        "waiting for replicas, or for the lighthouse %s", self._lighthouse
                    )
                return asked.result()
            except (RuntimeError, OSError) as error:
                if time.monotonic() > deadline:
                    raise LostRankError(
                        f"{self._lighthouse} gives no quorum: {cut(str(error), 200)}; "
                        "fix: start the lighthouse or more replicas, then run the same command again"
                    ) from error
                logger.warning("waiting for the lighthouse %s", self._lighthouse)
                time.sleep(1)

    def _form_group(self) -> None:
        """Connect the members, unless they are those of the last round."""
        first, num = self._members[0], len(self._members)
        is_known = {member["group"] for member in self._members} == {self._group_name}
        if is_known and self._group is not None and self._group.size() == num:
            return
        self._leave_group()
        logger.info("this is replica %d of %d", self._position + 1, num)
        if not reaches(first["store"]):  # TCPStore would try for long
            raise OSError(f"nobody listens at {first['store']}")
        # All members are here at the same time, but for one that died after it asked for the quorum.
        limit = timedelta(seconds=_CONNECT_SECONDS + num / 10)
        store, name = first["store"], first["next_group"]
        self._group = distributed.join_group(store, name, self._position, num, self._host, limit)
        self._group_name = name

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.abort()  # others may wait in the all-reduce for this replica
            self._group, self._group_name = None, ""

    def leave(self) -> None:
        """Leave the quorum at once. The next `meet` joins it again."""
        self._is_member = False
        self._leave_group()

    def sum(self, values: Sequence[float], facts: Mapping[str, str]) -> list[float]:
        """Return the sums of a round over all replicas, once they agree on its `facts`. A collective.

        `values` ends with votes for a stop, which is this replica's own, and for a snapshot.
        StepLostError: a replica left or disagrees; DesyncError: this one does.
        """
        return distributed.on_rank_zero(lambda: self._sum(values, facts))

    def _sum(self, values: Sequence[float], facts: Mapping[str, str]) -> list[float]:
        assert self.journal is not None
        facts = {**facts, "journal": self.journal.last_checksum, "weights": self.digest}
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=6).digest()
        rows = [0.0] * len(self._members)
        rows[self._position] = own = float(
            int.from_bytes(digest, "little")
        )  # float64 holds 48 bits exactly
        *losses, stop, snapshot = values
        sums = torch.tensor([*losses, float(self.stops_all), snapshot, *rows], dtype=torch.float64)
        try:
            self._group.allreduce([sums], timeout=timedelta(seconds=self._patience)).wait()
        except RuntimeError:
            self._lose_round()
        rows = sums[-len(rows) :].tolist()
        if set(rows) != {own}:
            # Most replicas are right; of several such groups, the one with the oldest replica.
            counts, ages = Counter(rows), [member["age"] for member in self._members]
            right = rows[
                max(range(len(rows)), key=lambda row: (counts[rows[row]], ages[row], -row))
            ]
            if rows[self._position] == own != right:
                raise DesyncError(
                    "this replica leaves: its plan, batch, journal or weights differ from those of others; "
                    "fix: run the same command again, with the same recipe, data and code as everywhere"
                )
            self._lose_round()
        self._failures = 0
        self._longest = max(
            time.monotonic() - self._began, 0.9 * self._longest if self._age else 0.0
        )
        self._age += 1
        *totals, stops, snapshots = sums[: -len(rows)].tolist()
        return [*totals, stop + stops, snapshots]

    def _lose_round(self) -> NoReturn:
        self._leave_group()
        num = len(self._members)
        self._failures = self._failures + 1 if num >= self._num_before else 1
        self._num_before = num
        if self._failures >= _MOST_FAILURES and num > 1 and self._position == num - 1:
            raise LostRankError(
                f"this replica and {num - 1} others do not reach each other; "
                "fix: check the network between them, then run the same command again"
            )
        raise StepLostError("a replica has left")


def reaches(address: str) -> bool:
    """Return whether somebody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True
