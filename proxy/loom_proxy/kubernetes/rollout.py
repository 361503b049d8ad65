"""The wait until a job's pods can be used. It deploys pods again that lack their class, also in an open job."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loom._version import __version__
from loom.errors import DeploymentFailed, LoomError, ProtocolMismatch, PythonVersionMismatch, describe_error
from loom.process.child import ProcessState
from loom.process.threads import keep_going
from loom_proxy.job import Job
from loom_proxy.kubernetes.deployment import NotLoaded, PodMesh, PodState
from loom_proxy.session.events import Event

logger = logging.getLogger(__name__)

ASK_EVERY = 1.0  # seconds between two requests to the pods
MOST_AGAIN = 2  # the number of times that a mesh may be deployed again
PATIENCE = 30.0  # seconds that what is lost has to come back by itself, as it does if its pod has the class

# Seconds for which all pods of a mesh are ready, but one has not loaded its class, before they are deployed again;
# twice as many before the second time. Kubetorch loads it once in each deployment, and a pod in which that failed
# stays ready without it. A pod that only is slow says the same, and a deployment lets it begin anew.
UNLOADED_FOR = 30.0

# Errors of a pod that only another image or other arguments can cure.
_FINAL = frozenset({"ImportError", "MissingDependency", "WrongArguments"})
_NO_LOOM = re.compile(r"No module named '?loom(_gateway|_proxy)?\b")
_INSTALL = ". An image needs torchmonarch and Loom, as those of loom.images.cpu_image() and gpu_image() have them"


class PodStart:
    """The start of a job's deployed pods.

    Args:
        meshes: meshes of the job; the pods of the first have the gateways.
        timeout: seconds from now until a pod that cannot be used is an error.
        deploy: deploys a mesh again, without ending workers and gateways that run already.
        stopped: whether the job was closed, which ends the wait.
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
        self.doing = "starting the workers and the gateways"  # the current step, for the progress display

    def wait(self) -> None:
        """Wait until the workers and the gateways of all pods listen; see `KubernetesJob.apply` for the errors."""
        first = self._meshes[0].mesh
        while not self._stopped():
            status, problem = self._look()
            if not problem:
                if failed := self._failed_steps():
                    raise DeploymentFailed(f"{failed}. Kubetorch goes on without such a step: correct the image")
                return
            if time.monotonic() > self._deadline or fails_again(status):
                problem = "; ".join(filter(None, [problem, self._failed_steps()]))
                raise DeploymentFailed(
                    f"{first.service_name} in namespace {first.namespace} does not start: {problem}"
                )
            for one in self._meshes:
                if one.overdue and one.again < MOST_AGAIN:
                    self._deploy_again(one)
            time.sleep(ASK_EVERY)

    def _look(self) -> tuple[Mapping[str, Any], str]:
        """Return the status that the pods report, and a text about any problem."""
        status: Mapping[str, Any] = {"pods": [], "gateway": None}
        for one in self._meshes:
            # Any pod reports on all that it knows; a pod that it does not know is asked in its own mesh.
            if one.is_complete(status):
                continue
            try:
                found = one.mesh.status()
            except Exception as error:
                if is_final(error):
                    said = "; ".join(filter(None, [what_a_pod_says(error), self._failed_steps()]))
                    raise DeploymentFailed(said) from error
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

    def _failed_steps(self) -> str:
        return "; ".join(failure for one in self._meshes for failure in one.mesh.failed_steps())

    def _deploy_again(self, one: _MeshStart) -> None:
        mesh = one.mesh
        one.again += 1
        one.since, one.overdue = None, False
        what = f"deploying {mesh.service_name} again ({one.again} of at most {MOST_AGAIN} times)"
        logger.warning("%s: %s", what, one.problem)
        before, self.doing = self.doing, what
        try:
            self._deploy(mesh)
        except DeploymentFailed as error:  # not fatal: the pods are as they were
            logger.warning("%s", error)
        self.doing = before


class _MeshStart:
    """The start of one mesh's pods."""

    def __init__(self, mesh: PodMesh) -> None:
        self.mesh = mesh
        self.pods = mesh.pods_wanted
        self.again = 0  # the number of times that the mesh was deployed again
        self.overdue = False  # whether a pod has been without the class for `UNLOADED_FOR` seconds
        self.problem = ""  # the last failure of a pod to answer
        self.addresses: set[str] = set()  # addresses of pods that have had the class
        self._ready: set[str] = set()  # names of the pods that were ready at the last failure
        self.since: float | None = None  # when `_ready` last changed, by `time.monotonic`

    def is_complete(self, status: Mapping[str, Any]) -> bool:
        """Return whether a pod's report on the job has all pods of this mesh."""
        known = [pod for pod in status["pods"] if pod["mesh"] == self.mesh.name]
        return len(known) >= self.pods

    def failed(self, error: Exception) -> None:
        """Note that a pod has failed to answer, and how."""
        if not isinstance(error, NotLoaded):
            # The pod has the class, or does not exist: deploying again changes nothing.
            self.since, self.overdue = None, False
            self.problem = describe_error(error)
            return
        pods = self._ready_pods()
        ready = {pod.name for pod in pods}
        if ready != self._ready or self.since is None:
            self._ready, self.since = ready, time.monotonic()
        self.overdue = len(ready) == self.pods and time.monotonic() - self.since >= UNLOADED_FOR * 2**self.again
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


def look_after_pods(job: Job, start: Callable[[], PodStart]) -> threading.Thread:
    """Deploy lost pods that come back without their class again, until the job is closed; return the thread."""
    looking = "look after pods", lambda: _look_after(job, start)
    thread = threading.Thread(target=keep_going, args=looking, name=f"pods of {job.session}", daemon=True)
    thread.start()
    return thread


def _look_after(job: Job, start: Callable[[], PodStart]) -> None:
    for event in job.events():
        if event.name not in _ENDS or not _lost(job):
            continue
        if job._connection.ended.wait(PATIENCE) or not _lost(job):
            continue
        try:
            start().wait()
        except LoomError as error:
            logger.warning("%s is lost, and does not come back: %s", _what(event), error)


_ENDS = {"host_lost": "host_back", "disconnected": "resumed"}
"""Events of losses, and those of their ends. A client is also disconnected if its session's pod is lost."""


def _what(event: Event) -> str:
    return str(event.details.get("address", "the connection to the session"))


def _lost(job: Job) -> set[object]:
    """Return the hosts that are lost now, and None if the connection is."""
    lost = set()
    for event in job.events(timeout=0):
        if event.name in _ENDS:
            lost.add(event.details.get("host"))
        elif event.name in _ENDS.values():
            lost.discard(event.details.get("host"))
    return lost


def what_is_wrong(status: Mapping[str, Any], expected: int) -> str:
    """Return why a job cannot be used yet; empty if it can."""
    pods = status["pods"]
    wrong = [
        f"pod {pod['name']}: {pod['worker']['problem'] or 'its worker does not listen yet'}"
        for pod in pods
        if pod["worker"]["problem"] or not pod["worker"]["listening"]
    ]
    wrong += [f"pod {pod['name']}: {pod['gateway_problem']}" for pod in pods if pod["gateway_problem"]]
    if len(pods) < expected:
        wrong.append(f"{len(pods)} of {expected} pods answer: {', '.join(pod['name'] for pod in pods) or 'none'}")
    if not wrong and status["gateway"] is None:
        wrong.append("no gateway listens yet")
    return "; ".join(wrong)


def fails_again(status: Mapping[str, Any]) -> bool:
    """Return whether a process of a pod does not run after several starts, or cannot be started."""
    for pod in status["pods"]:
        worker = pod["worker"]
        if worker["state"] == ProcessState.PORT_TAKEN or (not worker["listening"] and worker["starts"] > 2):
            return True
        if pod["gateway"] and not pod["gateway_listening"] and pod["gateway_starts"] > 2:
            return True
    return False


def check_versions(pod: Mapping[str, Any]) -> None:
    """Raise `PythonVersionMismatch` or `ProtocolMismatch` if this program does not work with a pod's."""
    versions = pod["versions"]
    here = ".".join(map(str, sys.version_info[:2]))
    there = ".".join(versions["python"].split(".")[:2])
    if here != there:
        raise PythonVersionMismatch(
            f"pod {pod['name']} has Python {there} and this is Python {here}: classes travel as bytecode, which "
            f"differs. Use an image with Python {here}, or run this program with Python {there}"
        )
    theirs = versions.get("monarch-loom", __version__)
    if theirs.split(".")[0] != __version__.split(".")[0]:
        raise ProtocolMismatch(
            f"pod {pod['name']} has Loom {theirs} and this is Loom {__version__}: install the same major "
            "version on both sides"
        )


def is_final(error: BaseException) -> bool:
    """Return whether a pod has answered that it cannot run, so that asking again is useless."""
    return not _FINAL.isdisjoint(_class_names(error))


def _class_names(error: BaseException) -> set[str]:
    """Return the names of an error's classes. Kubetorch's client makes a class of the name that the pod raised."""
    return {cls.__name__ for cls in type(error).__mro__}


def what_a_pod_says(error: BaseException) -> str:
    """Return the text of a final error: which pod, why, and what to do."""
    reason = str(error).strip().partition("\n\n")[0]  # Kubetorch's client appends the traceback
    pod = f"pod {name}" if (name := getattr(error, "pod_name", None)) else "a pod"
    if missing := _NO_LOOM.search(str(error)):
        return (
            f"{pod} has no Loom in its image ({missing[0]}): use loom.images.cpu_image() or gpu_image(), or "
            "install monarch-loom[gateway] in yours"
        )
    advice = "" if "WrongArguments" in _class_names(error) else _INSTALL
    return f"{pod} cannot run a worker: {reason}{advice}"
