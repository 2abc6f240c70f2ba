"""Two hosts on one machine: namespaces joined by a cable, which share the files alone."""

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import commands
import pytest
from assets import REPOSITORY
from commands import TIMEOUT_SECONDS, Finished, environment
from run_ends import num_steps, results_of

ADDRESSES = {"lezo1": "10.77.0.1", "lezo2": "10.77.0.2"}

UNSHARE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork"]
UNSHARE += ["--mount-proc", "--kill-child"]
SHORT = ("train.steps=8", "train.eval_every=4")
LONG = ("train.steps=200", "train.eval_every=50", "train.snapshot_every=20")


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
    name: str
    pid: int

    def command(self, command, **variables):
        """Return the command that runs `command` on this host, in the repository's root."""
        settings = [f"{name}={value}" for name, value in _environment(**variables).items()]
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", "--"]
        clean = ["env", "--ignore-environment", f"--chdir={REPOSITORY}", *settings]
        return [*enter, *clean, *map(str, command)]

    def run(self, command, timeout=TIMEOUT_SECONDS, **variables):
        command = self.command(command, **variables)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        return Finished(done.returncode, done.stdout, done.stderr)

    def run_well(self, command, **variables):
        finished = self.run(command, **variables)
        assert finished.code == 0, f"{command}: {finished.out[-3000:]}\n{finished.err[-3000:]}"
        return finished.out


def _environment(**variables):
    # The ranks of a job meet at a port that the starter chooses.
    kept = {name: value for name, value in environment().items() if name != "MASTER_PORT"}
    return {**kept, "PATH": program_path(), **variables}


@contextmanager
def two_hosts(directory, contents=()):
    """Start the hosts of ADDRESSES; `contents` are of files that only they see, by path."""
    require_hosts()
    names = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    contents = {"/etc/hosts": f"127.0.0.1 localhost\n{names}", **dict(contents)}
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
    script = f"set -e\nhostname {name}\nip link set lo up\n{mounts}echo ready\n"
    # The shell is the host's first process: it takes in orphans, and ends, with all the rest, with
    # its input.
    script += "read -r nothing || true\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*UNSHARE, "bash", "-c", script], **pipes)
    try:
        assert process.stdout.readline() == "ready\n", f"{name} does not start"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Host(name, int(children[0]))
    finally:
        process.kill()  # and --kill-child kills the host
        process.communicate()


def _connect(hosts):
    first, second = hosts
    cable = ["ip", "link", "add", "eth0", "netns", str(first.pid), "type", "veth"]
    subprocess.run([*cable, "peer", "name", "eth0", "netns", str(second.pid)], check=True)
    for host in hosts:
        host.run_well(["ip", "address", "add", f"{ADDRESSES[host.name]}/24", "dev", "eth0"])
        host.run_well(["ip", "link", "set", "eth0", "up"])


def wait_until(condition):
    """Wait longer than for the processes of one machine."""
    commands.wait_until(condition, seconds=300)


def assert_stopped_by_agreement(run_dir):
    results = results_of(run_dir)
    assert not results["finished"]
    assert 0 < results["steps"] == num_steps(run_dir) < 200
