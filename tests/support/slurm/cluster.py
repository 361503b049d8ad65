"""`SlurmCluster`: starts and ends a cluster with Slurm on this machine."""

from __future__ import annotations

import functools
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.support.network.netns import run, why_not
from tests.support.slurm.configuration import (
    USERS,
    write_keys,
    write_munge_key,
    write_names,
    write_slurm,
    write_sshd,
)
from tests.support.slurm.host import FREEZER, NAMESPACES, Host, inner, missing_freezer

__all__ = ["SlurmCluster", "SlurmJobRow", "missing"]

STARTED_IN_TIME = 60.0
"""Seconds that a part of the cluster may take to start or to end."""

POLL = 0.1

CONTROL, LOGIN, LAPTOP = "10.78.0.1", "10.78.0.2", "10.79.0.2"
NODES = "10.78.1"
LAPTOP_SIDE = "10.79.0.1"
"""The login node's address for the laptop."""

_PROGRAMS = (
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("tini", "tini"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
    ("slurmctld", "slurm-wlm"),
    ("slurmd", "slurm-wlm"),
    ("munged", "munge"),
    ("sshd", "openssh-server"),
    ("ssh", "openssh-client"),
)

_FIREWALL = """
table inet laptop {
  chain in {
    type filter hook input priority 0
    iifname "laptop" ct state established,related accept
    iifname "laptop" tcp dport 22 accept
    iifname "laptop" reject
  }
  chain forward {
    type filter hook forward priority 0
    reject
  }
}
"""

_DROPS = """
table inet drops {
  chain in { type filter hook input priority 0; iifname "eth0" drop; }
  chain out { type filter hook output priority 0; oifname "eth0" drop; }
}
"""

_FOLDERS = (
    "etc",
    "munge",
    "names/cluster",
    "names/laptop",
    "laptop",
    "home",
    "sshd",
    "slurm/log",
    "slurm/state",
    "log",
)

_ROW = "%i|%j|%u|%T|%N|%r"


@functools.cache
def missing() -> str:
    """What this machine lacks for a cluster with Slurm; empty if nothing."""
    return why_not(_PROGRAMS, _try_it)


def _try_it(namespace: str) -> None:
    run("ip", "-n", namespace, "link", "add", "b0", "type", "bridge")
    run("unshare", *[f"--{one}" for one in NAMESPACES], "--fork", "--mount-proc", "hostname", "trial")


@dataclass(frozen=True)
class SlurmJobRow:
    """A job as ``squeue`` showed it.

    Args:
        nodes: that it has, as Slurm writes them: ``n[1-2]``.
        reason: why it waits; ``None`` if it does not.
    """

    id: str
    name: str
    user: str
    state: str
    nodes: str
    reason: str


class SlurmCluster:
    """A cluster with Slurm on this machine, and a laptop outside it. A context manager.

    It ends with this process, however that ends.

    Args:
        folder: an empty one for its files, its users' homes and logs.
        nodes: how many hosts with a slurmd: ``n1`` and up.
        kill_wait: seconds that Slurm gives a job to end after SIGTERM.
    """

    def __init__(self, folder: Path, nodes: int = 3, kill_wait: int = 10) -> None:
        self.folder = folder
        self.homes = folder / "home"
        """The users' homes in the cluster, as this machine sees them: ``/home`` on the cluster's hosts."""
        self.laptop_homes = folder / "laptop"
        """The users' homes on the laptop, as this machine sees them: ``/home`` on the laptop."""
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.addresses = {"control": CONTROL, "login": LOGIN} | {
            node: f"{NODES}.{number}" for number, node in enumerate(self.nodes, 1)
        }
        self.hosts: dict[str, Host] = {}
        self.tracked_by = "linuxproc" if missing_freezer() else "cgroup"
        """How slurmd knows the processes of a job: by control groups, or else by their parents."""
        self._groups = f"loom-{secrets.token_hex(4)}"
        self._kill_wait = kill_wait
        self._daemons: dict[str, subprocess.Popen[str]] = {}
        self._open = ExitStack()

    # What tests run

    def login(self, command: Sequence[str], user: str = "ada", **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program on the login node to its end; options are those of `Host.run`."""
        return self.hosts["login"].run(command, user, **options)

    def laptop(self, command: Sequence[str], user: str = "ada", **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program on the laptop to its end; options are those of `Host.run`. ``ssh login`` works there."""
        return self.hosts["laptop"].run(command, user, **options)

    def node(self, number: int) -> Host:
        """The host of a node; the first is 1."""
        return self.hosts[f"n{number}"]

    def processes(self, number: int) -> list[psutil.Process]:
        """The processes of jobs on a node, with Slurm's own for each step, and what jobs have left behind."""
        daemon = self._daemons.get(f"slurmd-n{number}")
        ours = _pids(daemon) if daemon else set()
        return [one for one in self.node(number).processes() if one.pid not in ours]

    def jobs(self) -> list[SlurmJobRow]:
        """The jobs that wait, run or end, of all users."""
        listed = self._slurm("squeue", "--noheader", "--array", f"--format={_ROW}")
        return [SlurmJobRow(*line.split("|")) for line in listed.splitlines()]

    def node_states(self) -> dict[str, str]:
        """The state of each node, such as ``idle``, ``mixed``, ``draining``, ``down*``."""
        listed = self._slurm("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N|%T")
        return dict(line.split("|") for line in listed.splitlines())

    def scontrol(self, *command: str) -> str:
        """Run the administrator's ``scontrol``; its output."""
        return self._slurm("scontrol", *command)

    def wait(self, what: str, is_so: Callable[[], bool], timeout: float = STARTED_IN_TIME) -> None:
        """Wait until something is so, for ``timeout`` seconds at most; it is asked every `POLL` seconds."""
        deadline = time.monotonic() + timeout
        while not is_so():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come to pass in {timeout:g} s; jobs: {self.jobs()}")
            time.sleep(POLL)

    def wait_until_idle(self, timeout: float = STARTED_IN_TIME) -> None:
        """Wait until no job is left and all nodes are free."""
        self.wait("an idle cluster", self._is_idle, timeout)

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until the cluster is idle."""
        if jobs := {row.id for row in self.jobs()}:
            self._slurm("scancel", *jobs)
        self.wait_until_idle()

    # What tests break and mend

    def kill_slurmd(self, number: int) -> None:
        """Kill a node's slurmd. Its jobs' processes run on."""
        self._end(f"slurmd-n{number}", signal.SIGKILL)

    def start_slurmd(self, number: int) -> None:
        """Start a node's slurmd, and wait until the controller has seen it."""
        self._run(f"n{number}", f"slurmd-n{number}", ["slurmd", "-D", "-N", f"n{number}"])
        self._wait_for_nodes(f"n{number}")

    def kill_node(self, number: int) -> None:
        """Pull a node's power cord."""
        self.node(number).close()
        self._daemons.pop(f"slurmd-n{number}").wait(STARTED_IN_TIME)

    def start_node(self, number: int) -> None:
        """Start a node again whose power cord was pulled, and its slurmd."""
        self._add(f"n{number}")
        self.start_slurmd(number)

    def stop_controller(self) -> None:
        """End slurmctld, which writes down its state."""
        self._end("slurmctld", signal.SIGTERM)

    def start_controller(self) -> None:
        """Start slurmctld, and wait until it answers."""
        self._run("control", "slurmctld", ["slurmctld", "-D"])
        self.wait("an answer of slurmctld", self._controller_answers)

    def restart_controller(self) -> None:
        """End slurmctld, and start it again."""
        self.stop_controller()
        self.start_controller()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Lose all packets between the laptop and the login node meanwhile; nobody is told."""
        laptop = self.hosts["laptop"]
        laptop.filter(_DROPS)
        try:
            yield
        finally:
            laptop.filter("delete table inet drops")

    # How it starts and ends

    def _start(self) -> None:
        for name in _FOLDERS:
            (self.folder / name).mkdir(parents=True)
        for home in (self.homes, self.laptop_homes):
            for user, uid in USERS.items():
                (home / user).mkdir(mode=0o700)
                run("chown", f"{uid}:{uid}", str(home / user))
        write_slurm(self.folder / "etc", self.nodes, self._kill_wait, self.tracked_by)
        write_names(self.folder / "names" / "cluster", self.addresses)
        write_names(self.folder / "names" / "laptop", {"laptop": LAPTOP, "login": LAPTOP_SIDE})
        write_sshd(self.folder / "sshd", "/run/sshd-files")
        write_keys(self.folder / "sshd" / "host_key.pub", self.laptop_homes / "ada", self.homes / "ada")
        write_munge_key(self.folder / "munge")
        self._make_network()
        self._run("control", "munged", ["munged", "-F", "-f", *[
            f"--{option}-file=/run/munge/{name}"
            for option, name in {"key": "munge.key", "pid": "pid", "log": "log", "seed": "seed"}.items()
        ]])  # fmt: skip
        self.wait("munged", (self.folder / "munge" / "munge.socket.2").exists)
        self.start_controller()
        for node in self.nodes:
            self._run(node, f"slurmd-{node}", ["slurmd", "-D", "-N", node])
        self.hosts["login"].run(["mkdir", "-m", "755", "/run/sshd"]).check_returncode()
        self._run("login", "sshd", ["/usr/sbin/sshd", "-D", "-e", "-f", "/run/sshd-files/sshd_config"])
        self._wait_for_nodes(*self.nodes)
        self.wait("an answer of sshd", lambda: self.laptop(["ssh", "login", "true"]).returncode == 0)

    def _make_network(self) -> None:
        self._switch = self._make("switch", {})
        self._switch.ip("link", "add", "bridge", "type", "bridge")
        self._switch.ip("link", "set", "bridge", "up")
        for name in self.addresses:
            self._add(name)
        login = self.hosts["login"]
        laptop = self.hosts["laptop"] = self._make("laptop", {self.laptop_homes: "/home", **self._names("laptop")})
        login.link(laptop, "laptop", "eth0")
        login.ip("address", "add", f"{LAPTOP_SIDE}/30", "dev", "laptop")
        laptop.ip("address", "add", f"{LAPTOP}/30", "dev", "eth0")
        # A route to everything: what the laptop cannot reach is refused by the login node, not by its own table.
        laptop.ip("route", "add", "default", "via", LAPTOP_SIDE)
        login.run(["sysctl", "--quiet", "net.ipv4.ip_forward=1"]).check_returncode()  # otherwise nobody is told
        login.filter(_FIREWALL)

    def _make(self, name: str, mounts: Mapping[Path, str]) -> Host:
        freezer = FREEZER / f"{self._groups}-{name}" if name in self.nodes and self.tracked_by == "cgroup" else None
        host = Host(name, self.folder / "hosts" / name, mounts, freezer)
        self._open.callback(host.close)
        return host

    def _add(self, name: str) -> None:
        """Add a host of the cluster to its network."""
        places = {"home": "/home", "etc": "/etc/slurm", "munge": "/run/munge", "slurm": "/run/slurm"}
        if name == "login":
            places["sshd"] = "/run/sshd-files"
        mounts = {self.folder / source: place for source, place in places.items()}
        host = self.hosts[name] = self._make(name, {**mounts, **self._names("cluster")})
        self._switch.link(host, name, "eth0")
        self._switch.ip("link", "set", name, "master", "bridge")
        host.ip("address", "add", f"{self.addresses[name]}/16", "dev", "eth0")

    def _names(self, of: str) -> dict[Path, str]:
        return {self.folder / "names" / of / file: f"/etc/{file}" for file in ("hosts", "passwd", "group")}

    def _run(self, host: str, name: str, command: Sequence[str]) -> None:
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            self._daemons[name] = self.hosts[host].popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        daemon = self._daemons.pop(name)
        inner(daemon).send_signal(number)
        daemon.wait(STARTED_IN_TIME)

    def _slurm(self, *command: str) -> str:
        done = self.hosts["control"].run(command)
        if done.returncode:
            raise AssertionError(f"{' '.join(command)} failed: {done.stderr}")
        return done.stdout

    def _controller_answers(self) -> bool:
        return self.hosts["control"].run(["scontrol", "ping"]).returncode == 0

    def _wait_for_nodes(self, *nodes: str) -> None:
        """Wait until slurmctld has heard of slurmds that were started."""
        self.wait(f"a slurmd on {nodes}", lambda: all(_is_up(self.node_states()[node]) for node in nodes))

    def _is_idle(self) -> bool:
        return not self.jobs() and set(self.node_states().values()) == {"idle"}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End everything, and wait until it is gone."""
        self._open.close()
        for daemon in self._daemons.values():
            daemon.wait(STARTED_IN_TIME)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _is_up(state: str) -> bool:
    return not state.startswith(("down", "unknown")) and not state.endswith("*")  # the latter does not answer


def _pids(daemon: subprocess.Popen[str]) -> set[int]:
    with suppress(psutil.NoSuchProcess):
        return {one.pid for one in psutil.Process(daemon.pid).children()}
    return set()
