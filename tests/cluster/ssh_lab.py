"""Two hosts on one machine that reach each other by ssh, without a password."""

import shutil
import subprocess
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hosts import program_path, require_programs, two_hosts, wait_until

CLIENT_SETTINGS = """
IdentityFile {directory}/key
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
SERVER_SETTINGS = """
HostKey {directory}/key
AuthorizedKeysFile {directory}/key.pub
PasswordAuthentication no
PermitRootLogin yes
StrictModes no
PidFile none
"""


@contextmanager
def two_ssh_hosts(directory: Path):
    """Start two hosts with an ssh server each; stop them at the end."""
    require_programs(("ssh", "sshd", "ssh-keygen"), "apt-get install openssh-client openssh-server")
    make_key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / "key"]
    subprocess.run(make_key, check=True)
    (directory / "sshd_config").write_text(SERVER_SETTINGS.format(directory=directory))
    of_clients = CLIENT_SETTINGS.format(directory=directory)
    with two_hosts(directory, {"/etc/ssh/ssh_config": of_clients}) as hosts:
        server = [shutil.which("sshd", path=program_path()), "-f", directory / "sshd_config"]
        for host in hosts:
            # The server wants a directory there, which is not to stay on this machine.
            host.run_well(["mount", "-t", "tmpfs", "tmpfs", "/run"])
            host.run_well(["mkdir", "/run/sshd"])
            host.run_well([*server, "-E", directory / f"sshd-{host.name}.log"])
            wait_until(partial(_answers, host))
        yield hosts


def _answers(host):
    return host.run(["ssh", host.name, "true"]).code == 0
