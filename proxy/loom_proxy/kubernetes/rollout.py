"""`PodStart`: waits until the pods of a job can be used; deploys those again that are without their class."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loom.errors import DeploymentFailed
from loom_proxy.kubernetes.deployment import PodMesh
from loom_proxy.kubernetes.pod_answers import (
    NotLoaded,
    check_versions,
    fails_again,
    is_final,
    what_a_pod_says,
    what_is_wrong,
)
from loom_proxy.kubernetes.pod_status import PodState

logger = logging.getLogger(__name__)

ASK_EVERY = 1.0
"""Seconds between two questions to the pods."""

UNLOADED_FOR = 30.0
"""Seconds that all pods of a mesh are ready, and one says that it has not loaded its class, before they are
deployed again. Kubetorch loads it once a deployment: where that failed the pod stays ready, and without it."""

MOST_AGAIN = 2
"""How often a mesh is deployed again."""


class PodStart:
    """The start of a job's pods that have been deployed.

    Args:
        meshes: of the job; a pod of the first has the gateway.
        timeout: seconds from now; what is wrong then is the error.
        deploy: deploys a mesh again. Workers and gateways, which run already, are to survive it.
        stopped: whether nobody wants them any more, which ends the wait.
    """

    def __init__(
        self,
        meshes: Sequence[PodMesh],
        timeout: float,
        deploy: Callable[[PodMesh], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._deadline = time.monotonic() + timeout
        self._deploy = deploy
        self._stopped = stopped
        self._meshes = [_MeshStart(mesh) for mesh in meshes]
        self.doing = "starting the workers and the gateway"
        """What it does now, for those who wait."""

    def wait(self) -> None:
        """Wait until the workers of all pods and the gateway listen.

        Raises:
            DeploymentFailed: a pod cannot, or they take longer; says which, and why.
            PythonVersionMismatch, ProtocolMismatch: a pod has other versions than this program.
        """
        first = self._meshes[0].mesh
        while not self._stopped():
            status, problem = self._look()
            if not problem:
                return
            if time.monotonic() > self._deadline or fails_again(status):
                raise DeploymentFailed(
                    f"{first.service_name} in namespace {first.namespace} does not start: {problem}"
                )
            for one in self._meshes:
                if one.overdue and one.again < MOST_AGAIN:
                    self._deploy_again(one)
            time.sleep(ASK_EVERY)

    def _look(self) -> tuple[dict[str, Any], str]:
        """What the pods say of themselves, and what is wrong with it."""
        status: dict[str, Any] = {"pods": [], "gateway": None}
        for one in self._meshes:
            # Any pod answers for all; one that nobody knows of is asked in its own mesh.
            if one.is_complete(status):
                continue
            try:
                found = one.mesh.status()
            except Exception as error:
                if is_final(error):
                    raise DeploymentFailed(what_a_pod_says(error)) from error
                one.failed(error)
                continue
            for pod in found["pods"]:
                check_versions(pod)
            if len(found["pods"]) > len(status["pods"]):
                status = found
        addresses = {pod["address"] for pod in status["pods"]}
        for one in self._meshes:
            one.addresses |= addresses
        problems = [one.problem for one in self._meshes if not one.is_complete(status)]
        if status["pods"] or not any(problems):
            problems.insert(0, what_is_wrong(status, sum(one.pods for one in self._meshes)))
        return status, "; ".join(filter(None, problems))

    def _deploy_again(self, one: _MeshStart) -> None:
        mesh = one.mesh
        one.begin_again()
        what = f"deploying {mesh.service_name} again ({one.again} of at most {MOST_AGAIN} times)"
        logger.warning("%s: %s", what, one.problem)
        before, self.doing = self.doing, what
        try:
            self._deploy(mesh)
        except DeploymentFailed as error:  # the pods are as they were
            logger.warning("%s", error)
        self.doing = before


class _MeshStart:
    """The start of one mesh's pods: whether they load their class."""

    def __init__(self, mesh: PodMesh) -> None:
        self.mesh = mesh
        self.pods = mesh.pods_wanted
        self.again = 0
        """How often it has been deployed again."""
        self.overdue = False
        """Whether a pod has been without the class for long."""
        self.problem = ""
        """How a pod has failed to answer last."""
        self.addresses: set[str] = set()
        """Addresses of pods that have had the class."""
        self._ready: set[str] = set()
        self._since: float | None = None

    def is_complete(self, status: Mapping[str, Any]) -> bool:
        """Whether all of its pods are in what a pod says of the job."""
        known = [pod for pod in status["pods"] if pod["mesh"] == self.mesh.name]
        return len(known) >= self.pods

    def failed(self, error: Exception) -> None:
        """Take note of how a pod has failed to answer."""
        if not isinstance(error, NotLoaded):
            # It has the class, or is not there: deploying again changes nothing.
            self._since, self.overdue = None, False
            self.problem = f"{type(error).__name__}: {error}"
            return
        pods = self._ready_pods()
        ready = {pod.name for pod in pods}
        if ready != self._ready or self._since is None:
            self._ready, self._since = ready, time.monotonic()
        self.overdue = len(ready) == self.pods and time.monotonic() - self._since >= UNLOADED_FOR
        without = sorted(pod.name for pod in pods if pod.address not in self.addresses)
        named = (
            f"one of the pods {', '.join(without)}" if len(without) > 1 else f"pod {''.join(without) or 'of it'}"
        )
        self.problem = f"{named} is ready and has not loaded LoomPod yet: {error}"
        if self.again:
            times = "once" if self.again == 1 else f"{self.again} times"
            logs = f"kubectl logs -n {self.mesh.namespace} {without[0] if without else 'POD'}"
            self.problem += f", although it was deployed {times} more; see `{logs}`"

    def _ready_pods(self) -> list[PodState]:
        try:
            return [pod for pod in self.mesh.pods() if pod.ready]
        except Exception as error:  # noqa: BLE001 - Kubetorch's own classes; the next look may find them
            logger.debug("the pods of %s are not seen: %s", self.mesh.name, error)
            return []

    def begin_again(self) -> None:
        """Take note that the mesh is deployed again now."""
        self.again += 1
        self._since, self.overdue = None, False
