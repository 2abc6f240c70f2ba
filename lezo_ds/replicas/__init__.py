"""Replicas that come and go. Only a run with `elastic.lighthouse` imports this room.

quorum      Replicas: a round of all replicas, from the quorum to the sum of the losses
member      what a replica says of itself, and what all conclude from it
lighthouse  torchft's lighthouse: quorums, heartbeats, who is alive
group       the process group of the members' first ranks, and its sum
patience    how long a member waits for the others
transport   lines of journals from one replica to another
"""
