"""The progress display of a wait for pods: how many are ready, and why the others are not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from loom_proxy.display.progress import AFTER, Progress, Step, wanted
from loom_proxy.kubernetes.pod_status import PodState

LOOK_EVERY = 1.0
"""Seconds between two requests to Kubernetes."""

NAMED = 3
"""Pods for which the display gives the reason that they are not ready."""


@contextlib.contextmanager
def pods_shown(what: Callable[[], str], pods: Callable[[], list[PodState]]) -> Iterator[None]:
    """Show the states of pods while the block runs.

    Args:
        what: returns the text of the current step.
        pods: asks Kubernetes for the pods' states.
    """
    if not wanted(None):
        yield
        return
    step = Step(what())
    looked = time.monotonic()

    def now() -> Step:
        nonlocal step, looked
        if time.monotonic() - looked > LOOK_EVERY:
            found = pods()
            looked = time.monotonic()
            step = _step(what(), found)
        return step

    with Progress(now, after=AFTER):
        yield


def _step(what: str, pods: list[PodState]) -> Step:
    waiting = [str(pod) for pod in pods if not pod.ready]
    ready = len(pods) - len(waiting)
    reasons = f": {'; '.join(waiting[:NAMED])}" if waiting else ""
    return Step(f"{what}: {ready} of {len(pods)} pods ready{reasons}", ready, len(pods))
