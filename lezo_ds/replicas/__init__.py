"""Replicas that come and go. Only a run with `elastic.lighthouse` imports this room.

quorum      Replicas: a round of all replicas, from the quorum to the sum of the losses
member      what a replica says of itself, and what all conclude from it
lighthouse  torchft's lighthouse: quorums, heartbeats, who is alive
group       the process group of the members' first ranks, and its sum
patience    how long a member waits for the others
transport   lines of journals from one replica to another
"""

from lezo_ds.replicas.group import reaches
from lezo_ds.replicas.member import FEW_LINES
from lezo_ds.replicas.quorum import Place, Replicas, StepLostError
from lezo_ds.replicas.transport import Lines, whole_lines

__all__ = ["FEW_LINES", "Lines", "Place", "Replicas", "StepLostError", "reaches", "whole_lines"]
