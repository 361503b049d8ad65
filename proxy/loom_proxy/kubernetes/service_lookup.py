"""Services that an earlier program has deployed, found by name, and the sessions that hold their objects."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loom.control.address import MONARCH_PORT
from loom.errors import AuthenticationError, DeploymentFailed, LoomError
from loom.rest_client import Gateway
from loom.token_file import generate_token, state_folder
from loom_proxy.job import Job
from loom_proxy.kubernetes import kubetorch_names
from loom_proxy.kubernetes.deployment import LOOM_POD, PodMesh
from loom_proxy.kubernetes.network_policy import PortPolicies
from loom_proxy.kubernetes.port_forward import GATEWAY_PORT, PortForward, is_kube_address, parse_kube_address
from loom_proxy.session.open import connect


def token_for(namespace: str, service: str) -> str:
    """Return the token of a job's gateway, kept in a file of this user's; a new one for a new job."""
    path = _path(namespace, service)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with open(handle, "w", encoding="utf-8") as file:
        token = generate_token()
        file.write(token + "\n")
    return token


def kept_token(namespace: str, service: str) -> str | None:
    """Return the token of a job that this user has deployed from here; None if there is none."""
    try:
        return _path(namespace, service).read_text().strip()
    except FileNotFoundError:
        return None


def _path(namespace: str, service: str) -> Path:
    return state_folder() / "kubernetes" / f"{namespace}.{service}.token"


HOLDERS = ("Hosted", "AsyncHosted")
"""Names of the actor classes that hold the objects of `loom.cls` and the functions of `loom.fn`."""


def gateway_url(namespace: str, headless: str) -> str:
    """Return the URL of the gateway in pods with a headless service, by way of Kubetorch's nginx."""
    return f"{kubetorch_names.nginx_url()}/{namespace}/{headless}:{GATEWAY_PORT}"


@dataclass(frozen=True)
class FoundService:
    """A service that Kubetorch knows."""

    namespace: str
    name: str
    module: str  # name of the module that its pods have loaded
    token: str | None = None  # of its gateway, if it is not the token that this user keeps

    @property
    def is_looms(self) -> bool:
        """True if its pods are those of `LoomPod`, so that its object is in a session."""
        return self.module == LOOM_POD[1]

    @property
    def url(self) -> str:
        """The URL of its gateway."""
        return gateway_url(self.namespace, f"{self.name}-headless")

    def open(self) -> Job | None:
        """Join the session that holds the service's object, next to its other clients; None if there is none.

        Raises:
            AuthenticationError: this user keeps no token of the service, or a wrong one.
            LoomError: an error of `loom.connect`.
        """
        token = self._token()
        with self._gateway(token) as gateway:
            session = next(self._sessions(gateway), None)
        if session is None:
            return None
        in_cluster = kubetorch_names.is_in_cluster()
        return connect(self.url, token, session, mode="call", insecure=in_cluster)

    def end_sessions(self, but: str) -> None:
        """End the sessions, of earlier programs, that hold the service's object, except one."""
        with self._gateway(self._token()) as gateway:
            for session in self._sessions(gateway):
                if session != but:
                    gateway.end_session(session)

    def remove(self) -> None:
        """Remove the service, its pods and their network policies.

        Raises:
            DeploymentFailed: Kubetorch cannot remove it.
        """
        import kubetorch

        mesh = PodMesh("workers", kubetorch.Compute(namespace=self.namespace), self.namespace, self.name[-40:])
        mesh.remote.service_name = self.name
        mesh.remove()
        if self.is_looms:
            PortPolicies([mesh], MONARCH_PORT, kubetorch.config.install_namespace).remove()

    def _token(self) -> str:
        token = self.token or kept_token(self.namespace, self.name) or os.environ.get("LOOM_TOKEN")
        if token is None:
            raise AuthenticationError(
                f"the token of {self.name} in namespace {self.namespace} is not kept here: set LOOM_TOKEN to it. "
                f"Where it was deployed it is in ~/.local/state/loom/kubernetes/{self.namespace}.{self.name}.token"
            )
        return token

    @contextmanager
    def _gateway(self, token: str) -> Iterator[Gateway]:
        if not is_kube_address(self.url):
            yield Gateway(self.url, token, insecure=kubetorch_names.is_in_cluster())
            return
        forward = PortForward(parse_kube_address(self.url))
        try:
            yield Gateway(forward, token)
        finally:
            forward.close()

    def _sessions(self, gateway: Gateway) -> Iterator[str]:
        """Yield the sessions that hold the service's object, the newest first."""
        for session in sorted(gateway.sessions(), key=lambda one: -float(one["created_at"])):
            try:
                found = gateway.meshes(session["name"])
            except LoomError:  # it ends at this moment
                continue
            if any(_holds(actors, self.name) for procs in found["hosts"]["procs"] for actors in procs["actors"]):
                yield str(session["name"])


def _holds(actors: Mapping[str, Any], name: str) -> bool:
    return actors["name"] == name and actors["class_name"] in HOLDERS and not actors["stopped"]


def find_service(name: str, namespace: str, reload_prefixes: Sequence[str] = ()) -> FoundService | None:
    """Return the service that a name means, by Kubetorch's order of prefixes; None if there is none.

    Raises:
        DeploymentFailed: Kubetorch does not tell.
    """
    try:
        for service in kubetorch_names.services_to_look_for(name, reload_prefixes):
            known = kubetorch_names.workload(namespace, service)
            if known is not None:
                return FoundService(namespace, service, kubetorch_names.module_of(known)[0])
    except Exception as error:
        raise DeploymentFailed(
            f"Kubetorch does not tell what {name!r} in namespace {namespace} is: {error}"
        ) from error
    return None
