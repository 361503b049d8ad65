"""`PodCare`: while a job is open, sees to pods that come back without what Kubetorch should have loaded in them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from loom.errors import LoomError
from loom_proxy.job import Job
from loom_proxy.kubernetes.rollout import PodStart

__all__ = ["PodCare"]

logger = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds that a lost host has to come back by itself, as it does unless Kubetorch leaves its pod empty."""


class PodCare:
    """Looks after the pods of an open job, on a thread of its own, until the job is closed.

    Args:
        job: the session, which tells of hosts that are lost and come back.
        start: makes a start of all pods, which deploys those again that are without their class.
    """

    def __init__(self, job: Job, start: Callable[[], PodStart]) -> None:
        self._job = job
        self._start = start
        self._thread = threading.Thread(target=self._run, name=f"pods of {job.session}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for event in self._job.events():
            if event.name != "host_lost" or not self._lost():
                continue
            if self._job._connection.ended.wait(PATIENCE) or not self._lost():
                continue
            try:
                self._start().wait()
            except LoomError as error:
                logger.warning("%s is lost, and does not come back: %s", event.details["address"], error)

    def _lost(self) -> bool:
        """Whether a host is lost and not back."""
        lost = set()
        for event in self._job.events(timeout=0):
            if event.name == "host_lost":
                lost.add(event.details["host"])
            elif event.name == "host_back":
                lost.discard(event.details["host"])
        return bool(lost)
