"""What the programs of a cluster with Slurm read: their configuration, users, names of hosts, and keys."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.network.netns import run
from tests.support.slurm.host import FREEZER, PATH

__all__ = ["CREDENTIALS_EXPIRE", "NODE_TIMEOUT", "USERS", "write_keys", "write_names", "write_slurm", "write_sshd"]

USERS = {"ada": 20001, "bob": 20002}
"""The users, and their ids. Each has a group of the same name and id."""

NODE_TIMEOUT = 6
"""Seconds after which a node counts as down that does not answer."""

CREDENTIALS_EXPIRE = 10
"""Seconds that a requeued job waits at least."""

_SLURM = """
ClusterName=loom
SlurmctldHost=control
SlurmUser=root
AuthInfo=cred_expire={expire}
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/run/slurm/log/slurmctld.log
SlurmdLogFile=/run/slurm/log/slurmd-%n.log
ProctrackType=proctrack/{tracked_by}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_wait}
MessageTimeout=5
SlurmdTimeout={node_timeout}
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={nodes} CPUs=8 RealMemory=16000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 DefaultTime=60 PriorityTier=1 GraceTime={kill_wait}
PartitionName=short Nodes=ALL MaxTime=1 DefaultTime=1 PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=1-0 DefaultTime=60 PriorityTier=9 PreemptMode=OFF
PartitionName=closed Nodes=ALL State=DOWN
"""

_CGROUP = """
CgroupPlugin=cgroup/v1
CgroupAutomount=no
CgroupMountpoint={mountpoint}
"""

_SSHD = """
ListenAddress 0.0.0.0:22
HostKey {folder}/host_key
AuthenticationMethods publickey
UsePAM no
UseDNS no
PidFile none
SetEnv PATH={path} LANG=C.UTF-8
"""


def write_slurm(folder: Path, nodes: Sequence[str], kill_wait: int, tracked_by: str) -> None:
    """Write Slurm's configuration.

    Args:
        tracked_by: how slurmd knows the processes of a job: ``cgroup`` or ``linuxproc``.
        kill_wait: seconds from SIGTERM to SIGKILL, at a job's end and when it is preempted.
    """
    text = _SLURM.format(
        nodes=",".join(nodes),
        kill_wait=kill_wait,
        node_timeout=NODE_TIMEOUT,
        expire=CREDENTIALS_EXPIRE,
        tracked_by=tracked_by,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text(_CGROUP.format(mountpoint=FREEZER.parent))
    gpus = [folder / f"gpu{number}" for number in range(2)]
    for gpu in gpus:
        os.mknod(
            gpu, stat.S_IFCHR | 0o666, os.makedev(1, 3)
        )  # Slurm wants devices: these are empty, as /dev/null is
    (folder / "gres.conf").write_text("".join(f"Name=gpu File=/etc/slurm/{gpu.name}\n" for gpu in gpus))


def write_names(folder: Path, addresses: Mapping[str, str]) -> None:
    """Write ``hosts``, ``passwd`` and ``group``: this machine's users, and those of the cluster."""
    listed = "".join(f"{address} {name}\n" for name, address in addresses.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{listed}")
    users = "".join(f"{user}:*:{uid}:{uid}::/home/{user}:/bin/bash\n" for user, uid in USERS.items())
    (folder / "passwd").write_text(Path("/etc/passwd").read_text() + users)
    groups = "".join(f"{user}:*:{uid}:\n" for user, uid in USERS.items())
    (folder / "group").write_text(Path("/etc/group").read_text() + groups)


def write_sshd(folder: Path, place: str) -> None:
    """Write the configuration of a login node's sshd and its key.

    Args:
        place: where the login node sees the folder.
    """
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key"))
    (folder / "sshd_config").write_text(_SSHD.format(folder=place, path=PATH))


def write_keys(host_key: Path, laptop: Path, home: Path) -> None:
    """Let a user log in with a key from the laptop, which knows the login node.

    Args:
        host_key: the public one of the login node.
        laptop: the user's home on the laptop.
        home: the user's home in the cluster.
    """
    owner = laptop.stat()
    for folder in (laptop / ".ssh", home / ".ssh"):
        folder.mkdir(mode=0o700)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(laptop / ".ssh" / "id_ed25519"))
    (home / ".ssh" / "authorized_keys").write_text((laptop / ".ssh" / "id_ed25519.pub").read_text())
    (laptop / ".ssh" / "known_hosts").write_text(f"login {host_key.read_text()}")
    for folder in (laptop, home):
        for path in (folder / ".ssh", *(folder / ".ssh").iterdir()):
            os.chown(path, owner.st_uid, owner.st_gid)


def write_munge_key(folder: Path) -> None:
    """Write a key that only this cluster has."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
