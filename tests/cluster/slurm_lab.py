"""A Slurm cluster of two hosts on one machine; the first is its controller and login node too."""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hosts import ADDRESSES, Host, require_programs, two_hosts, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONTROLLER = next(iter(ADDRESSES))

SETTINGS = """
ClusterName=lezo
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=6
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SchedulerParameters=sched_interval=1
ReturnToService=2
KillWait=20
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster, used from its first host as a user does from a login node."""

    login: Host
    directory: Path

    def run_well(self, *command):
        return self.login.run_well(command, SLURM_CONF=str(self.directory / "slurm.conf"))

    def submit(self, *arguments):
        return int(self.run_well("sbatch", "--parsable", *arguments).split(";")[0])

    def fact(self, job, name):
        """Return one of the facts that Slurm knows of a job, such as JobState."""
        for word in self.run_well("scontrol", "show", "job", job).split():
            if word.startswith(name + "="):
                return word.partition("=")[2]
        raise KeyError(name)


@contextmanager
def slurm_cluster(directory: Path):
    require_programs(PROGRAMS, "apt-get install slurm-wlm munge")
    directory.chmod(0o755)
    _write_settings(directory)
    with two_hosts(directory) as hosts:
        cluster = Slurm(hosts[0], directory)
        kinds = ("key", "pid", "log", "seed")
        files = [f"--{kind}-file={directory}/munged.{kind}" for kind in kinds]
        cluster.run_well("munged", "--force", f"--socket={directory}/munge.socket", *files)
        cluster.run_well("slurmctld", "-c")
        for host in hosts:
            host.run_well(["slurmd", "-N", host.name], SLURM_CONF=str(directory / "slurm.conf"))
        idle = ("sinfo", "-h", "-t", "idle", "-p", "normal", "-o", "%D")
        wait_until(lambda: cluster.run_well(*idle).strip() == "2")
        yield cluster


def _write_settings(directory):
    key = directory / "munged.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (directory / "state").mkdir()
    lines = [SETTINGS.format(controller=CONTROLLER, directory=directory)]
    for name in ADDRESSES:
        (directory / f"spool-{name}").mkdir()
        lines.append(f"NodeName={name} CPUs=16 RealMemory=256000 Gres=gpu:8 State=UNKNOWN")
    nodes = ",".join(ADDRESSES)
    lines.append(f"PartitionName=normal Nodes={nodes} Default=YES")
    (directory / "slurm.conf").write_text("\n".join(lines) + "\n")
    for number in range(8):
        (directory / f"gpu{number}").touch()
    (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-7]\n")
