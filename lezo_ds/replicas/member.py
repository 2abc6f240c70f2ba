"""What a replica says of itself, and what all members of a quorum conclude from it.

Each replica sends its `Member` to the lighthouse, and the lighthouse sends those of all members to
each. The functions here are pure, so all members come to the same conclusions without another
message.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter

from lezo_ds.errors import UserError, cut
from lezo_ds.journal import EvaluationRecord

logger = logging.getLogger(__name__)

FEW_LINES = 2
"""Most lines that a replica may take over while the others wait."""


@dataclass(frozen=True)
class Member:
    """What a replica says of itself when it asks for a quorum. The lighthouse sends it as JSON.

    Attributes:
        run: checksum of the journal's header, which tells runs apart.
        lines: number of records in the journal: how far the replica is.
        learning_rate: of the step after these records, as this machine computes it.
        workers: number of its ranks that run passes; a group that splits the weights counts once.
        evaluations: what it has evaluated while it was away, for all journals.
        age: number of rounds that it has finished since it started.
        longest: seconds of its longest recent round. Before its first, the most that it waits.
        group: name of the group that it has joined, or "".
        next_group: name of the members' next group if this replica is the first member.
        address: HOST:PORT of its journal transport.
        store: HOST:PORT of the store where the members meet if it is the first member.
    """

    # What another version or another program sends must not pass for a replica.
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    run: str
    lines: NonNegativeInt
    learning_rate: NonNegativeFloat
    workers: PositiveInt
    evaluations: tuple[EvaluationRecord, ...]
    age: NonNegativeInt
    longest: NonNegativeFloat
    group: str
    next_group: str
    address: str
    store: str


_READER = TypeAdapter(Member)


def read_members(statements: Sequence[Any]) -> list[Member]:
    """Return the members of a quorum from what they have sent, without those that are not replicas.

    Of replicas, the first one decides who is one. Otherwise, two versions that do not understand
    each other would each leave the other out, and train on their own.

    Raises:
        UserError: this replica does not understand the first one.
    """
    members = []
    for statement in statements:
        if not isinstance(statement, dict) or "next_group" not in statement:
            continue  # another program
        try:
            content = json.dumps(statement, allow_nan=False)
            members.append(_READER.validate_json(content))
        except ValueError as error:
            if not members:
                raise UserError(
                    f"the first replica is of another version: it says {cut(str(statement), 200)}",
                    fix="install the same version everywhere, and give each run a lighthouse",
                ) from error
            logger.warning("a member of the quorum is not a replica: %s", cut(str(statement), 200))
    return members


def leader_of(members: Sequence[Member]) -> Member:
    """Return the member whose journal all others take: the one with the most lines.

    Replicas that start together on unlike machines have different headers. Of those with equally
    many lines, one with the most common header leads, and of these the first.
    """
    counts = Counter(member.run for member in members)
    return max(members, key=lambda member: (member.lines, counts[member.run]))


def is_far(member: Member, leader: Member) -> bool:
    """Return whether a member lacks so many lines, or has others, that nobody waits for it."""
    return member.run != leader.run or leader.lines - member.lines > FEW_LINES


def right_checksum(checksums: Sequence[float], ages: Sequence[int]) -> float:
    """Return the checksum that counts as right when replicas disagree.

    It is that of the most replicas. Of equally common ones, it is that of the oldest replica, and
    then that of the first.

    Args:
        checksums: of the plan, batch, journal and weights of each member.
        ages: rounds that each member has finished.

    >>> right_checksum([7.0, 5.0, 5.0], ages=[90, 1, 0])
    5.0
    >>> right_checksum([7.0, 5.0], ages=[0, 30])
    5.0
    """
    counts = Counter(checksums)
    rows = zip(checksums, ages, strict=True)
    checksum, _ = max(rows, key=lambda row: (counts[row[0]], row[1]))
    return checksum
