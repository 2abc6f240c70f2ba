"""The replicas that do a step together: torchft's quorum, one all-reduce among their first ranks, and a vote.

A replica is one launch of one or many ranks. Its state is its base weights and its journal, and the number of
the journal's lines says how far it is. Only rank 0 talks to other replicas.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch

os.environ.setdefault("RUST_LOG", "error")  # torchft reads it once, and would write ten lines a step
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing import CheckpointTransport

from lezo_ds import distributed
from lezo_ds.errors import DesyncError, LezoError, LostRankError, UserError, cut
from lezo_ds.journal import Journal
from lezo_ds.replicas.transport import JournalTransport, Lines
from lezo_ds.zo.passes import Pass

logger = logging.getLogger(__name__)
for noisy in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
    logging.getLogger(noisy).setLevel(logging.CRITICAL)

_RPC = timedelta(seconds=15)
_LEAST_PATIENCE = 10.0
_MOST_FAILURES = 3
FEW_LINES = 2  # that a replica may take over while the others wait
_PAGE_BYTES = 4 << 20
_TRANSPORT = re.compile(r"\d+@([\w.-]+:\d+):[0-9a-f-]{36}")  # in a replica's id, on the lighthouse's page


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


class _NoCheckpoints(CheckpointTransport[Any]):  # type: ignore[misc]
    """In place of torchft's own, which unpickles what a peer sends."""

    def metadata(self) -> str:
        return ""

    def send_checkpoint(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Do nothing: replicas take over the lines of a journal."""

    recv_checkpoint = send_checkpoint


class _Group(ProcessGroupGloo):  # type: ignore[misc]
    """A process group that is made again when its members change. They then tell each other `facts`."""

    def __init__(self, store: str) -> None:
        super().__init__()
        self._store_address = store
        self.facts: dict[str, Any] = {}
        self.members: list[dict[str, Any]] = []
        self.position = -1
        self.is_new = False

    def get_reconfigure_handle(self) -> str:
        # A lighthouse that was started again counts its quorums from 1 again, hence the nonce.
        store = f"{self._store_address}/{secrets.token_hex(8)}"
        return json.dumps({"id": self._handle_id(), "store": store, "global_rank": None, **self.facts})

    def reconfigure(self, opts: Any) -> Any:  # noqa: ANN401
        self.members = [json.loads(handle) for handle in opts.handles]
        self.position = [member["id"] for member in self.members].index(self._handle_id())
        self.is_new = True
        logger.info("this is replica %d of %d", self.position + 1, len(self.members))
        # All members are here at the same time, but for one that died after it asked for the quorum.
        self.set_timeout(timedelta(seconds=3 + len(self.members) / 10))
        _connect(self.members[0]["store"].partition("/")[0])  # which TCPStore tries for long
        return super().reconfigure(opts)


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
        self._manager: Any = None
        self._age = self._failures = self._num_before = 0
        self._longest = seconds  # of a round
        distributed.on_rank_zero(lambda: self._listen(journal))

    def _listen(self, journal: Path) -> None:
        secret = os.environ.get("LEZO_SECRET", "")
        try:
            parts = urlsplit(self._lighthouse)
            self._host = distributed.address_towards(parts.hostname or "", parts.port or 80)
        except (OSError, ValueError) as error:
            text = f"elastic.lighthouse={self._lighthouse} names no host that can be reached ({error})"
            raise UserError(text, fix="set elastic.lighthouse=http://HOST:29510") from error
        if not secret and not distributed.is_loopback(self._host):
            text = f"elastic.lighthouse={self._lighthouse} is on another machine, and LEZO_SECRET is not set"
            raise UserError(text, fix="export LEZO_SECRET=... with the same value for all replicas")
        self._transport = JournalTransport(journal, self._host, secret.encode())

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
        with suppress(OSError), opener.open(f"{self._lighthouse}/status", timeout=_RPC.seconds) as answer:
            page = answer.read(_PAGE_BYTES).decode("utf-8", "replace")
        for address in dict.fromkeys(_TRANSPORT.findall(page)):
            with suppress(OSError):  # that replica has ended
                if address != self._transport.address and (lines := self._transport.fetch(address)).data:
                    return lines
        return None

    def is_alive(self, address: str) -> bool:
        """Return whether a replica still runs, in the quorum or not."""
        with suppress(OSError):
            _connect(address)
            return True
        return False

    def meet(self) -> Place:
        """Join the quorum of the next round, and return this replica's place in it. A collective."""
        self.place = distributed.on_rank_zero(self._meet)
        return self.place

    def _meet(self) -> Place:
        manager = self._wait_for_quorum()
        members, position = self._group.members, self._group.position
        lines, has_left = None, False
        # A lighthouse that was started again may give an old number to a new quorum.
        if (position, len(members)) != (manager.participating_rank(), manager.num_participants()):
            manager.report_error(RuntimeError("the members are not those of the quorum"))
        if self._group.is_new:
            self._group.is_new = False
            # Replicas that start together on unlike machines have different headers.
            counts = Counter(member["run"] for member in members)
            first = max(members, key=lambda member: (member["lines"], counts[member["run"]]))
            has_first = [member["run"] == first["run"] for member in members]
            missing = [first["lines"] - member["lines"] for member in members]
            is_far = [not same or num > FEW_LINES for same, num in zip(has_first, missing, strict=True)]
            if any(is_far):
                manager.report_error(RuntimeError("a member is too far behind"))
            try:
                if is_far[position] or missing[position]:
                    lines = self._transport.fetch(first["address"])
                    has_left = is_far[position]
            except OSError as error:
                manager.report_error(error)
        if has_left:
            self.leave()
        elif manager.errored():
            self._vote()
        self._began = time.monotonic()
        workers = [member["workers"] for member in members]
        addresses = [member["address"] for member in members]
        news = [evaluation for member in members for evaluation in member["news"]]
        return Place(position, sum(workers[:position]), sum(workers), addresses, news, lines, has_left)

    def _wait_for_quorum(self) -> Any:  # noqa: ANN401
        assert self.journal is not None
        deadline = time.monotonic() + self._seconds
        text = "waiting for a quorum: is %s there, and enough replicas?"
        patience = threading.Timer(_LEAST_PATIENCE, logger.warning, (text, self._lighthouse))
        patience.daemon = True
        patience.start()
        while True:
            num_lines = len(self.journal.records) + 1
            try:
                manager = self._manager or self._join()
                self._group.facts |= {"lines": num_lines, "news": self.news, "age": self._age}
                manager.load_state_dict({"step": 0, "batches_committed": 0})
                manager.start_quorum(allow_heal=False)
                patience.cancel()
                return manager
            except (RuntimeError, OSError) as error:
                self.leave()
                if time.monotonic() > deadline:
                    raise LostRankError(
                        f"{self._lighthouse} gives no quorum: {cut(str(error), 200)}; "
                        "fix: start the lighthouse or more replicas, then run the same command again"
                    ) from error
                time.sleep(1)

    def _join(self) -> Any:  # noqa: ANN401
        assert self.journal is not None
        self._store = distributed.open_store(self._host)
        self._group = _Group(f"{self._host}:{self._store.port}")
        run, address = self.journal.checksums[0], self._transport.address
        self._group.facts = {"run": run, "workers": self.num_workers, "address": address}
        self._manager = Manager(
            pg=self._group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,  # the lighthouse has the user's own minimum
            use_async_quorum=False,
            init_sync=False,
            timeout=_RPC,
            connect_timeout=_RPC,
            # The request stands until there is a quorum. The lighthouse may count one that was given up.
            quorum_timeout=timedelta(seconds=self._seconds),
            quorum_retries=int(self._seconds),  # once a second, while there is no lighthouse
            rank=0,
            world_size=1,
            store_addr=self._host,
            store_port=self._store.port,
            lighthouse_addr=self._lighthouse,
            hostname=self._host,
            replica_id=f"{self._number:04}@{address}",
            checkpoint_transport=_NoCheckpoints(),
        )
        return self._manager

    def leave(self) -> None:
        """Leave the quorum at once. The next `meet` joins it again."""
        if self._manager is not None:
            self._manager.shutdown(wait=False)
            self._group.abort(errored=False)
            self._manager = self._store = None

    def sum(self, values: Sequence[float], facts: Mapping[str, str]) -> list[float]:
        """Return the sums of a round over all replicas, once they agree on its `facts`. A collective.

        `values` ends with votes for a stop, which is this replica's own, and for a snapshot.

        Raises:
            StepLostError: a replica left meanwhile, or disagrees.
            DesyncError: this replica disagrees with the others.
            LostRankError: this replica does not reach the others.
        """
        return distributed.on_rank_zero(lambda: self._sum(values, facts))

    def _sum(self, values: Sequence[float], facts: Mapping[str, str]) -> list[float]:
        assert self.journal is not None
        position, num = self._group.position, len(self._group.members)
        facts = {**facts, "journal": self.journal.checksums[1], "weights": self.digest}
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=6).digest()
        rows = [0.0] * num
        rows[position] = own = float(int.from_bytes(digest, "little"))  # float64 holds 48 bits exactly
        *losses, stop, snapshot = values
        sums = torch.tensor([*losses, float(self.stops_all), snapshot, *rows], dtype=torch.float64)
        # A replica that hangs must not stop the others for long, and one that is slow does not hang.
        patience = min(self._seconds, max(_LEAST_PATIENCE, 4 * self._longest) * 2**self._failures)
        is_odd = False
        try:
            self._group.parent.allreduce([sums], timeout=timedelta(seconds=patience)).wait()
            rows = sums[-num:].tolist()
            if rows != [own] * num:
                is_odd = rows[position] == own != self._right_one(rows)
                raise RuntimeError("the work of replicas differs")
        except RuntimeError as error:
            self._manager.report_error(error)
            self._group.abort(errored=False)  # others may wait in the all-reduce for this replica
        self._vote(is_odd)
        self._longest = max(time.monotonic() - self._began, 0.9 * self._longest if self._age else 0.0)
        self._age += 1
        *totals, stops, snapshots = sums[:-num].tolist()
        return [*totals, stop + stops, snapshots]

    def _right_one(self, rows: Sequence[float]) -> float:
        """Return the number of most replicas; of several such numbers, that of the oldest one."""
        counts, members = Counter(rows), self._group.members
        return rows[max(range(len(rows)), key=lambda row: (counts[rows[row]], members[row]["age"], -row))]

    def _vote(self, is_odd: bool = False) -> None:
        """Raise an error unless the round counts."""
        num, is_last = len(self._group.members), self._group.position + 1 == len(self._group.members)
        try:
            if self._manager.should_commit():
                self._failures = 0
                return
        except (RuntimeError, OSError):
            self.leave()
        if is_odd:
            raise DesyncError(
                "this replica leaves: its plan, batch, journal or weights differ from those of the others; "
                "fix: run the same command again, with the same recipe, data and code as everywhere"
            )
        self._failures = self._failures + 1 if num >= self._num_before else 1
        self._num_before = num
        if self._failures >= _MOST_FAILURES and num > 1 and is_last:
            raise LostRankError(
                f"this replica and {num - 1} others do not reach each other; "
                "fix: check the network between them, then run the same command again"
            )
        raise StepLostError("a replica has left")


def _connect(address: str) -> None:
    """Raise an OSError if nobody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=2).close()
