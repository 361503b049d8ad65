"""The states of a job's pods in Kubernetes: whether they are ready, if not, why, and their progress display."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

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
