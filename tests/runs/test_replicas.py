"""Replicas come and go: killed, joined, stopped, refused. All journals and weights stay equal."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import environment, run_forked_well, run_words, start_ranks, wait_until
from ranks import context, fork, free_port, kill, run_ranks
from run_ends import STEP, reaches, records_of, results_of
from thorough import thorough
from tiny_runs import HEADER

from lezo_ds import distributed
from lezo_ds.errors import LezoError
from lezo_ds.journal import Journal
from lezo_ds.runs.opening import restore
from lezo_ds.runs.records import read_run
from lezo_ds.zo.records import StepRecord

pytestmark = pytest.mark.distributed
pytest.importorskip("torchft", reason="pip install 'lezo_ds[elastic]'")

from lezo_ds.distributed.workers import StepLostError  # noqa: E402
from lezo_ds.replicas import transport as transport_module  # noqa: E402
from lezo_ds.replicas.group import reaches as listens_at  # noqa: E402
from lezo_ds.replicas.quorum import Replicas  # noqa: E402
from lezo_ds.replicas.transport import JournalTransport, whole_lines  # noqa: E402
from lezo_ds.runs.run import Run  # noqa: E402


def write_journal(path, num, key=5):
    with Journal.create(path, HEADER) as journal:
        for step in range(num):
            journal.append(StepRecord(step, key, (), 1e-3, 1e-3, projected_grads=(0.5,), loss=0.25))
    return path


@pytest.fixture
def connect(monkeypatch):
    # By default, a server looks twice a second whether it is to end.
    serve = JournalTransport.serve_forever
    monkeypatch.setattr(JournalTransport, "serve_forever", lambda self: serve(self, 0.01))
    opened = []

    def connect(journal, secret=b"s"):
        opened.append(JournalTransport(journal, "127.0.0.1", secret))
        return opened[-1]

    yield connect
    for transport in opened:
        transport.shutdown()
        transport.server_close()


def test_a_peer_sends_the_lines_that_are_missing_and_all_to_another_journal(tmp_path, connect):
    peer = connect(write_journal(tmp_path / "peer", 9))
    whole = (tmp_path / "peer").read_bytes()
    assert connect(tmp_path / "none").fetch(peer.address) == (0, whole)
    assert connect(write_journal(tmp_path / "other", 9, key=6)).fetch(peer.address) == (0, whole)
    assert peer.fetch(connect(write_journal(tmp_path / "behind", 1)).address) == (len(whole), b"")
    own = write_journal(tmp_path / "own", 2)
    lines = connect(own).fetch(peer.address)
    assert own.read_bytes() + lines.data == whole
    assert lines.start == len(own.read_bytes())
    with Journal.open(own) as journal:
        assert [record.step for record in journal.extend(lines.data)] == [2, 3, 4, 5, 6, 7, 8]
    assert own.read_bytes() == whole
    assert connect(own).fetch(peer.address).data == b""


def test_a_peer_without_the_secret_gets_nothing_and_is_not_believed(tmp_path, connect):
    journal = write_journal(tmp_path / "journal", 3)
    peer, stranger = connect(journal), connect(tmp_path / "none", b"another secret")
    with pytest.raises(LezoError, match=r"status 403.*same LEZO_SECRET"):
        stranger.fetch(peer.address)
    for path in ("/0/none", "/../../etc/passwd", "/journal.jsonl", "/9999999999999/none"):
        connection = http.client.HTTPConnection(peer.address)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 403
        assert b"crc" not in answer.read()


@pytest.mark.parametrize("fault", ["too long", "to another question"])
def test_an_answer_that_is_not_a_peers_is_refused(tmp_path, connect, monkeypatch, fault):
    peer = connect(write_journal(tmp_path / "journal", 3))
    own = connect(tmp_path / "none")
    prove = peer.prove

    def prove_another(nonce, content):
        is_question = content[:1] == b"/"
        return prove(nonce if is_question else "old", content)

    if fault == "too long":
        monkeypatch.setattr(transport_module, "MAX_BYTES", 100)
    else:
        monkeypatch.setattr(peer, "prove", prove_another)
    with pytest.raises(LezoError, match="does not send lines of a journal"):
        own.fetch(peer.address)


def test_a_peer_that_dies_while_it_sends_has_ended_and_is_not_foreign(tmp_path, connect):
    peer = connect(write_journal(tmp_path / "journal", 3))
    own = connect(tmp_path / "none")
    answer = []

    def send_half(request, address):
        client, server = socket.socketpair()
        client.sendall(request.recv(4096))
        client.shutdown(socket.SHUT_WR)
        transport_module._Handler(server, address, peer)
        server.close()
        answer.append(b"".join(iter(lambda: client.recv(4096), b"")))
        request.sendall(answer[-1][:-40])
        peer.shutdown_request(request)

    peer.process_request = send_half
    with pytest.raises(OSError, match="has ended"):
        own.fetch(peer.address)
    assert answer[0].endswith(whole_lines(peer.journal))


@pytest.mark.parametrize("address", [f"{'a' * 64}.org:1", "127.0.0.1:70000", f"127.0.0.1:{10**30}"])
def test_nobody_listens_at_an_address_that_none_can_have(address, tmp_path, connect):
    assert not listens_at(address)
    with pytest.raises(OSError):
        connect(tmp_path / "none").fetch(address)


def _refusal_of_a_lighthouse_elsewhere(journal):
    os.environ.pop("LEZO_SECRET", None)
    distributed.init_distributed()
    distributed.address_towards = lambda host, port: "10.1.2.3"
    with pytest.raises(LezoError) as refused:
        Replicas("http://10.1.2.4:29510", 0, journal, 30.0)
    return str(refused.value), refused.value.exit_code


def test_replicas_of_several_machines_need_a_secret(tmp_path):
    ((message, code),) = run_ranks(_refusal_of_a_lighthouse_elsewhere, 1, tmp_path / "journal")
    assert code == 2
    assert "is on another machine, and LEZO_SECRET is not set; fix: export LEZO_SECRET" in message


def test_lines_that_do_not_follow_change_nothing(tmp_path):
    path = write_journal(tmp_path / "journal", 2)
    before = path.read_bytes()
    with Journal.open(path) as journal:
        for damage in (b"\x80\x04pickle\n", b'{"kind":"step"}\n', b"\xff" * 50 + b"\n"):
            with pytest.raises(LezoError, match=r"damaged lines: .*checksum"):
                journal.extend(damage)
    assert path.read_bytes() == before


class Lab:
    """A lighthouse, and replicas on forked ranks."""

    def __init__(self, recipe, directory):
        self._recipe, self._outputs = recipe, directory
        self.run_dir, self.port = directory / "run", free_port()
        self.ranks = []
        self.light()

    def light(self):
        # Not in this process: its threads would break tests that fork.
        options = ["--min_replicas=1", "--join_timeout_ms=300", "--quorum_tick_ms=20"]
        program = Path(sys.executable).with_name("torchft_lighthouse")
        options += ["--heartbeat_timeout_ms=1000", f"--bind=127.0.0.1:{self.port}"]
        self.lighthouse = subprocess.Popen([program, *options], env=environment(RUST_LOG="error"))

    def start(self, *keys, program="train.py", num_ranks=1):
        """Start a replica and return the processes of its ranks."""
        url = f"elastic.lighthouse=http://127.0.0.1:{self.port}"
        outputs = self._outputs / f"outputs-{len(self.ranks)}"
        outputs.mkdir()
        words = run_words(self._recipe, self.run_dir, url, *keys)
        started = start_ranks(words, program, num_ranks, outputs)
        for rank, process in enumerate(started):
            process.errors = outputs / f"err-{rank}"
        self.ranks += started
        return started if num_ranks > 1 else started[0]

    def refuse(self, *keys):
        """Start a replica that is refused, and return what it says."""
        replica = self.start(*LONG, *keys)
        self.end(replica, code=2)
        return replica.errors.read_text()

    def places(self):
        return [self.run_dir, *sorted(self.run_dir.glob("replicas/*"))]

    def results(self, name):
        return [results_of(place)[name] for place in self.places()]

    def wait_for(self, step, process):
        wait_until(lambda: any(reaches(place, STEP, step) for place in self.places()), process)

    def end(self, *processes, code=0):
        for process in processes:
            process.join(60)
            assert process.exitcode == code, process.errors.read_text()[-3000:]

    def assert_equal_journals(self):
        contents = {(place / "journal.jsonl").read_bytes() for place in self.places()}
        assert len(contents) == 1, [len(content) for content in contents]


@pytest.fixture
def lab(recipe, tmp_path):
    made = Lab(recipe, tmp_path)
    yield made
    made.lighthouse.kill()
    made.lighthouse.wait()
    kill(made.ranks)


def test_all_ranks_of_a_replica_do_missing_evaluations_in_one_order():
    run = SimpleNamespace(
        num_done=4,
        engine=SimpleNamespace(workers=SimpleNamespace(are_shared=True, evaluations=[])),
        evaluated=set,
        evaluations=[],
        eval_every=2,
        is_over=lambda: True,
    )
    # A set of strings has another order in each process.
    assert Run.missing(run) == [("dev", 4), ("dev", 2), ("test", 0), ("dev", 0)]


LONG = ("train.steps=40", "train.eval_every=20", "zo.directions=3")
SKIPS_STEP_8 = """
import atexit, sys
from lezo_ds.engine import LezoEngine
atexit.register(lambda: print("torchft" in sys.modules, flush=True))
run, factor = LezoEngine.run, dict([(8, float("inf"))])
def overflow(self, *rest):
    return tuple(output * factor.get(self.global_steps, 1) for output in run(self, *rest))
LezoEngine.run = overflow
"""
UNLIKE = """
import math
from lezo_ds import distributed
from lezo_ds.engine import LezoEngine
from lezo_ds.zo.schedules import LearningRates
distributed.describe_arithmetic = lambda device: {{"processor": "another one"}}
run = LezoEngine.run
LezoEngine.run = lambda *arguments: tuple(output * (1 + 2e-7) for output in run(*arguments))
at = LearningRates.at
LearningRates.at = lambda *arguments: math.nextafter(at(*arguments), 1)
"""
FLIPPED = """
from lezo_ds.runs import run
run.CHECK_EVERY = 5
meet = run.Run._meet
def flip_then_meet(self):
    if self.engine.global_steps == {step}:
        tensor = self.engine.weights.shards[0].parameter.ds_tensor
        tensor.data[-1] += 1
    return meet(self)
run.Run._meet = flip_then_meet
"""
LOADS_SLOWLY = """
import time
from pathlib import Path
from lezo_ds.runs import trainer
make_engine = trainer.make_engine
def make_engine_later(*arguments):
    while not Path({path!r}).exists():
        time.sleep(0.01)
    return make_engine(*arguments)
trainer.make_engine = make_engine_later
"""


def program(directory, name, text, **values):
    """Write a program that trains by changed code."""
    path = directory / f"{name}.py"
    path.write_text(text.format(**values) + "from lezo_ds.__main__ import main\nmain('train')\n")
    return path


@pytest.mark.thorough
def test_kills_joins_and_a_new_lighthouse_leave_the_run_of_one_process(lab, recipe, tmp_path):
    alone = tmp_path / "alone"
    skips = program(tmp_path, "skips", SKIPS_STEP_8)
    done = run_forked_well(run_words(recipe, alone, *LONG), program=skips)
    assert done.out.splitlines()[-1] == "False"  # without the key, nothing of torchft is imported
    first, second = lab.start(*LONG, program=skips), lab.start(*LONG, program=skips)
    lab.wait_for(5, second)
    first.kill()  # often the one with the run's directory, which evaluates
    third = lab.start(*LONG, program=skips)
    lab.wait_for(10, second)
    lab.lighthouse.kill()
    time.sleep(0.5)
    lab.light()
    lab.end(second, third)
    lab.assert_equal_journals()
    assert records_of(lab.run_dir, StepRecord) == records_of(alone, StepRecord)
    assert set(map(str, records_of(lab.run_dir))) == set(map(str, records_of(alone)))
    assert set(lab.results("weights_digest")) == {results_of(alone)["weights_digest"]}
    assert lab.results("skipped_steps") == [1, 1]


@pytest.mark.parametrize("early", [2, thorough(0)])
def test_those_that_are_left_do_a_round_again_at_once(lab, tmp_path, early):
    url, ends = f"http://127.0.0.1:{lab.port}", context.Queue()
    for number in range(3):
        lab.ranks.append(fork(_do_rounds, url, tmp_path / str(number), number, early, ends))
    seconds = [ends.get(timeout=60) for _ in range(2)]
    assert max(seconds) < 3, seconds


def _do_rounds(url, journal, number, early, ends):
    """Do rounds without passes until one has three replicas and the second dies. Do one more."""
    distributed.init_distributed()
    replicas = Replicas(url, number, journal, 30.0)
    replicas.journal = Journal.open(write_journal(journal, 0))
    died = 0.0
    while True:
        assert replicas.meet(1e-3, stops_all=False) is None
        place = replicas.role
        with suppress(StepLostError):
            if place.num_workers == 3:
                time.sleep({early: 0, 1: 0.3}.get(place.position, 0.6))
                if place.position == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                died = time.monotonic()
            replicas.sum([0.0, 0.0], {})
            if died:
                ends.put(time.monotonic() - died)


@pytest.mark.thorough
def test_unlike_machines_have_equal_weights_and_wrong_weights_leave(lab, tmp_path):
    unlike = lab.start(*LONG, program=program(tmp_path, "unlike", UNLIKE))
    other = lab.start(*LONG)
    lab.wait_for(5, unlike)
    wrong = lab.start(*LONG, program=program(tmp_path, "flipped", FLIPPED, step=29))
    lab.end(wrong, code=5)
    assert "this replica leaves: its plan, batch, journal or weights" in wrong.errors.read_text()
    again = lab.start(*LONG)
    lab.end(unlike, other, again)
    lab.assert_equal_journals()
    (digest,) = run_ranks(_digest_of_a_replay, 1, lab.run_dir, results_of(lab.run_dir)["best_step"])
    assert set(lab.results("weights_digest")) == {digest}
    assert len(records_of(lab.run_dir)) > 40


def _digest_of_a_replay(run_dir, step):
    distributed.init_distributed()
    return restore(read_run(run_dir), step).weights.digest()


@pytest.mark.thorough
def test_a_file_stops_a_replica_that_was_starting_when_the_others_found_it(lab, tmp_path):
    path = tmp_path / "go on"
    second = lab.run_dir / "replicas" / "1"
    first = lab.start(*LONG)
    slow = lab.start(*LONG, program=program(tmp_path, "slow", LOADS_SLOWLY, path=str(path)))
    wait_until((second / ".lock").exists, slow)
    lab.wait_for(3, first)
    (second / "STOP").touch()  # any of the directories
    lab.end(first)
    path.touch()
    lab.end(slow)
    assert lab.results("finished") == [False, False]
    assert "STOP stops all replicas; fix: rm " in lab.refuse()
    (second / "STOP").unlink()
    lab.end(lab.start(*LONG))
    assert results_of(lab.run_dir)["finished"]


def test_a_file_stops_a_replica_that_waits_for_the_lighthouse(lab):
    lab.lighthouse.kill()
    waiting = lab.start(*LONG)
    wait_until(waiting.errors.exists, waiting)
    wait_until(lambda: "waiting for the lighthouse" in waiting.errors.read_text(), waiting)
    (lab.run_dir / "STOP").touch()
    lab.end(waiting)
    assert not results_of(lab.run_dir)["finished"]


@pytest.mark.thorough
def test_a_rank_that_hangs_ends_its_replica_and_a_signal_only_its_own(lab):
    keys = (*LONG, "train.timeout_seconds=8", "zo.directions=4")
    pair = lab.start(*keys, num_ranks=2)  # 10 probes of 4 micro-batches do not divide evenly
    single, leaver = lab.start(*keys), lab.start(*keys)
    lab.wait_for(5, single)
    os.kill(leaver.pid, signal.SIGTERM)
    lab.end(leaver)
    os.kill(pair[1].pid, signal.SIGSTOP)
    lab.end(pair[0], code=6)
    os.kill(pair[1].pid, signal.SIGCONT)
    lab.end(pair[1], code=6)
    nowhere = f"elastic.lighthouse=http://{'a' * 64}.org:1"
    for key in ("seed=1", "elastic.lighthouse=head:1", nowhere):
        assert "error: " in lab.refuse("zo.directions=4", key)
    lab.end(single)
    ends = [results_of(path.parent)["finished"] for path in lab.run_dir.rglob("results.json")]
    assert sorted(ends) == [False, True]
