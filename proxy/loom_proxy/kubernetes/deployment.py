"""`PodMesh`: the pods of one mesh of a job, and their deployment and removal by Kubetorch.

Kubetorch's server does the steps of a pod's image as it starts, writes failed ones into the pod's log, and
goes on.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from loom.errors import DeploymentFailed, LoomError, WrongArguments
from loom_proxy.kubernetes import kubetorch_names
from loom_proxy.progress import AFTER, Progress, WaitStep, wanted

LOOK_EVERY = 1.0  # seconds between two requests to Kubernetes
NAMED = 3  # pods for which the display gives the reason that they are not ready


class PodState(NamedTuple):
    """The state of one pod."""

    name: str
    address: str  # IP address; empty as long as the pod has none
    ready: bool
    why: str  # the reason that the pod is not ready; empty if it is

    def __str__(self) -> str:
        return f"{self.name} is ready" if self.ready else f"{self.name}: {self.why}"


def pod_states(pods: Iterable[Mapping[str, Any]]) -> list[PodState]:
    """Return the states of pods from the Kubernetes API, sorted by name, without pods that are being deleted."""
    return sorted(_state(pod) for pod in pods if not pod.get("metadata", {}).get("deletionTimestamp"))


def _state(pod: Mapping[str, Any]) -> PodState:
    status = pod.get("status") or {}
    conditions = {condition.get("type"): condition for condition in status.get("conditions") or ()}
    ready = conditions.get("Ready", {}).get("status") == "True"
    name = pod.get("metadata", {}).get("name", "a pod")
    return PodState(name, status.get("podIP") or "", ready, "" if ready else _why(status, conditions))


def _why(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the most telling of the reasons that Kubernetes gives."""
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        state = container.get("state") or {}
        waiting, ended = state.get("waiting"), state.get("terminated")
        last = (container.get("lastState") or {}).get("terminated") or {}
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            before = f", exit code {last['exitCode']} before" if "exitCode" in last else ""
            return _reason(waiting) + before
        if ended:
            return f"{_reason(ended)}, exit code {ended.get('exitCode')}"
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _reason(scheduled)
    if status.get("reason"):
        return _reason(status)
    phase = status.get("phase", "Unknown")
    return "its container runs, but is not ready" if phase == "Running" else phase


def _reason(of: Mapping[str, Any]) -> str:
    reason, message = of.get("reason") or "unknown", of.get("message")
    return f"{reason}: {message}" if message else str(reason)


def pods_shown(what: Callable[[], str], pods: Callable[[], list[PodState]]) -> Progress:
    """Return a block that shows the current step, the number of ready pods, and why the others are not ready."""
    step = WaitStep(what())
    looked = time.monotonic()

    def now() -> WaitStep:
        nonlocal step, looked
        if time.monotonic() - looked > LOOK_EVERY:
            found = pods()
            looked = time.monotonic()
            step = _shown_step(what(), found)
        return step

    return Progress(now, wanted(None), after=AFTER)


def _shown_step(what: str, pods: list[PodState]) -> WaitStep:
    waiting = [str(pod) for pod in pods if not pod.ready]
    ready = len(pods) - len(waiting)
    reasons = f": {'; '.join(waiting[:NAMED])}" if waiting else ""
    return WaitStep(f"{what}: {ready} of {len(pods)} pods ready{reasons}", ready, len(pods))


TAIL = 10_000  # lines of a pod's log that are read
TOLD = 3  # lines of a failed step's output that are told

_LINE = re.compile(r"\b(?P<level>INFO|ERROR)\b[\W|]*(?P<text>.*)")
_RUNS = re.compile(r"Running: (?P<command>.*)")
_FAILED = re.compile(r"Failed to run command '(?P<command>.*)' with stderr:")
_INSTALLS = "$KT_PIP_INSTALL_CMD"


def steps_of(image: str) -> list[str]:
    """Return the commands of an image, given its Dockerfile. Commands of pip are without their beginning."""
    lines = (line.strip() for line in image.splitlines())
    return [line[len("RUN ") :].removeprefix(_INSTALLS).strip() for line in lines if line.startswith("RUN ")]


def failures(log: str, steps: Sequence[str]) -> list[str]:
    """Return a text for each step that has failed in a pod, and has not been done again since."""
    found: dict[str, list[str]] = {}
    output: list[str] | None = None  # of the failed step that the lines belong to
    for level, text in _messages(log.splitlines()):
        if failed := _FAILED.match(text):
            output = found[failed["command"]] = []
        elif level == "ERROR" and output is not None:
            output.append(text)
        else:
            output = None
            if runs := _RUNS.match(text):
                found.pop(runs["command"], None)
    return [
        f"the image's step `{command:.200}` failed: {'; '.join(lines[-TOLD:]):.500}"
        for command, lines in found.items()
        if any(command.endswith(step) for step in steps)
    ]


def _messages(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        if message := _LINE.search(line):
            yield message["level"], message["text"]


logger = logging.getLogger(__name__)

# Folder, module and name of the class in each pod, from the pod's installation of Loom.
LOOM_POD = ("", "loom_gateway.pod.loom_pod", "LoomPod")
# After a dead link, the ``kubectl`` that Kubetorch has started may take that long to end.
REMOVE_WITHIN = 60.0  # seconds of attempts to remove pods while Kubetorch is not reached
AGAIN_AFTER = 0.5  # seconds between two attempts to remove pods

NETWORK_CAPABILITY = "NET_ADMIN"
"""The right that faults of a network need, in the pod's own network."""


class NotLoaded(LoomError):
    """A pod that answers has not loaded `LoomPod` yet. Kubetorch returns that answer as a call's result."""


def answer(status: Any) -> Mapping[str, Any]:
    """Return a result of `LoomPod.status`, or raise `NotLoaded` if it is another."""
    if not isinstance(status, dict) or "pods" not in status:
        detail = status.get("detail", status) if isinstance(status, dict) else status
        raise NotLoaded(f"{detail!s:.300}")
    return status


class PodMesh:
    """The pods of one mesh: a ``kubetorch.Compute``, or pods with given labels.

    Args:
        deployed_as: name of the class in the pods, before which Kubetorch puts the user's name.
        service: DNS name, in the namespace, of the pods' headless service; None: the one that Kubetorch makes.
        injectable: whether failures may be injected into what runs in the pods.
    """

    def __init__(
        self,
        name: str,
        of: Any,
        namespace: str,
        deployed_as: str,
        service: str | None = None,
        injectable: bool = False,
    ) -> None:
        import kubetorch

        if not name.isidentifier() or name.startswith("_"):
            raise WrongArguments(f"{name!r} cannot name a mesh: state() is to have an attribute of that name")
        if isinstance(of, Mapping):
            of = kubetorch.Compute(selector=dict(of), namespace=namespace)
        if not isinstance(of, kubetorch.Compute):
            raise WrongArguments(
                f"the pods of {name} are {of!r:.80}: give a kt.Compute or a selector, a dict of labels"
            )
        if of.namespace != namespace:
            raise WrongArguments(
                f"the pods of {name} are to be in namespace {of.namespace!r}, and the job in {namespace!r}: "
                "give one namespace to both"
            )
        self.name = name
        self.namespace = namespace
        self.compute = of
        self.ours: bool = not of.selector_only  # whether the job deploys the pods; otherwise they run already
        if injectable and not self.ours:
            raise WrongArguments(
                f"injectable=True is for pods that the job deploys, and those of {name} run already: deploy them "
                "with LOOM_INJECTABLE=1 in their environment"
            )
        self._injectable = injectable
        self._deployed_as = deployed_as
        self._service = service
        self.stream_logs: bool | None = False
        """True if Kubetorch prints the pods' output while it deploys them; None as it is configured."""

    @cached_property
    def remote(self) -> Any:
        """Kubetorch's proxy of the class in the pods."""
        # kubetorch.cls(LoomPod) makes the same, but would need the class here, and all that it imports.
        remote = kubetorch_names.deployable(self._deployed_as, *LOOM_POD)
        remote.compute = self.compute
        if (
            self.ours and self.compute.service_name
        ):  # Kubetorch deploys one service on a compute, under its first name
            remote.service_name = self.compute.service_name
        return remote

    @property
    def service_name(self) -> str:
        """Name of the service that Kubetorch deploys for the pods."""
        return str(self.remote.service_name)

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which Kubernetes knows the pods."""
        selector = kubetorch_names.selector_of(self.compute)
        return {"kubetorch.com/service": self.service_name} if self.ours or not selector else dict(selector)

    @property
    def headless(self) -> str:
        """The name of the service that resolves to the addresses of all the pods."""
        return self._service or f"{self.service_name}-headless"

    @property
    def pods_wanted(self) -> int:
        """The number of pods that the mesh has when it is complete."""
        if self.ours:
            return int(self.compute.replicas)
        found = len(self.pods())
        if not found:
            selector = kubetorch_names.selector_of(self.compute)
            labels = ",".join(f"{key}={value}" for key, value in selector.items())
            raise DeploymentFailed(
                f"no pod in namespace {self.namespace} has the labels {labels}: see `kubectl get pods -n "
                f"{self.namespace} --show-labels`"
            )
        return found

    def pods(self) -> list[PodState]:
        kubetorch_names.reach_controller()
        return pod_states(self.compute.pods() or ())

    def exists(self) -> bool:
        """Return whether the mesh was, or may have been, deployed by an earlier program, which keeps its pods."""
        try:
            return kubetorch_names.workload(self.namespace, self.service_name) is not None
        except Exception as error:  # noqa: BLE001 - Kubetorch's own classes; deploying will tell
            logger.warning(
                "whether %s is there already is not known; its pods will stay until they are removed by kill(): %s",
                self.service_name,
                error,
            )
            return True

    def complete_compute(self) -> None:
        """Add an image and a headless service to a compute that the job deploys, if it has none, and the marks."""
        compute = self.compute
        if not self.ours:
            return
        if compute.image is None:
            from loom.images import cpu_image, gpu_image, with_network_tools

            compute.image = gpu_image() if compute.gpus else cpu_image()
            if self._injectable:
                compute.image = with_network_tools(compute.image)
        if not compute.distributed_config:
            # Only for the headless service, which Kubetorch makes with it. Monarch does the distribution.
            compute.distributed_config = {"distribution_type": "local", "quorum_workers": compute.replicas}
        if self._injectable:
            compute.add_env_vars({"LOOM_INJECTABLE": "1"})
            (container, *_) = compute.pod_spec["containers"]
            rights = container.setdefault("securityContext", {}).setdefault("capabilities", {})
            if NETWORK_CAPABILITY not in rights.setdefault("add", []):
                rights["add"].append(NETWORK_CAPABILITY)

    def deploy(self, init_args: Mapping[str, Any]) -> None:
        """Deploy the pods, and `LoomPod` in them. Pods that are as wanted stay, and load the class again."""
        try:
            kubetorch_names.reach_controller()
            self.remote.to(self.compute, init_args=dict(init_args), stream_logs=self.stream_logs)
        except Exception as error:
            raise DeploymentFailed(self._why_not(error)) from error

    def status(self) -> Mapping[str, Any]:
        """Return the result of `LoomPod.status` in any pod, or raise `NotLoaded` or an error of Kubetorch's."""
        return answer(self.remote.status(stream_logs=False))

    def failed_steps(self) -> list[str]:
        """Return a text for each step of the image that has failed in a pod; none if Kubetorch does not tell."""
        steps = steps_of(self.compute.image.contents) if self.ours and self.compute.image is not None else []
        if not steps:
            return []
        found = []
        for pod in self.pods():
            try:
                log = kubetorch_names.log_of(self.namespace, pod.name, TAIL)
            except Exception as error:  # noqa: BLE001 - Kubetorch's own classes
                logger.warning("whether the image's steps were done in %s is not known: %s", pod.name, error)
                continue
            found += [f"pod {pod.name}: {failure}" for failure in failures(log, steps)]
        return found

    def remove(self) -> None:
        """End worker and gateway in the pods, and remove the pods unless they were selected by labels."""
        import kubetorch

        if not self.ours:
            with contextlib.suppress(Exception):
                self.remote.shutdown(stream_logs=False)
            return
        deadline = time.monotonic() + REMOVE_WITHIN
        while True:
            try:
                kubetorch_names.reach_controller()
                self.remote.teardown()
                return
            except Exception as error:
                if isinstance(error, kubetorch.ControllerRequestError) or time.monotonic() > deadline:
                    raise DeploymentFailed(f"{self.service_name} was not removed: {error}") from error
                logger.info("%s is not removed yet: %s", self.service_name, error)
            time.sleep(AGAIN_AFTER)

    def _why_not(self, error: BaseException) -> str:
        text = (
            f"{self.service_name} in namespace {self.namespace} was not deployed: {error or type(error).__name__}"
        )
        if "not found" in text.lower() and "namespace" in text.lower():
            text += f". See `kubectl get namespaces`, and make it: kubectl create namespace {self.namespace}"
        with contextlib.suppress(Exception):
            states = [str(state) for state in self.pods() if not state.ready]
            text += f". Pods: {'; '.join(states)}" if states else ""
        return text
