"""The loss of a pod, which is the host of its worker: the pod deletes itself through the API of Kubernetes.

The pod's workload then starts another one, as after the loss of a node. The pod's service account needs the right
to delete it, which the kustomize component ``images/kubernetes/chaos`` gives.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loom.chaos.host import processes
from loom.chaos.host.network_commands import COMPONENT
from loom.chaos.host.processes import Start, start_of, state_of, worker_of
from loom.chaos.injected import Evidence, Injected
from loom.errors import FaultRefused

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which Kubernetes puts the token of a pod's service account, if the pod asks for it."""

ANSWER_WITHIN = 10.0  # seconds that the API of Kubernetes may take
MAX_ANSWER = 1 << 20  # bytes of its answer that are read
GRACE = 1  # seconds from the pod's SIGTERM to its SIGKILL, the least that is no forced deletion


@dataclass(frozen=True)
class KubernetesPod:
    """A pod, and the API of Kubernetes as its processes see it."""

    name: str
    namespace: str
    host: str
    """The address of the API."""
    port: int
    folder: Path
    """The folder with the token of the pod's service account."""

    @classmethod
    def of(cls, start: Start) -> KubernetesPod | None:
        """Return the pod whose host a worker is; None outside of a pod, or if another program there has it."""
        host = start.environment.get("KUBERNETES_SERVICE_HOST")
        # The worker of a `loom.local` in a pod is one of many things there, and not the reason for the pod.
        if not host or "--exit-with-parent" in start.arguments:
            return None
        name = start.environment.get("POD_NAME")
        if not name or not (SERVICE_ACCOUNT / "token").exists():
            raise _refused("this pod has no service account that may delete it, or does not know its own name")
        namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip()
        port = int(start.environment.get("KUBERNETES_SERVICE_PORT") or 443)
        return cls(name, namespace, host, port, SERVICE_ACCOUNT)

    def try_delete(self) -> str:
        """Check that the pod may delete itself, which changes nothing; return the pod's uid."""
        uid = self._delete(dryRun=["All"]).get("metadata", {}).get("uid")
        if not isinstance(uid, str):
            raise FaultRefused(f"the API of Kubernetes does not say which pod {self.name} is")
        return uid

    def delete(self, uid: str) -> None:
        """Delete the pod, unless another one has its name by now."""
        self._delete(gracePeriodSeconds=GRACE, preconditions={"uid": uid})

    def _delete(self, **options: Any) -> Mapping[str, Any]:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        # Kubernetes replaces the token's file before the token expires.
        token = (self.folder / "token").read_text().strip()
        body = json.dumps({"kind": "DeleteOptions", "apiVersion": "v1", **options})
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=ANSWER_WITHIN, context=context)
            try:
                connection.request("DELETE", path, body, headers)
                answer = connection.getresponse()
                read: Any = json.loads(answer.read(MAX_ANSWER) or b"{}")
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FaultRefused(
                f"the API of Kubernetes at {self.host}:{self.port} does not answer the pod {self.name}: "
                f"{error or type(error).__name__}. A network policy may be in the way"
            ) from error
        said: Mapping[str, Any] = read if isinstance(read, dict) else {}
        if answer.status in (401, 403):
            raise _refused(f"the service account of the pod {self.name} may not delete it: {_message(said)}")
        if not 200 <= answer.status < 300:
            text = f"the API of Kubernetes does not delete the pod {self.name} (status {answer.status})"
            raise FaultRefused(f"{text}: {_message(said)}")
        return said


def try_lose_host(pid: int) -> Evidence:
    """Check that the host of a training process can be lost; return the worker, and the pod if it is in one."""
    worker = worker_of(pid)
    pod = KubernetesPod.of(start_of(worker))
    return {"worker": worker} if pod is None else {"worker": worker, "pod": pod.name, "uid": pod.try_delete()}


def lose_host(pid: int) -> Injected:
    """Lose the host of a training process: the pod that its worker is in, or else the worker."""
    worker = worker_of(pid)
    pod = KubernetesPod.of(start_of(worker))
    if pod is None:
        return processes.lose_host(pid)
    uid = pod.try_delete()
    pod.delete(uid)
    processes.kill(worker)  # at once: processes on a lost host have no time to save their state
    evidence = {"worker": worker, "state": state_of(worker) or "gone", "pod": pod.name, "uid": uid}
    return Injected("lost_host", evidence)


def _refused(why: str) -> FaultRefused:
    return FaultRefused(f"{why}. Add the kustomize component {COMPONENT}")


def _message(said: Mapping[str, Any]) -> str:
    return str(said.get("message") or "no reason is given")[:300]
