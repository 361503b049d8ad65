"""`JobEvents`: a job's events in the weaver's log, sent by a thread of their own because the weaver may be away."""

from __future__ import annotations

import fnmatch
import logging
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loom.driver_api import Session
from loom.errors import LoomError, WeaverUnavailable
from loom.process.threads import get_within, keep_going
from loom.weaver.device_failures import Action
from loom.weaver.states import LIVING, DeviceState


@dataclass(frozen=True)
class UsableDevices:
    """The devices that a job may not use, or should leave to others, by uuid."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Why no group may use a device: a GPU that has failed or was deactivated, or a CPU slot that was deactivated.

    Groups on a CPU slot that has failed move as the policy of their group says, also to another slot of that name:
    all workers on one machine have the same.
    """
    occupied: Mapping[str, str] = field(default_factory=dict)
    """For each GPU on which a living replica of another job is, one such replica."""

    @classmethod
    def of(
        cls, job: str, uses_gpus: bool, devices: Iterable[Mapping[str, Any]], living: Collection[str]
    ) -> UsableDevices:
        """Return what follows for a job from the weaver's devices and the ids of the replicas that live."""
        own = re.compile(re.escape(job) + r"_\d+(\.\d+)?")
        refused, occupied = {}, {}
        for device in devices:
            uuid, state, gpu = device["uuid"], device["state"], device["kind"] == "gpu"
            if gpu is not uses_gpus:
                continue
            if state == DeviceState.INACTIVE or (gpu and state != DeviceState.ACTIVE):
                refused[uuid] = f"{state}, {device['reason'] or 'for no given reason'}"
            others = [id for id in device["replicas"] if id in living and not own.fullmatch(id)]
            if gpu and others:
                occupied[uuid] = others[0]
        return cls(refused, occupied)

    def refusal(self, devices: Iterable[str]) -> str:
        """Return why a group may not use some devices; "" if it may."""
        return next((f"{device}: {self.refused[device]}" for device in devices if device in self.refused), "")


_log = logging.getLogger("loom")

RETRY_EVERY = 0.5  # seconds between two attempts to report an event while the weaver is away
ASK_EVERY = 0.5  # seconds between two requests for the replicas to respawn
DEVICES_EVERY = 1.0  # seconds between two requests for the devices
MOST_AT_ONCE = 1000  # replicas to respawn in one answer

CLOSE_TIMEOUT = 2.0

_KINDS = ("respawn_wanted", "device_failed")

KEPT = 10_000
"""Events that a job keeps for its status. The weaver's log has older ones."""


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job. The weaver logs it under the same ``kind``."""

    time: float
    """Seconds since the epoch."""
    kind: str
    replica: str | None
    data: Mapping[str, Any]


class JobEvents:
    """A reporter of one job's events, which also asks the weaver which replicas to respawn.

    Its thread calls ``respawn`` with the name of a replica and the reason: for a replica whose group has the policy
    ``respawn``, and for one without a policy whose device has failed. It calls ``use`` whenever the devices change
    that the job may not use, or should leave to others.
    """

    def __init__(
        self,
        job: str,
        session: Session,
        respawn: Callable[[str, str], object],
        use: Callable[[UsableDevices], object],
        uses_gpus: bool,
    ) -> None:
        self.recorded: deque[JobEvent] = deque(maxlen=KEPT)
        """The newest events, the oldest first."""
        self._job = job
        self._session = session
        self._respawn = respawn
        self._use = use
        self._uses_gpus = uses_gpus
        self._usable = UsableDevices()
        self._devices_due = 0.0  # when the weaver is asked for the devices again, on the monotonic clock
        self._newest: dict[str, int] = {}  # ids of the weaver's newest events that were read, by kind
        self._unreported: queue.SimpleQueue[JobEvent | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        reporting = "report a job's events", self._run
        self._thread = threading.Thread(target=keep_going, args=reporting, name=f"events of {job}", daemon=True)
        self._thread.start()

    def record(self, kind: str, replica: str | None = None, **data: Any) -> None:
        """Record and log an event, and queue it for the weaver. Return at once."""
        event = JobEvent(time.time(), kind, replica, data)
        self.recorded.append(event)
        _log.info("%s %s %s %s", self._job, kind, replica or "", data)
        self._unreported.put(event)

    def close(self) -> None:
        """Report the queued events, unless the weaver is away."""
        self._closing.set()
        self._unreported.put(None)
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        self._ask_for_devices()  # before the first group is started
        while True:
            try:
                event = get_within(self._unreported, ASK_EVERY)
            except queue.Empty:
                if time.monotonic() >= self._devices_due:
                    self._ask_for_devices()
                self._ask_for_respawns()
                continue
            if event is None:
                return
            self._report(event)

    def _report(self, event: JobEvent) -> None:
        data = {"job": self._job, "at": event.time, **event.data}
        while True:
            try:
                self._session.ask_weaver("note", {"kind": event.kind, "replica": event.replica, "data": data})
            except WeaverUnavailable:
                if not self._closing.wait(RETRY_EVERY):
                    continue
            except Exception:  # noqa: BLE001 - logged; the job goes on without its log
                _log.exception("the weaver does not take %s", event)
            return

    def _ask_for_devices(self) -> None:
        self._devices_due = time.monotonic() + DEVICES_EVERY
        try:
            devices = self._session.ask_weaver("devices", {})
            used = self._uses_gpus and any(device["replicas"] for device in devices)
            replicas = self._session.ask_weaver("replicas", {}) if used else ()
        except LoomError as error:
            _log.debug("the weaver does not say which devices may be used: %s", error)
            return
        living = {one["id"] for one in replicas if one["state"] in LIVING}
        usable = UsableDevices.of(self._job, self._uses_gpus, devices, living)
        if usable != self._usable:
            self._usable = usable
            self._use(usable)

    def _ask_for_respawns(self) -> None:
        try:
            if not self._newest:
                self._newest = dict.fromkeys(_KINDS, self._session.ask_weaver("status", {})["event"])
                return
            for kind in _KINDS:
                query = {"after": self._newest[kind], "kind": kind, "limit": MOST_AT_ONCE}
                new = self._session.ask_weaver("events", query)
                if new:
                    self._ask_for_devices()  # so that the groups move to others
                for event in new:
                    for replica in self._to_respawn(event):
                        self._respawn(replica, event["reason"])
                    self._newest[kind] = event["id"]
        except LoomError as error:
            _log.debug("the weaver does not say what to respawn: %s", error)

    def _to_respawn(self, event: Mapping[str, Any]) -> list[str]:
        if event["kind"] == "respawn_wanted":
            return [event["replica"]]
        notified = [entry for entry in event["replicas"] if entry["action"] == Action.NOTIFY.value]
        if not notified:
            return []
        policies = self._session.ask_weaver("policies", {})
        return [entry["replica"] for entry in notified if not _has_policy(entry["group"], policies)]


def _has_policy(group: str, policies: Mapping[str, str]) -> bool:
    return any(fnmatch.fnmatchcase(group, pattern) for pattern in policies)
