"""Network policies for a job's pods, which close the ports that ask for no token to everybody else.

Monarch's port and those of the processes on a worker run the code of anyone who reaches them. A port that no policy
allows is closed, so a policy has to allow all other ports to everybody, as they are without it.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from loom_proxy.kubernetes.deployment import PodMesh
from loom_proxy.kubernetes.port_forward import GATEWAY_PORT

logger = logging.getLogger(__name__)

SERVING = dict(enumerate(("the gateway", "the weaver", "the session host", "other gateways"), GATEWAY_PORT))
"""What the ports of a pod that serves clients are for."""

EPHEMERAL = 32768
"""The first port that Linux gives to who asks for none: Monarch's processes, drivers, the weaver."""

KUBECTL_TIMEOUT = 30.0  # seconds

_FORBIDDEN = re.compile(r'cannot (?P<verb>\w+) resource "networkpolicies"')


class PortPolicies:
    """The policies of one job, one for each mesh. kubectl applies them, with the rights of who runs this program.

    Args:
        meshes: meshes of the job.
        monarch_port: port at which each pod's worker listens; the port before it is the pod's keeper's.
        clients: namespace from which clients reach the gateway: Kubetorch's, where nginx is.
    """

    def __init__(self, meshes: Sequence[PodMesh], monarch_port: int, clients: str) -> None:
        self._meshes = meshes
        self._port = monarch_port
        self._clients = clients

    @property
    def closed(self) -> list[int]:
        """The ports below `EPHEMERAL` that are only for the job: Monarch's, the keeper's and those of `SERVING`."""
        return sorted({self._port, self._port - 1, *SERVING})

    def apply(self) -> None:
        """Apply the policies. If that cannot be done, a warning names the open ports, and the missing right."""
        # kubectl takes what begins with a brace for JSON, which has no second document.
        documents = "".join(f"---\n{json.dumps(manifest)}\n" for manifest in self.manifests())
        problem = self._kubectl("apply", "-f", "-", given=documents)
        if problem:
            ports = ", ".join(map(str, self.closed))
            logger.warning(
                "the ports %s and those from %d on of this job's pods are open to every pod of the cluster, and "
                "who reaches %d runs code there: %s",
                ports, EPHEMERAL, self._port, problem,
            )  # fmt: skip

    def remove(self) -> None:
        """Remove the policies. A warning says if that cannot be done: they do no harm without their pods."""
        names = [manifest["metadata"]["name"] for manifest in self.manifests()]
        problem = self._kubectl("delete", "networkpolicy", "--ignore-not-found", *names)
        if problem:
            logger.warning("the network policies %s were not removed: %s", ", ".join(names), problem)

    def manifests(self) -> list[Mapping[str, Any]]:
        return [self._manifest(mesh) for mesh in self._meshes]

    def _manifest(self, mesh: PodMesh) -> Mapping[str, Any]:
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {
                "name": f"{mesh.service_name}-ports",
                "namespace": mesh.namespace,
                "labels": {"app.kubernetes.io/managed-by": "loom"},
            },
            "spec": {
                "podSelector": _labelled(mesh.labels),
                "policyTypes": ["Ingress"],
                "ingress": [
                    {"from": [{"podSelector": _labelled(one.labels)} for one in self._meshes]},
                    {
                        "from": [{"namespaceSelector": _labelled({"kubernetes.io/metadata.name": self._clients})}],
                        "ports": [{"protocol": "TCP", "port": GATEWAY_PORT}],
                    },
                    {"ports": self._others()},
                ],
            },
        }

    def _others(self) -> list[Mapping[str, Any]]:
        """Return the ports that stay open to everybody."""
        ranges = []
        start = 1
        for port in [*self.closed, EPHEMERAL]:
            if start < port:
                ranges.append({"protocol": "TCP", "port": start, "endPort": port - 1})
            start = max(start, port + 1)
        return [*ranges, {"protocol": "UDP", "port": 1, "endPort": 65535}]

    def _kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Run kubectl; return why it failed, and what to do; empty if it did not."""
        namespace = self._meshes[0].namespace
        if shutil.which("kubectl") is None:
            return f"kubectl is not installed here. {_advice(namespace)}"
        try:
            done = subprocess.run(
                ["kubectl", "--namespace", namespace, *arguments],
                input=given,
                stdin=subprocess.DEVNULL if given is None else None,
                capture_output=True,
                text=True,
                timeout=KUBECTL_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return f"kubectl has not answered in {KUBECTL_TIMEOUT:.0f} s. {_advice(namespace)}"
        if done.returncode == 0:
            return ""
        if forbidden := _FORBIDDEN.search(done.stderr):
            return (
                f"the right to {forbidden['verb']} networkpolicies of networking.k8s.io in the namespace "
                f"{namespace} is missing. {_advice(namespace)}"
            )
        return f"{done.stderr.strip()[-500:] or f'kubectl ended with code {done.returncode}'}. {_advice(namespace)}"


def _labelled(labels: Mapping[str, str]) -> Mapping[str, Any]:
    return {"matchLabels": dict(labels)}


def _advice(namespace: str) -> str:
    return (
        f"Ask for a Role with the verbs get, create, patch and delete of networkpolicies in {namespace}, or have a "
        f"policy like images/kubernetes/base/networkpolicy.yaml there; network_policy=False silences this"
    )
