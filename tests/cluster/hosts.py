"""Two hosts on one machine: namespaces with names, networks, processes and mounts of their own, and a cable.

Only the files are shared, as on a cluster. A host lives as long as the process that made it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from assets import REPOSITORY
from commands import TIMEOUT_SECONDS, Finished, environment

ADDRESSES = {"lezo1": "10.77.0.1", "lezo2": "10.77.0.2"}
"""Name and address of each host, on a network that nothing outside can reach."""

UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
PATIENCE_SECONDS = 300


def require_programs(programs, advice):
    """Skip the test, and say why, where one of these programs is missing."""
    missing = [name for name in programs if shutil.which(name, path=program_path()) is None]
    if missing:
        pytest.skip(f"not here: {', '.join(missing)} ({advice})")


def program_path():
    return f"{environment()['PATH']}:/usr/sbin:/sbin"


def require_hosts():
    """Skip the test, and say why, where no hosts can be made."""
    require_programs(("unshare", "nsenter", "ip"), "apt-get install util-linux iproute2")
    if os.geteuid() != 0:
        pytest.skip("only root can make hosts of namespaces")
    made = subprocess.run([*UNSHARE, "true"], capture_output=True)
    if made.returncode:
        pytest.skip(f"no namespaces can be made here: {made.stderr.decode().strip()}")


@dataclass(frozen=True)
class Host:
    """A host: commands run on it with `run`."""

    name: str
    pid: int

    def command(self, command, **variables):
        """Return the command that runs `command` on this host, in the repository's root."""
        settings = [f"{name}={value}" for name, value in _environment(**variables).items()]
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", "--"]
        return [*enter, "env", "--ignore-environment", f"--chdir={REPOSITORY}", *settings, *map(str, command)]

    def run(self, command, timeout=TIMEOUT_SECONDS, **variables):
        """Run a command on this host to its end."""
        done = subprocess.run(
            self.command(command, **variables), capture_output=True, text=True, timeout=timeout
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def run_well(self, command, **variables):
        """Run a command on this host, assert that it went well, and return what it printed."""
        finished = self.run(command, **variables)
        assert finished.code == 0, f"{command}: {finished.out[-3000:]}\n{finished.err[-3000:]}"
        return finished.out


def _environment(**variables):
    # The ranks of a job meet at a port that the starter chooses.
    kept = {name: value for name, value in environment().items() if name != "MASTER_PORT"}
    return {**kept, "PATH": program_path(), **variables}


@contextmanager
def two_hosts(directory: Path, mounts: dict[str, str] | None = None) -> Iterator[list[Host]]:
    """Make the hosts of ADDRESSES; all that runs on them is killed at the end.

    Args:
        directory: for their files.
        mounts: files that the hosts see with another content than this machine.
    """
    require_hosts()
    names = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    contents = {"/etc/hosts": f"127.0.0.1 localhost\n{names}", **(mounts or {})}
    with ExitStack() as stack:
        hosts = [stack.enter_context(_host(name, directory, contents)) for name in ADDRESSES]
        _connect(hosts)
        yield hosts


@contextmanager
def _host(name, directory, contents):
    mounts = ""
    for path, content in contents.items():
        file = directory / Path(path).name
        file.write_text(content)
        mounts += f"mount --bind {file} {path}\n"
    # The shell is the host's first process: it takes in orphans, and ends, with all the rest, with its input.
    script = f"set -e\nhostname {name}\nip link set lo up\n{mounts}echo ready\nread -r nothing || true\n"
    process = subprocess.Popen(
        [*UNSHARE, "bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n", f"{name} does not start"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Host(name, int(children[0]))
    finally:
        process.kill()  # and --kill-child kills the host
        process.communicate()


def _connect(hosts):
    first, second = hosts
    subprocess.run(
        [
            *("ip", "link", "add", "eth0", "netns", str(first.pid), "type", "veth"),
            *("peer", "name", "eth0", "netns", str(second.pid)),
        ],
        check=True,
    )
    for host in hosts:
        host.run_well(["ip", "address", "add", f"{ADDRESSES[host.name]}/24", "dev", "eth0"])
        host.run_well(["ip", "link", "set", "eth0", "up"])


def wait_until(condition: Callable[[], object], what: str, patience=PATIENCE_SECONDS) -> None:
    """Ask again and again until the condition holds; fail if it takes longer than `patience` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.1)
