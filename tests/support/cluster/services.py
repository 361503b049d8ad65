"""Services: names that dnsmasq answers, and addresses of their own that lead to ready pods.

Each host of the cluster has the rules that kube-proxy would load: a connection to a Service's address and one of
its ports goes to a ready pod, picked at random, or by the address of who connects if the Service says so
(`sessionAffinity`; kube-proxy picks one at random first, and then stays with it); one to any other port of it is
refused. A headless Service has no
address of its own: its name has the addresses of its pods, and so any port of theirs can be reached by that name.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cluster.kubelet.pod import Pod
from tests.support.cluster.kubelet.probes import port_number
from tests.support.cluster.network import CONTROL, SERVICES, Network
from tests.support.cluster.service_accounts import API_PORT, API_SERVICE

__all__ = ["DOMAIN", "Service", "cluster_ips", "hosts_file", "load_rules", "publish_names"]

DOMAIN = "svc.cluster.local"


@dataclass(frozen=True)
class Service:
    """A Service of Kubernetes.

    Args:
        address: of its own; None for a headless one.
        ports: its ports, and the ports of its pods (a number or a name) behind them.
        unready: whether its pods are published before they are ready, and while they end.
        affinity: whether connections from one address lead to one pod.
    """

    namespace: str
    name: str
    selector: dict[str, str]
    ports: dict[int, int | str]
    address: str | None = None
    unready: bool = False
    affinity: bool = False

    @property
    def domain(self) -> str:
        return f"{self.name}.{self.namespace}.{DOMAIN}"

    def endpoints(self, pods: Iterable[Pod]) -> list[Pod]:
        """Those of the pods that are behind it."""
        return [
            pod
            for pod in pods
            if pod.namespace == self.namespace
            and self.selector
            and self.selector.items() <= pod.labels.items()
            and (pod.ready or (self.unready and pod.phase == "Running"))
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "clusterIP": self.address or "None",
                "selector": self.selector,
                "ports": [{"port": port, "targetPort": target} for port, target in self.ports.items()],
                "publishNotReadyAddresses": self.unready,
            },
        }


def hosts_file(services: Iterable[Service], pods: Iterable[Pod], fixed: dict[str, str]) -> str:
    """The names of a cluster, for dnsmasq. The first name of an address is what its PTR record has."""
    pods = list(pods)
    lines = [f"{address} {name}" for name, address in fixed.items()]
    for service in services:
        if service.address is not None:
            lines.append(f"{service.address} {service.domain}")
            continue
        for pod in service.endpoints(pods):
            # Pods of a StatefulSet are known by their names, others by their addresses.
            known = pod.name if pod.subdomain == service.name else pod.address.replace(".", "-")
            lines.append(f"{pod.address} {known}.{service.domain} {service.domain}")
    return "\n".join(lines) + "\n"


def publish_names(folder: Path, names: str) -> None:
    """Have dnsmasq read its names again."""
    (folder / "names.new").write_text(names)
    (folder / "names.new").replace(folder / "names")
    os.kill(int((folder / "dnsmasq.pid").read_text()), signal.SIGHUP)


def cluster_ips(services: Iterable[Service], pods: Iterable[Pod]) -> str:
    """The nftables rules that lead from the addresses of Services to pods."""
    pods = list(pods)
    rules = [f"ip daddr {API_SERVICE} tcp dport 443 dnat to {CONTROL}:{API_PORT}"]
    for service in services:
        behind = service.endpoints(pods)
        for port, target in service.ports.items() if service.address and behind else ():
            numbered = ", ".join(
                f"{index} : {pod.address} . {port_number(target, pod.spec['containers'][0])}"
                for index, pod in enumerate(behind)
            )
            picked = "jhash ip saddr" if service.affinity else "numgen random"
            rules.append(
                f"ip daddr {service.address} tcp dport {port} "
                f"dnat to {picked} mod {len(behind)} map {{ {numbered} }}"
            )
    lines = "\n".join(rules)
    return f"""
table ip services {{ }}
delete table ip services
table ip services {{
  chain out {{
    type nat hook output priority -100
{lines}
  }}
  chain rest {{
    type filter hook output priority 0
    ip daddr {SERVICES} ip protocol tcp reject with tcp reset
  }}
}}
"""


def load_rules(network: Network, rules: Mapping[str, str]) -> set[str]:
    """Load each host's rules on those of the hosts that are there; which they are."""
    loaded = set()
    for host, text in rules.items():
        try:
            network.filter(host, text)
        except subprocess.CalledProcessError as error:
            # Whoever removes a host kills what runs there, this too: then it has ended by a signal.
            if error.returncode >= 0 and network.can_enter(host):
                raise
        else:
            loaded.add(host)
    return loaded
