"""Runs a function on several real ranks: processes joined by gloo, as a launcher would join them.

They are forked from a clean server that has only imported the libraries, so that a start is quick.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import socket
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

import lezo_ds

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["preload"])
# The server finds modules by this variable alone: Python 3.11 does not hand it sys.path.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [
        str(Path(__file__).parent),
        str(Path(lezo_ds.__file__).parents[1]),
        os.environ.get("PYTHONPATH", ""),
    ]
)

_random = random.SystemRandom()  # not seeded: the workers of one pytest would draw the same ports
_PORTS = range(15_000, 32_768)  # Linux gives 32768 to 60999 to connections
_GRACE_SECONDS = 5.0  # for the other ranks to report, once one has failed


def run_ranks(function, num_ranks, *arguments, timeout=180.0):
    """Call `function(*arguments)`, which are pickled, on every rank and return the results, by
    rank."""
    port = free_port()
    ranks = {}
    processes = []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank, args=(theirs, function, arguments, rank, num_ranks, port), daemon=True
        )
        process.start()
        theirs.close()
        ranks[ours] = rank
        processes.append(process)
    outcomes = _collect(ranks, timeout)
    all_answered = all(outcomes.get(rank, (False, ""))[0] for rank in range(num_ranks))
    for process in processes:
        process.join(_GRACE_SECONDS if all_answered else 0)
        process.kill()
        process.join()
    failed = [rank for rank in range(num_ranks) if not outcomes.get(rank, (False, ""))[0]]
    if failed:
        texts = [
            f"rank {rank}: {outcomes[rank][1] if rank in outcomes else 'no answer'}"
            for rank in failed
        ]
        raise AssertionError(f"{len(failed)} of {num_ranks} ranks failed\n" + "\n".join(texts))
    return [outcomes[rank][1] for rank in range(num_ranks)]


def _collect(ranks, timeout):
    """Return (succeeded, result or traceback) of each rank that answers in time."""
    outcomes = {}
    pending = dict(ranks)
    deadline = time.monotonic() + timeout
    while pending and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(pending), left):
            rank = pending.pop(connection)
            try:
                outcomes[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                outcomes[rank] = (False, "died without an answer")
            if not outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return outcomes


def _run_rank(connection: Connection, function, arguments, rank, num_ranks, port):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    from lezo_ds import distributed

    # Libraries start processes of their own (pytablewriter does).
    multiprocessing.current_process()._config["daemon"] = False
    try:
        outcome = (True, function(*arguments))
    except BaseException:
        outcome = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's own would send tensors as handles that die with this process.
    connection.send_bytes(pickle.dumps(outcome))
    connection.close()
    if outcome[0]:
        distributed.shut_down()


def free_port():
    """Return a port on which nothing listens and which Linux does not give to a connection.

    A port that the kernel chooses (`bind` to 0) is one of those that it gives to connections, too:
    between this call and rank 0's `listen`, any process of the other tests may receive it.
    """
    while True:
        port = _random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
