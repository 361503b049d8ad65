"""Repair of an open job's pods that come back without the class that Kubetorch should have loaded in them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from loom.errors import LoomError
from loom_proxy.job import Job
from loom_proxy.kubernetes.rollout import PodStart

logger = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds that a lost host has to come back by itself, as it does unless its pod has not loaded the class."""


def look_after_pods(job: Job, start: Callable[[], PodStart]) -> threading.Thread:
    """Look after the pods of an open job until it is closed; return the thread that does so.

    Args:
        job: the session, whose events report lost hosts and hosts that are back.
        start: makes a start of all pods, which deploys pods without their class again.
    """
    thread = threading.Thread(target=_look_after, args=(job, start), name=f"pods of {job.session}", daemon=True)
    thread.start()
    return thread


def _look_after(job: Job, start: Callable[[], PodStart]) -> None:
    for event in job.events():
        if event.name != "host_lost" or not _is_host_lost(job):
            continue
        if job._connection.ended.wait(PATIENCE) or not _is_host_lost(job):
            continue
        try:
            start().wait()
        except LoomError as error:
            logger.warning("%s is lost, and does not come back: %s", event.details["address"], error)


def _is_host_lost(job: Job) -> bool:
    lost = set()
    for event in job.events(timeout=0):
        if event.name == "host_lost":
            lost.add(event.details["host"])
        elif event.name == "host_back":
            lost.discard(event.details["host"])
    return bool(lost)
