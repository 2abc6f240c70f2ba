"""The store through which ranks find each other. It listens on the address in MASTER_ADDR only.

torch's own store listens on every address of rank 0's machine, whatever MASTER_ADDR says (PyTorch issue
173909, torch 2.13). Its messages are neither encrypted nor authenticated, so other machines should not be
able to reach it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from lezo_ds.errors import UserError

_SCHEME = "lezo"
_PENDING_CONNECTIONS = 4096
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def prepare() -> str:
    """Return the `init_method` for torch's process group. MASTER_ADDR and the other variables must be set.

    If MASTER_ADDR is the loopback of this machine, gloo and NCCL use the loopback too, unless
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set. Ranks that torchrun started use torchrun's own store.
    """
    if is_loopback(os.environ["MASTER_ADDR"]):
        for variable in _INTERFACE_VARIABLES:
            os.environ.setdefault(variable, _loopback_interface())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "env://"
    return f"{_SCHEME}://"


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is a loopback, which means the own machine on every machine.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "10.0.0.1", "node-1")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_at(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on the host's address only, or None if this machine cannot see it.

    The other machines may know the host by an address that this machine does not have: its own name may
    resolve to its loopback, or the address may belong to a machine that forwards. With None, torch listens on
    all addresses.

    Raises:
        UserError: the host is unknown, or the port is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if is_loopback(str(address[0])) and not is_loopback(host):
            return None
        return socket.create_server((str(address[0]), port), family=family, backlog=_PENDING_CONNECTIONS)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise UserError(
            f"rank 0 cannot listen on {host}, port {port}",
            got=str(error),
            expected="an address of rank 0's machine and a free port",
            fix="set MASTER_ADDR or MASTER_PORT (with the deepspeed launcher: --master_addr, --master_port)",
        ) from error


def _loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _meet(_: str, timeout: timedelta, **__: Any) -> Iterator[tuple[Store, int, int]]:  # noqa: ANN401
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listener = listen_at(host, port) if rank == 0 else None
    descriptor = None if listener is None else listener.detach()
    store = TCPStore(
        host_name=host,
        port=port,
        world_size=world_size,
        is_master=rank == 0,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )
    # torch asks for a second item only if ranks join again, which they never do here.
    yield store, rank, world_size
    raise RuntimeError("a process group can be joined only once")


# This registers the handler for the whole process, under a scheme of its own that torch does not use.
register_rendezvous_handler(_SCHEME, _meet)  # type: ignore[no-untyped-call]
