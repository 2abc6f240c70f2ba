"""Runs a function on several real ranks, joined by gloo, forked from a server with all imports."""

import multiprocessing
import os
import pickle
import random
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
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


def fork(function, *arguments):
    """Start a function in a process forked from the server."""
    process = context.Process(target=_call, args=(function, *arguments), daemon=True)
    process.start()
    return process


def _call(function, *arguments):
    # Libraries start processes of their own (pytablewriter does).
    multiprocessing.current_process()._config["daemon"] = False
    function(*arguments)


def rank_variables(rank, num_ranks, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def join_ranks(ranks, seconds, grace):
    """Wait for all ranks, and `grace` seconds once one has failed.

    Return the first exit code that is not 0, or 0, and the ranks that still run.
    """
    deadline, code, running = time.monotonic() + seconds, 0, list(ranks)
    while running and (left := deadline - time.monotonic()) > 0:
        wait([rank.sentinel for rank in running], left)
        for rank in [rank for rank in running if not rank.is_alive()]:
            running.remove(rank)
            if rank.exitcode != 0 and code == 0:
                code, deadline = rank.exitcode, min(deadline, time.monotonic() + grace)
    return code, [ranks.index(rank) for rank in running]


def kill(ranks):
    for rank in ranks:
        rank.kill()
        rank.join()


def run_ranks(function, num_ranks, *arguments, timeout=180.0):
    """Call `function(*arguments)`, which are pickled, on every rank; return the results."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        answers = [Path(directory, str(rank)) for rank in range(num_ranks)]
        ranks = []
        for rank, answer in enumerate(answers):
            variables = rank_variables(rank, num_ranks, port) | {"LOCAL_SIZE": str(num_ranks)}
            ranks.append(fork(_run_rank, function, arguments, variables, answer))
        join_ranks(ranks, timeout, _GRACE_SECONDS)
        failed = [place for place, rank in enumerate(ranks) if rank.exitcode != 0]
        kill(ranks)
        texts = [f"{len(failed)} of {num_ranks} ranks failed"]
        for rank in failed:
            answer = answers[rank]
            text = (
                answer.read_text("utf-8", "replace")
                if answer.exists()
                else "died without an answer"
            )
            texts.append(f"rank {rank}: {text}")
        assert not failed, "\n".join(texts)
        return [pickle.loads(answer.read_bytes()) for answer in answers]


def _run_rank(function, arguments, variables, answer):
    os.environ.update(variables)
    from lezo_ds import distributed

    try:
        result = function(*arguments)
    except BaseException:
        answer.write_text(traceback.format_exc())
        sys.exit(1)
    # Plain pickle: multiprocessing's own would send tensors as handles that die with this process.
    answer.write_bytes(pickle.dumps(result))
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
