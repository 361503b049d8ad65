"""`PortForward`: a ``kubectl port-forward`` that is started again whenever it ends."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from loom.errors import InvalidAddress, MissingDependency
from loom_proxy.forwarded_port import ForwardedPort

logger = logging.getLogger(__name__)

GATEWAY_PORT = 8470

_FORWARDS = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")
_NAME = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_ADDRESS = re.compile(
    rf"kube://(?P<namespace>{_NAME})/(?:(?P<kind>[a-z]+)/)?(?P<name>{_NAME})(?::(?P<port>\d+)(?P<path>/[^?#]*)?|/)?"
)


class KubeAddress(NamedTuple):
    """The address of a gateway in Kubernetes, to forward a port to."""

    namespace: str
    resource: str  # the resource in kubectl's form, such as ``svc/loom-gateway``
    port: int
    path: str = ""  # the gateway's path, if a proxy such as nginx has the port

    def __str__(self) -> str:
        place = "" if self.port == GATEWAY_PORT and not self.path else f":{self.port}{self.path}"
        return f"kube://{self.namespace}/{self.resource.removeprefix('svc/')}{place}"

    def open(self, timeout: float = 0.0) -> PortForward:
        """Forward a port to the gateway, which is not waited for."""
        return PortForward(self)


def parse_kube_address(url: str) -> KubeAddress:
    """Read ``kube://NAMESPACE/SERVICE[:PORT[/PATH]]``, or ``kube://NAMESPACE/pod/NAME[:PORT[/PATH]]``."""
    match = _ADDRESS.fullmatch(url)
    port = int(match["port"] or GATEWAY_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise InvalidAddress(
            f"{url!r} is no address in Kubernetes: write kube://NAMESPACE/SERVICE or kube://NAMESPACE/SERVICE:PORT "
            "with the names that `kubectl get services -A` shows"
        )
    path = (match["path"] or "").rstrip("/")
    return KubeAddress(match["namespace"], f"{match['kind'] or 'svc'}/{match['name']}", port, path)


def is_kube_address(url: str) -> bool:
    """Return whether a gateway's URL is an address in Kubernetes, for `parse_kube_address`."""
    return url.startswith("kube://")


class PortForward(ForwardedPort):
    """A port of this machine that leads to one in Kubernetes, as long as this process lives or until `close`."""

    def __init__(self, address: KubeAddress) -> None:
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise MissingDependency(
                f"{address} needs kubectl, which is not on PATH: install it (kubernetes.io/docs/tasks/tools), or "
                "give the ws:// or wss:// address of an ingress"
            )
        self._kubectl = kubectl
        self.address = address
        program = f"kubectl port-forward to {address.resource} in namespace {address.namespace}"
        super().__init__(str(address), program, address.path)

    def _command(self, port: int) -> Sequence[str]:
        # kubectl chooses a free port itself: another program may take one that was free before.
        ports = f"{port or ''}:{self.address.port}"
        namespace = ["-n", self.address.namespace]
        return [self._kubectl, "port-forward", "--address", "127.0.0.1", *namespace, self.address.resource, ports]

    def _port_in(self, line: str) -> int | None:
        match = _FORWARDS.match(line)
        return int(match[1]) if match else None

    def _hear(self, line: str) -> bool:
        if line.startswith("Handling connection"):
            return False
        logger.info("kubectl: %s", line)
        # kubectl goes on listening, but every later connection fails.
        return "lost connection to pod" in line
