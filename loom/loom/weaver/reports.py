"""The reports of replicas: status, heartbeats, time accounts, handlers, devices, drains, and removed faults."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loom.control.commands import FaultRemoved
from loom.control.frame import MAX_COUNT, MAX_NAME, Frame, pack_value
from loom.control.handshake import Handlers, Offers
from loom.control.reports import (
    MAX_KEPT_REPORTS,
    AccountPause,
    DeviceReport,
    Draining,
    Heartbeat,
    Phase,
    Registration,
    Row,
    StatusReports,
    Stored,
    TimeAccount,
)
from loom.errors import ProtocolMismatch
from loom.weaver.commit_output import Outbox
from loom.weaver.persistent_state import Registry
from loom.weaver.replicas import Cause, Replica
from loom.weaver.states import ReplicaState

_STORED_AFTER = 0.25
"""Seconds from a report to the `Stored` frame for it: few, for a threadlet that ends, but enough to cover several.

Each threadlet has its own time, because a burst to thousands at once would delay commands.
"""

MAX_STORED_AFTER = {True: 5.0, False: 1.1}
"""The same if thousands report, so that a frame covers several of the reports that come once a second.

A threadlet that is not patient waits for `loom.threadlet.threadlet.CLOSE_TIMEOUT` when it ends, which is longer.
"""

FEW_UNACKNOWLEDGED = 2000
"""Replicas that wait for a `Stored` frame at once, per second of the time until they get it."""

_MANY_UNSTORED = MAX_KEPT_REPORTS // 8
"""Reports after which a replica gets a `Stored` frame with the next commit."""

_STEPS_MATTER = frozenset((ReplicaState.REGISTERING, ReplicaState.STALLED, ReplicaState.PAUSED))


Taker = Callable[[Replica, Any, float], None]
"""Takes a frame of one kind from a replica's threadlet, at a time."""

BodyTaker = Callable[[Replica, Sequence[Any], bytes, float], None]
"""Takes a frame as a list that was not checked, and the bytes of it."""

_STATUS = pack_value([StatusReports.KIND, None])[:-1]
"""The bytes of a frame with status reports before their list."""


def reading(kind: type[Frame], take: Taker) -> BodyTaker:
    """Return the taker of the lists that are frames of a kind."""
    read = kind.from_body
    return lambda replica, body, packed, now: take(replica, read(body), now)


class Reports:
    """The part of the weaver that takes reports."""

    def __init__(self, known: Registry, outbox: Outbox) -> None:
        self._known = known
        self._outbox = outbox
        self.taken = 0
        self.holds_back = False
        """True if status reports are left to the threadlets, because there is no room for them here."""
        self.held: set[Replica] = set()
        """The replicas that have sent status reports meanwhile. They send them again on their next connection."""
        self._unacknowledged: dict[bool, deque[tuple[Replica, float]]] = {True: deque(), False: deque()}
        """Replicas by whether they are patient, and when each sent its first report that no `Stored` covers yet."""
        self._many: list[Replica] = []
        """Replicas that get a `Stored` frame at once."""
        self.frequent: dict[str, BodyTaker] = {
            StatusReports.KIND: self._status,
            Heartbeat.KIND: self._beat,
        }
        """The takers, by kind, of frames so frequent that an object for each costs too much."""
        self.takers: dict[type[Frame], Taker] = {
            DeviceReport: self._device_status,
            TimeAccount: self._time_account,
            Handlers: self._handlers,
            Offers: self._offers,
            Registration: self._register,
            Draining: self._draining,
            FaultRemoved: lambda replica, fault, now: self.note_removed(
                replica, fault.injection, fault.evidence, now
            ),
        }

    def release(self) -> list[Replica]:
        """Take status reports again; return the replicas whose reports were left to the threadlets."""
        self.holds_back, held = False, list(self.held)
        return held

    def tell_stored(self, now: float) -> None:
        """Send threadlets, after a commit, the number of their last stored report."""
        due, self._many = self._many, []
        for patient, waiting in self._unacknowledged.items():
            after = max(_STORED_AFTER, min(len(waiting) / FEW_UNACKNOWLEDGED, MAX_STORED_AFTER[patient]))
            while waiting and waiting[0][1] <= now - after:
                due.append(waiting.popleft()[0])
        for replica in due:
            replica.unstored = 0
            if replica.link is not None:
                self._outbox.send(replica, Stored(replica.seq))

    def _status(self, replica: Replica, body: Sequence[Any], packed: bytes, now: float) -> None:
        reports = StatusReports.read(body)
        if self.holds_back or replica in self.held:  # a later report would count as the acknowledgement of these
            self.held.add(replica)
            return
        before = replica.seq
        try:
            self._take_reports(replica, reports, now)
        except (TypeError, ValueError) as error:
            raise StatusReports.mismatch(body) from error
        finally:
            # If a report is refused, those before it still count.
            if replica.seq > before:
                self._keep_reports(replica, reports, packed, before, now)

    def _keep_reports(self, replica: Replica, reports: list[Row], packed: bytes, before: int, now: float) -> None:
        """Keep the reports that are new and were taken, in the bytes in which they came if these are all."""
        whole = packed.startswith(_STATUS)  # or the frame's kind was packed in an unusual way
        # The only one of a frame is new and was taken, or the replica would be no further than before.
        if len(reports) > 1 and (_number(reports[0]) <= before or _number(reports[-1]) != replica.seq):
            taken = itertools.takewhile(lambda report: _number(report) <= replica.seq, reports)
            reports = [report for report in taken if report[0] > before]
            whole = False
        rows = packed[len(_STATUS) :] if whole else pack_value(reports)
        replica.reported = reports[-1][1]
        self.taken += len(reports)
        if not replica.unstored:
            self._unacknowledged[replica.patient].append((replica, now))
        replica.unstored += len(reports)
        if replica.unstored >= _MANY_UNSTORED:
            self._many.append(replica)
            replica.unstored = 0
        self._known.keep_reports(replica, rows, now)

    def _take_reports(self, replica: Replica, reports: list[Row], now: float) -> None:
        record, row, id = self._known.history.record, self._known.journal_id, replica.id
        runs = self._known.runs
        for report in reports:
            seq, time, step, epoch, max_step, metrics, config, *about = report
            if type(seq) is not int or seq >= MAX_COUNT:
                raise ProtocolMismatch(f"a status report has a number, not {seq!r:.40}")
            if seq <= replica.seq:
                continue
            if type(time) is not float or type(metrics) is not dict or not (config is None or type(config) is dict):
                raise ProtocolMismatch(f"not a status report: {[seq, time, step, metrics, config]!r:.80}")
            if epoch is not None:
                replica.epoch = _count("epoch", epoch)
            if max_step is not None:
                replica.max_step = _count("max_step", max_step)
            if step is not None:
                moved = replica.take_step(_count("step", step), time, now)
                if moved and replica.state in _STEPS_MATTER:
                    self._known.move(replica, Cause.STEPPED, now)
            if metrics:
                record(id, row, time, step, metrics)
                replica.metrics.update(metrics)
                if id in runs.leads:
                    runs.summarize(replica, step, metrics)
            if config:
                self._report_config(replica, config, now)
            if about:
                replica.status_type = _status_type(*about)
            replica.seq = seq

    def _report_config(self, replica: Replica, config: Mapping[str, Any], now: float) -> None:
        changes = {
            key: {"old": replica.config.get(key), "new": value}
            for key, value in config.items()
            if key not in replica.config or replica.config[key] != value
        }
        if changes:
            self._known.set_description(replica, config={**replica.config, **config})
            self._known.events.append(now, "config", replica.id, changes=changes, step=replica.step)

    def _beat(self, replica: Replica, body: Sequence[Any], packed: bytes, now: float) -> None:
        time, step, phase = Heartbeat.read(body)
        changed = phase != replica.phase
        if changed:
            replica.phase = phase.value
        if step is not None and replica.take_step(step, time, now):
            changed = True
            self._known.move(replica, Cause.STEPPED, now)
        if phase is Phase.PAUSED:
            self._known.move(replica, Cause.PAUSED, now)
        if changed:
            self._known.touch(replica)

    def _time_account(self, replica: Replica, account: TimeAccount, now: float) -> None:
        self._known.goodput.account(replica.job, replica.id, account, now)
        if replica.patient and (pause := self._known.goodput.account_pause) != replica.account_pause:
            replica.account_pause = pause
            self._outbox.send(replica, AccountPause(pause))

    def _handlers(self, replica: Replica, handlers: Handlers, now: float) -> None:
        self._known.set_description(replica, handlers={**replica.handlers, **handlers.types})
        self._known.save(replica)
        self._outbox.output.described.append(replica)

    def _offers(self, replica: Replica, offers: Offers, now: float) -> None:
        replica.offer(offers)
        self._known.save(replica)
        self._outbox.output.described.append(replica)

    def _register(self, replica: Replica, registered: Registration, now: float) -> None:
        before = set(self._known.devices.devices_of(replica.id))
        self._known.register_devices(replica, registered.devices)
        uuids = {device.uuid for device in registered.devices}
        changes = {"added": sorted(uuids - before), "removed": sorted(before - uuids)}
        if uuids != before:
            self._known.events.append(now, "devices_changed", replica.id, **changes)
            self._outbox.urgent = True

    def _draining(self, replica: Replica, draining: Draining, now: float) -> None:
        about = {"by": replica.id, "reason": draining.reason}
        self._known.move(replica, Cause.DRAINED, now, about=about)
        self._outbox.urgent = True

    def _device_status(self, replica: Replica, report: DeviceReport, now: float) -> None:
        for device, status in report.devices.items():
            self._known.set_device_status(device, {**status, "time": now, "by": replica.id})

    def note_removed(self, replica: Replica, injection: str, evidence: Mapping[str, Any], now: float) -> None:
        """Log that a fault is gone, unless it is logged already: each hello repeats it."""
        command = self._known.commands.get(injection)
        cause = None if command is None else command.event
        logged = self._known.events.after(cause or 0, MAX_COUNT, replica.id, "fault_removed")
        if any(event.data["injection"] == injection for event in logged):
            return
        about = {"injection": injection, "evidence": evidence, "cause": cause}
        self._known.events.append(now, "fault_removed", replica.id, **about)
        self._outbox.urgent = True


def _number(report: Any) -> int:
    """Return the number of a status report, or one above all others if it has none."""
    return report[0] if type(report) is list and report and type(report[0]) is int else MAX_COUNT


def _status_type(value: Any) -> str | None:
    if value is not None and (type(value) is not str or len(value) > MAX_NAME):
        raise ProtocolMismatch(f"what a status is about is a text of {MAX_NAME} characters, not {value!r:.80}")
    return value


def _count(field_name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise ProtocolMismatch(f"{field_name} is a count or None, not {value!r:.80}")
    return value
