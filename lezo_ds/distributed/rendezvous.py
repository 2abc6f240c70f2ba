"""Where the ranks meet: a store that listens on the address it is known by, and on no other.

torch's own listens on every address of rank 0's machine, whatever MASTER_ADDR says. What the ranks exchange
is neither encrypted nor authenticated, so none but they should be able to reach it.
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
    """Return the method by which torch joins this process to the others; MASTER_ADDR and its like are set.

    If MASTER_ADDR is this machine's loopback, the libraries that the ranks talk through stay on it, too,
    unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME say otherwise. Ranks under torchrun meet at its own store.
    """
    if is_loopback(os.environ["MASTER_ADDR"]):
        for variable in _INTERFACE_VARIABLES:
            os.environ.setdefault(variable, _loopback_interface())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "env://"
    return f"{_SCHEME}://"


def is_loopback(host: str) -> bool:
    """Return whether a name or address means this machine and no other, wherever it is said.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "10.0.0.1", "node-1")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_at(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at the host's address only.

    None, and then torch's own listens everywhere, if others know the host by an address that is not to be
    seen here: this machine's name stands for its loopback, or the address is another's, which forwards.

    Raises:
        UserError: the host is unknown, or the port in use.
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
            expected="an address of its machine and a free port",
            fix="set MASTER_ADDR or MASTER_PORT; under deepspeed, --master_addr or --master_port",
        ) from error


def _loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _meet(_: str, timeout: timedelta, **__: Any) -> Iterator[tuple[Store, int, int]]:  # noqa: ANN401
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listener = listen_at(host, port) if rank == 0 else None
    descriptor = None if listener is None else listener.detach()
    store = TCPStore(
        host, port, world_size, rank == 0, timeout, multi_tenant=True, master_listen_fd=descriptor
    )
    yield store, rank, world_size
    raise RuntimeError("the ranks meet once")


register_rendezvous_handler(_SCHEME, _meet)  # type: ignore[no-untyped-call]
