"""`FullWatch`: what full watchers of a user's weaver get in addition to the reports and events of every watcher.

These are policies, goodput, the newest events, devices' states, replicas' handlers and descriptions, and the ids of
replicas that were forgotten. So a page fetches nothing again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from loom.weaver.replicas import Replica
from loom.weaver.serving.requests import RequestHandler
from loom.weaver.views import WeaverEvent
from loom.weaver.weaver import Weaver

NEWEST_EVENTS = 200
"""Events in a snapshot."""

NEWEST_FAULTS = 50
"""Faults of a job in a pushed `GoodputRecord`. REST has all of them, and the job's timeline."""

GOODPUT_EVERY = 5.0
"""Seconds between two pushes of the goodput of living jobs."""

_DESCRIBING = frozenset(("registered", "reconnected", "devices_changed"))
"""Events after which a replica's `ReplicaInfo` differs in fields that neither a report nor the event has."""


class FullWatch:
    """The further part of snapshots and pushes. It costs nothing until `begin`."""

    def __init__(self, user: str, weaver: Weaver, requests: RequestHandler) -> None:
        self._user = user
        self._known = weaver.known
        self._requests = requests
        self._wanted = False
        self._policies: dict[str, str] = {}
        """The policies that were pushed last."""
        self._described: dict[Replica, None] = {}
        """Replicas with handlers that were not pushed yet."""
        self._goodput_pushed = 0.0

    def begin(self, now: float) -> None:
        """Collect changes for `changes` from now on."""
        if not self._wanted:
            self._wanted = self._known.devices.watched = True
            self._policies = self._policies_now()
            self._goodput_pushed = now

    def end(self) -> None:
        self._wanted = self._known.devices.watched = False
        self._known.devices.changed.clear()
        self._known.forgotten.clear()
        self._described.clear()

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the further part of a snapshot."""
        return {
            "policies": self._policies_now(),
            "goodput": self._goodput(self._known.goodput.jobs(), now),
            "events": self._requests.answer("events", {"limit": NEWEST_EVENTS}),
        }

    def event(self, event: WeaverEvent) -> dict[str, Any]:
        """Return the further part of an event: its replica, if the event describes the replica anew."""
        replica = self._known.replicas.get(event.replica or "")
        if replica is None or event.kind not in _DESCRIBING:
            return {}
        return {"info": self._requests.info(replica)}

    def describe(self, replicas: Collection[Replica]) -> None:
        """Note replicas that have new handlers."""
        if self._wanted:
            self._described.update(dict.fromkeys(replicas))

    def changes(self, now: float) -> dict[str, Any]:
        """Return what has changed since the last call."""
        changes: dict[str, Any] = {}
        if self._described:
            changes["replicas"] = {replica.id: {"handlers": replica.handlers} for replica in self._described}
            self._described.clear()
        if forgotten := self._known.forgotten:
            changes["forgotten"] = list(forgotten)
            forgotten.clear()
        if changed := self._known.devices.changed:
            changes["device_states"] = {uuid: self._device(uuid) for uuid in changed}
            changed.clear()
        if (policies := self._policies_now()) != self._policies:
            changes["policies"] = self._policies = policies
        if now >= self._goodput_pushed + GOODPUT_EVERY:
            jobs = self._known.goodput.jobs_since(self._goodput_pushed)
            self._goodput_pushed = now
            if jobs:
                changes["goodput"] = self._goodput(jobs, now)
        return changes

    def _policies_now(self) -> dict[str, str]:
        policies: dict[str, str] = self._requests.answer("policies", {})
        return policies

    def _device(self, uuid: str) -> dict[str, Any] | None:
        """Return a device without its status; None for one that was forgotten."""
        if uuid not in self._known.devices:
            return None
        device = self._requests.device(self._known.devices.device(uuid))
        del device["status"]
        return device

    def _goodput(self, jobs: Collection[str], now: float) -> list[dict[str, Any]]:
        kept = self._known.goodput
        records = (kept.record(job, now, course=False, faults=NEWEST_FAULTS) for job in jobs)
        return [{**record.to_body(), "user": self._user} for record in records]
