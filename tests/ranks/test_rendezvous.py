"""Who can reach the ranks: they listen where they are told to, and nowhere else."""

from __future__ import annotations

import os
import socket
import time

import psutil
import pytest
from commands import free_port
from ranks import run_ranks
from torch.distributed import Store, TCPStore

from lezo_ds import distributed
from lezo_ds.distributed import rendezvous
from lezo_ds.distributed.rendezvous import is_loopback, listen_at
from lezo_ds.errors import UserError


def _listening(address):
    os.environ["MASTER_ADDR"] = address
    distributed.init_distributed()
    distributed.barrier()
    mine = psutil.Process().net_connections("inet")
    addresses = {connection.laddr.ip for connection in mine if connection.status == psutil.CONN_LISTEN}
    distributed.barrier()
    return addresses, distributed.sum_integers([1])


@pytest.mark.distributed
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_ranks_that_meet_at_the_loopback_listen_on_it_only(address):
    for addresses, (number,) in run_ranks(_listening, 2, address):
        assert addresses <= {"127.0.0.1", "::1"}
        assert number == 2


@pytest.mark.distributed
def test_rank_0_listens_on_the_given_address_only():
    """127.0.0.2 stands for a machine's second interface."""
    (first, _), (second, _) = run_ranks(_listening, 2, "127.0.0.2")
    assert "127.0.0.2" in first
    assert first | second <= {"127.0.0.1", "127.0.0.2", "::1"}


class _LateStore(Store):
    """What the ranks meet through, slow to answer."""

    def __init__(self, *arguments, **options):
        super().__init__()
        self._store = TCPStore(*arguments, **options)

    def set(self, key, value):
        self._store.set(key, value)

    def wait(self, keys, *timeout):
        self._store.wait(keys, *timeout)

    def get(self, key):
        time.sleep(0.3)
        return self._store.get(key)


def _rank_0_ends_once_it_has_joined():
    if os.environ["RANK"] == "1":
        rendezvous.TCPStore = _LateStore
    distributed.init_distributed()
    if os.environ["RANK"] == "0":
        os._exit(2)


@pytest.mark.distributed
@pytest.mark.parametrize("attempt", range(3))
def test_a_rank_that_ends_at_once_does_not_stop_one_that_still_joins(attempt):
    """Which of two ranks connects to the other, and so may be through first, differs from run to run."""
    with pytest.raises(AssertionError, match=r"^1 of 2 ranks failed\nrank 0: died"):
        run_ranks(_rank_0_ends_once_it_has_joined, 2)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_listener_has_the_address_it_was_asked_for(host):
    with listen_at(host, free_port()) as listener:
        assert is_loopback(listener.getsockname()[0])


def test_an_address_of_another_machine_is_left_to_torch():
    assert listen_at("192.0.2.77", free_port()) is None


def test_a_machines_own_name_that_stands_for_its_loopback_is_left_to_torch(monkeypatch):
    """Its peers know it by another address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listen_at("node-1", 29500) is None


def test_a_port_in_use_is_a_users_error():
    port = free_port()
    message = rf"cannot listen on 127\.0\.0\.1, port {port}.*master_port"
    with listen_at("127.0.0.1", port), pytest.raises(UserError, match=message):
        listen_at("127.0.0.1", port)


def test_an_unknown_host_is_a_users_error():
    with pytest.raises(UserError, match=r"rank 0 cannot listen on no\.such\.host\.invalid"):
        listen_at("no.such.host.invalid", 29500)


@pytest.mark.parametrize(
    ("address", "given", "interface"),
    [("127.0.0.1", None, "lo"), ("localhost", "eth7", "eth7"), ("10.0.0.1", None, None)],
)
def test_the_libraries_stay_on_the_loopback_unless_told_otherwise(address, given, interface, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", address)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
    rendezvous.prepare()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        found = os.environ.get(name)
        assert found == interface or (interface == "lo" and found.startswith("lo"))


def test_ranks_under_torchrun_meet_at_its_own_store(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert rendezvous.prepare() == "lezo://"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert rendezvous.prepare() == "env://"
