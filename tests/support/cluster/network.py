"""The network of a cluster on one machine: a network namespace for each pod, on one bridge, and a laptop outside.

::

    laptop ── link ── control ── bridge ─┬─ data-store
                      (nginx,            ├─ pod
                       controller,       ├─ pod
                       dnsmasq)          └─ …

The control namespace has an address for each part that policies tell apart: Kubetorch's nginx and controller, the
ingress, the node (probes, port-forwards), and the service that gives a cloud's credentials to who asks.

The laptop has a link to the control namespace only, which forwards nothing and lets in from there only what is for
nginx. Namespaces are named after the process that owns the cluster, so that the next cluster removes what a killed
one left behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster.kubelet.memory import groups, remove_group
from tests.support.network.netns import run, why_not

__all__ = [
    "CONTROL",
    "INGRESS_PORT",
    "LAPTOP_SIDE",
    "METADATA",
    "NGINX_PORT",
    "Network",
    "missing",
    "owner_prefix",
    "remove_stale",
]

NODE = "10.244.0.1"
CONTROL = "10.244.0.2"
DATA_STORE = "10.244.0.3"
INGRESS = "10.244.0.4"
METADATA = "169.254.169.254"
PODS = "10.244"
"""Pods have 10.244.1.1 and up; no address is given out twice."""

SERVICES = "10.96.0.0/16"
"""Addresses of Services, which exist only as rules (see `cluster_ips`)."""

LAPTOP_SIDE = "10.243.0.1"
LAPTOP = "10.243.0.2"
NGINX_PORT = 8080
INGRESS_PORT = 8088

_PROGRAMS = (
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("nginx", "nginx-light"),
    ("dnsmasq", "dnsmasq-base"),
    ("rsync", "rsync"),
    ("nsenter", "util-linux"),
    ("unshare", "util-linux"),
    ("setpriv", "util-linux"),
    ("pgrep", "procps"),
)
_NAMES = re.compile(r"^kube-(\d+)-")


@functools.cache
def missing() -> str:
    """What this machine lacks for a cluster; empty if nothing."""
    return why_not(_PROGRAMS, _try_it)


def _try_it(namespace: str) -> None:
    rules = (
        "table ip trial {\n chain out {\n type nat hook output priority -100\n"
        " ip daddr 10.96.0.1 tcp dport 80 dnat to numgen random mod 1 map { 0 : 10.244.1.1 . 80 }\n }\n}\n"
    )
    run("ip", "-n", namespace, "link", "add", "b0", "type", "bridge")
    run("nsenter", f"--net=/run/netns/{namespace}", "nft", "-f", "-", given=rules)
    run("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true")


def owner_prefix(number: int) -> str:
    """The start of the names of all namespaces of this process's cluster of that number."""
    return f"kube-{os.getpid()}-{number}-"


def remove_stale() -> None:
    """Remove the namespaces and the files of clusters whose process is gone, and end what still runs in them."""
    for line in run("ip", "netns", "list").splitlines():
        if _is_stale(name := line.split()[0]):
            remove_namespace(name)
    for group in groups("kube-"):
        if _is_stale(group.name):
            remove_group(group)
    for folder in Path(tempfile.gettempdir()).glob("kube-*"):
        if _is_stale(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def _is_stale(name: str) -> bool:
    owner = _NAMES.match(name)
    return owner is not None and not Path(f"/proc/{owner[1]}").exists()


def remove_namespace(name: str) -> None:
    """Kill what runs in a network namespace, and remove it. Nothing happens if there is none."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=30.0)
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30.0)


@dataclass(frozen=True)
class Network:
    """The namespaces of one cluster. Any process of the cluster may hold one: the state is the kernel's."""

    prefix: str

    def name(self, host: str) -> str:
        """The name of a host's namespace, as ``ip netns`` has it."""
        return self.prefix + host

    def inside(self, host: str) -> list[str]:
        """What to put before a command for it to run on a host's network."""
        return ["nsenter", f"--net=/run/netns/{self.name(host)}", "--"]

    def can_enter(self, host: str) -> bool:
        """Whether a host is there. While it is made or removed, its name is there, and it is not."""
        return subprocess.run([*self.inside(host), "true"], capture_output=True, timeout=30.0).returncode == 0

    def make(self) -> None:
        """Make the bridge, the control and data store namespaces, and the laptop with its link."""
        for host in ("bridge", "control", "laptop"):
            self._add_namespace(host)
        self._ip("bridge", "link", "add", "bridge", "type", "bridge")
        self._ip("bridge", "link", "set", "bridge", "up")
        self._join_bridge("control", CONTROL)
        for address in (f"{NODE}/16", f"{INGRESS}/16", f"{METADATA}/32"):
            self._ip("control", "address", "add", address, "dev", "eth0")
        self.add("data-store", DATA_STORE)
        self._ip("control", "link", "add", "laptop", "type", "veth",
                 "peer", "name", "eth0", "netns", self.name("laptop"))  # fmt: skip
        self._ip("control", "address", "add", f"{LAPTOP_SIDE}/30", "dev", "laptop")
        self._ip("control", "link", "set", "laptop", "up")
        self._ip("laptop", "address", "add", f"{LAPTOP}/30", "dev", "eth0")
        self._ip("laptop", "link", "set", "eth0", "up")
        # A route to everything: what the laptop cannot reach is refused by the cluster, not by its own table.
        self._ip("laptop", "route", "add", "default", "via", LAPTOP_SIDE)
        self.filter("control", _FIREWALL)

    def add(self, host: str, address: str) -> None:
        """Add a host to the bridge."""
        self._add_namespace(host)
        self._join_bridge(host, address)

    def remove(self, host: str) -> None:
        """Remove a host, with whatever runs there."""
        remove_namespace(self.name(host))

    def remove_all(self) -> None:
        """Remove all hosts of the cluster, with whatever runs there."""
        for line in run("ip", "netns", "list").splitlines():
            name = line.split()[0]
            if name.startswith(self.prefix):
                remove_namespace(name)

    def filter(self, host: str, rules: str) -> None:
        """Load nftables rules on a host."""
        run(*self.inside(host), "nft", "-f", "-", given=rules)

    def set_laptop_link(self, state: str) -> None:
        """Set the laptop's link ``up`` or ``down``."""
        self._ip("laptop", "link", "set", "eth0", state)
        if state == "up":  # going down removed it
            self._ip("laptop", "route", "replace", "default", "via", LAPTOP_SIDE)

    def set_laptop_drops(self, drops: bool) -> None:
        """Have all packets between the laptop and the cluster dropped, or not any more; nobody is told."""
        rules = "table inet drops; delete table inet drops;"
        if drops:
            rules += """
                table inet drops {
                    chain out { type filter hook output priority 0; oifname "eth0" drop; }
                    chain in { type filter hook input priority 0; iifname "eth0" drop; }
                }
            """
        self.filter("laptop", rules)

    def _add_namespace(self, host: str) -> None:
        run("ip", "netns", "add", self.name(host))
        self._ip(host, "link", "set", "lo", "up")

    def _join_bridge(self, host: str, address: str) -> None:
        port = "p" + "-".join(address.split(".")[2:])
        self._ip("bridge", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", self.name(host))
        self._ip("bridge", "link", "set", port, "master", "bridge", "up")
        self._ip(host, "address", "add", f"{address}/16", "dev", "eth0")
        self._ip(host, "link", "set", "eth0", "up")
        for known in (SERVICES, METADATA):
            if host != "control" or known != METADATA:
                self._ip(host, "route", "add", known, "dev", "eth0")

    def _ip(self, host: str, *command: str) -> None:
        run("ip", "-n", self.name(host), *command)


_FIREWALL = f"""
table inet laptop {{
  chain in {{
    type filter hook input priority 0
    iifname "laptop" ct state established,related accept
    iifname "laptop" ip daddr {LAPTOP_SIDE} tcp dport {{ {NGINX_PORT}, {INGRESS_PORT} }} accept
    iifname "laptop" reject
  }}
  chain forward {{
    type filter hook forward priority 0
    reject
  }}
}}
"""
