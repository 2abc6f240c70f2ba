"""A round: replicas form a quorum, share the forward passes of a step, and sum the losses.

A replica is one launch of one or many ranks. Its state is its base weights and its journal, and the
number of the journal's lines says how far it is. Only rank 0 talks to other replicas.

    lighthouse       replica 0        replica 1        replica 2
        |<--- Member ----|                |                |     each says who it is, and how far
        |<--- Member ----|----------------|                |
        |<--- Member ----|----------------|----------------|
        |-- all Members->|--------------->|--------------->|
                         |<--- group ---->|<--- group ---->|     connect, if members are new
                         |---- lines ---->|                |     to one that lacks a few
                    passes 0, 3      passes 1, 4      passes 2, 5
                         |<---- sum ----->|<---- sum ----->|     losses, votes and checksums
                      journal          journal          journal
                      update           update           update

If a member dies on the way, the sum fails everywhere. No journal has the step then, and those that
are left repeat the round.

A replica that starts, catches up or evaluates is away. Before it asks for a quorum, it takes over
the lines of the members of the last one. In the quorum, its journal decides, compared with that of
the leader:

    all lines                    takes part
    lacks at most FEW_LINES      takes them over, then takes part
    lacks more, or has others    leaves and takes them over

A new replica knows no members, so its first quorum tells it where the lines are. The others lose
this round, and repeat it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit

from lezo_ds import distributed
from lezo_ds.distributed.workers import Lines, StepLostError, Workers
from lezo_ds.errors import DesyncError, LezoError, LostRankError, UserError
from lezo_ds.journal import EvaluationRecord, header_checksum
from lezo_ds.replicas.group import ReplicaGroup, reaches
from lezo_ds.replicas.lighthouse import Lighthouse
from lezo_ds.replicas.member import (
    FEW_LINES,
    Member,
    is_far,
    leader_of,
    read_members,
    right_checksum,
)
from lezo_ds.replicas.patience import Patience, in_background
from lezo_ds.replicas.transport import JournalTransport
from lezo_ds.zo.passes import Pass

logger = logging.getLogger(__name__)

_CHECKSUM_BYTES = 6  # float64 holds 48 bits exactly
_SEARCH_SECONDS = 10.0


class Role(NamedTuple):
    """What this replica does in a round. A worker is a rank that runs passes.

    Attributes:
        position: index among the members. The first one evaluates and writes snapshots.
        first_worker: number of the workers of the members before this one.
        num_workers: number of the workers of all members.
        learning_rate: of the round's step, which is the leader's.
        evaluations: that members bring along.
    """

    position: int
    first_worker: int
    num_workers: int
    learning_rate: float
    evaluations: Sequence[EvaluationRecord]


class Replicas(Workers):
    """The link of this replica to the others, whose methods are collectives of its ranks.

    Attributes:
        role: of this replica in the last round that it met for; None while it is far behind.
        num_workers: workers of this replica. The run sets it.
        stops_all: whether this replica votes that all replicas stop.
        digest: of the weights, in a step that checks them, else "".
    """

    are_shared = True

    def __init__(self, lighthouse: str, number: int, journal: Path, seconds: float) -> None:
        """Start to listen for other replicas. The lighthouse does not know this one yet.

        Args:
            lighthouse: http://HOST:PORT.
            number: of this replica. Those with lower numbers come first in a round.
            journal: the path of its journal, from which others take lines.
            seconds: to wait for the lighthouse, and at most for a replica.

        Raises:
            UserError: the address is no address, or the secret of several machines is missing.
        """
        super().__init__()
        self.role: Role | None = None
        self.num_workers = 1
        self.stops_all = False
        self.digest = ""
        self._seconds = seconds
        self._is_away = True
        self._evaluator = ""  # address of the last replica that left to evaluate
        self._brought: Sequence[EvaluationRecord] = ()
        distributed.on_rank_zero(lambda: self._listen(lighthouse, number, journal))

    def _listen(self, lighthouse: str, number: int, journal: Path) -> None:
        try:
            url = urlsplit(lighthouse)
            # Without http://, there is no hostname.
            host = distributed.address_towards(url.hostname or ".invalid", url.port or 80)
        except (OSError, ValueError) as error:
            raise UserError(
                f"elastic.lighthouse={lighthouse} names no host that can be reached ({error})",
                fix="set elastic.lighthouse=http://HOST:29510",
            ) from error
        secret = os.environ.get("LEZO_SECRET", "")
        if not secret and not distributed.is_loopback(host):
            raise UserError(
                f"elastic.lighthouse={lighthouse} is on another machine, and LEZO_SECRET is not "
                "set",
                fix="export LEZO_SECRET=... with the same value for all replicas",
            )
        self._members: list[Member] = []  # of the last quorum
        self._position = -1  # of this replica among them
        self._patience = Patience(self._seconds)
        self._group = ReplicaGroup(host)
        self._transport = JournalTransport(journal, host, secret.encode())
        replica_id = f"{number:04}@{self._transport.address}"
        self._lighthouse = Lighthouse(lighthouse, replica_id, self._seconds)

    def passes_of(self, worker: int, passes: Sequence[Pass]) -> list[Pass]:
        """Return the passes of a worker of this replica: every n-th of all, for n workers.

        All workers of a replica run as many passes as the first. One that has fewer runs a pass
        that does not count.
        """
        assert self.role is not None
        first = self.role.first_worker
        step = self.role.num_workers
        own = list(passes[first + worker :: step])
        num_of_first = len(passes[first::step])
        idle = passes[0]._replace(counts=False)
        return own + [idle] * (num_of_first - len(own))

    def learning_rate(self, own: float) -> float:
        """Return the leader's: a cosine may have another last bit on another processor."""
        assert self.role is not None
        return self.role.learning_rate

    def _search_lines(self) -> Lines | None:
        """Return lines of a member of the last quorum, or None if it knows none that has more."""
        for member in self._members:
            # It has ended, or its port has another owner by now.
            with suppress(OSError, LezoError):
                lines = self._transport.fetch(member.address)
                if lines.data:
                    return lines
        return None

    def meet(self, learning_rate: float, *, stops_all: bool) -> Lines | None:
        """Join the quorum of the next round, as `Workers.meet` says.

        Raises:
            NoQuorumError: there is no quorum yet, and this replica gives up.
            LostRankError: there is no lighthouse, or too few replicas; or members do not reach each
                other, and this one is the last of them.
        """
        self.stops_all = stops_all
        self.digest = ""
        self.role, lines = distributed.on_rank_zero(lambda: self._meet(learning_rate))
        return lines

    def _meet(self, learning_rate: float) -> tuple[Role | None, Lines | None]:
        if self._is_away:
            lines = None
            with suppress(TimeoutError):  # the quorum will tell who has lines
                lines = in_background(self._search_lines).result(_SEARCH_SECONDS)
            if lines is not None:
                self._is_away = lines.data.count(b"\n") > FEW_LINES
                return None, lines
        self._is_away = False
        while True:
            try:
                return self._join(learning_rate)
            except StepLostError as error:
                logger.info("the replicas meet again: %s", error)

    def _join(self, learning_rate: float) -> tuple[Role | None, Lines | None]:
        """Join the next quorum. StepLostError: a member has died, or leaves. Meet again."""
        assert self.journal is not None
        statement = Member(
            run=header_checksum(self.journal.header),
            lines=len(self.journal.records),
            learning_rate=learning_rate,
            workers=self.num_workers,
            evaluations=tuple(self.evaluations),
            age=self._patience.num_rounds,
            longest=self._patience.longest,
            group=self._group.name,
            next_group=secrets.token_hex(8),
            address=self._transport.address,
            store=self._group.store_address,
        )
        statements = self._lighthouse.wait_for_quorum(asdict(statement), self.gives_up)
        members = read_members(statements)
        position = [member.address for member in members].index(statement.address)
        self._members = members
        self._position = position
        leader = leader_of(members)
        has_left = is_far(members[position], leader)
        if has_left:
            self.leave()  # first, because the others wait for its heartbeat
        elif any(is_far(member, leader) for member in members):
            raise StepLostError("a replica takes over many lines first")
        lines = None
        try:
            if not has_left:
                self._group.form(members, position)
            if has_left or statement.lines < leader.lines:
                fetch = partial(self._transport.fetch, leader.address)
                lines = in_background(fetch).result(self._seconds)
        except (RuntimeError, OSError):
            self._lose_round()
        if has_left:
            return None, lines
        self._patience.start_round(min(member.longest for member in members))
        # If this replica hangs, the others need not wait for it.
        self._lighthouse.beats_until = time.monotonic() + self._patience.seconds
        workers = [member.workers for member in members]
        role = Role(
            position=position,
            first_worker=sum(workers[:position]),
            num_workers=sum(workers),
            learning_rate=leader.learning_rate,
            evaluations=[evaluation for member in members for evaluation in member.evaluations],
        )
        return role, lines

    def compare(self, digest: Callable[[], str]) -> None:
        self.digest = digest()

    def takes_turn(self, *, is_over: bool) -> bool:
        """Return whether this is the first replica of the last round, which leaves to evaluate.

        All others note who that is. While there are steps, the next replica evaluates what is due
        next. After the last step, all wait for the one that is away, as long as it lives.
        """
        if self.role is None:  # before the first round, nobody knows who is the first
            return False
        is_first = self.role.position == 0
        if not distributed.on_rank_zero(lambda: self._is_free(is_over=is_over)) or not is_first:
            return False
        self.leave()
        return True

    def _is_free(self, *, is_over: bool) -> bool:
        """Return whether the first replica may evaluate, and note who that is."""
        addresses = [member.address for member in self._members]
        if is_over and self._evaluator not in ("", *addresses) and reaches(self._evaluator):
            return False
        self._evaluator = addresses[0]
        return True

    def brought(self) -> Sequence[EvaluationRecord]:
        found = self._brought
        self._brought = ()
        return found

    def leave(self) -> None:
        """Leave the quorum at once. The next `meet` joins it again."""
        if distributed.rank() == 0:
            self._is_away = True
            self._lighthouse.beats_until = -math.inf
            self._group.leave()

    def sum(self, values: Sequence[float], claims: Mapping[str, str]) -> list[float]:
        """Return the sums of a round over all replicas, once they agree on its claims.

        The message of a round among n members, in float64:

            | losses of all passes | stops_all | checksum of member 0 | ... | n - 1 |

        Args:
            values: [losses + 1], summed over the ranks of this replica. The last one is the votes
                for a stop, which is this replica's own.
            claims: what this replica works on (see `agreement`).

        Raises:
            StepLostError: a replica has left, or disagrees. The round has changed nothing.
            DesyncError: this replica disagrees with those that are right.
        """
        sums = distributed.on_rank_zero(lambda: self._sum(values, claims))
        assert self.role is not None
        self._brought = self.role.evaluations
        self.evaluations = []
        return sums

    def _sum(self, values: Sequence[float], claims: Mapping[str, str]) -> list[float]:
        assert self.journal is not None
        claims = {**claims, "journal": self.journal.last_checksum, "weights": self.digest}
        digest = hashlib.blake2b(repr(claims).encode(), digest_size=_CHECKSUM_BYTES).digest()
        own = float(int.from_bytes(digest, "little"))
        checksums = [0.0] * len(self._members)
        checksums[self._position] = own
        *losses, stop = values
        message = [*losses, float(self.stops_all), *checksums]
        try:
            sums = self._group.sum(message, self._patience.seconds)
        except RuntimeError:
            self._lose_round()
        checksums = sums[-len(checksums) :]
        if set(checksums) != {own}:
            right = right_checksum(checksums, [member.age for member in self._members])
            if checksums[self._position] == own != right:
                raise DesyncError(
                    "this replica leaves: its plan, batch, journal or weights differ from those "
                    "of others; fix: run the same command again, with the same recipe, data and "
                    "code as everywhere"
                )
            self._lose_round()
        self._patience.finish_round()
        *losses, stops_all = sums[: -len(checksums)]
        return [*losses, stop + stops_all]

    def _lose_round(self) -> NoReturn:
        self._group.leave()
        num_members = len(self._members)
        gives_up = self._patience.lose_round()
        # Only the last one, so that the others can go on.
        if gives_up and num_members > 1 and self._position == num_members - 1:
            raise LostRankError(
                f"this replica and {num_members - 1} others cannot reach each other; "
                "fix: check the network between them, then run the same command again"
            )
        raise StepLostError("a replica has left")
