"""The weaver's persistent state: replicas, devices, policies, commands, events and history.

The next `Registry.commit` writes every change. A registry made from the same store has them all.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from loom.control.frame import pack_value
from loom.control.handshake import Device, ThreadletHello
from loom.errors import LimitReached, NotFound
from loom.weaver.commands import Commands, unknown
from loom.weaver.device_failures import DeviceReplicaMap, Policy
from loom.weaver.goodput.goodput import Goodput
from loom.weaver.replicas import Cause, Replica
from loom.weaver.runs.runs import UserRuns
from loom.weaver.states import LIVING, DeviceState, ReplicaState
from loom.weaver.storage.events import EventStore
from loom.weaver.storage.history import AGAIN, COMMITS, MetricHistory
from loom.weaver.storage.store import Commit, Store, journal_head, origin, read_origin
from loom.weaver.views import WeaverEvent
from loom.wings import Part

MAX_REPLICAS = 20_000
"""Replicas of one user that live."""

MAX_DESCRIPTION = 16 << 20
"""Bytes of one replica's configuration and handlers."""

MAX_DESCRIBED = 256 << 20
"""Bytes of those of all replicas of one user, ended ones included."""

LEAST_SAVED = 32
"""Replicas whose newest status one commit writes if it is due, at least."""

_STATUS_WRITTEN_EVERY = 60.0  # seconds between two writes of a device's status, if its health does not change


class Registry:
    """The replicas and devices, with their policies, commands, events and history, as far as they are in the store.

    It remembers ``keep_ended`` replicas that have ended, and ``keep_unused`` devices out of use on which no replica
    is. A status report is also written outside the journal after ``save_after`` seconds.
    """

    def __init__(
        self,
        store: Store,
        now: float,
        keep_ended: int = 10_000,
        keep_unused: int = 10_000,
        save_after: float = 60.0,
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.states: Counter[ReplicaState] = Counter()
        self.devices = DeviceReplicaMap()
        self.device_status: dict[str, Mapping[str, Any]] = {}
        self._status_written: dict[str, float] = {}  # when the status of each device was written last
        """The newest report on each device; not stored."""
        self.events = EventStore(store)
        self.history = MetricHistory(store)
        self.commands = Commands(store)
        self.runs = UserRuns(store, self.events, self.history, self.commands, self.replicas)
        self.policy = Policy()
        self.goodput = Goodput(store)
        self.watching = False
        """True if there are watchers, for whom `take_touched` will be called."""
        self.forgotten: dict[str, None] = {}
        """The ids of replicas that were forgotten, until they are taken out of this dict; kept while
        ``devices.watched``."""
        self.store = store
        self._keep_ended = keep_ended
        self._keep_unused = keep_unused
        self._save_after = save_after
        self._ended: dict[str, None] = {}  # the ids of the replicas that have ended, in the order of their ends
        self._unused: dict[str, str] = {}
        """The remembered devices without replicas, the first one first, each with its last replica's session."""
        self._forgotten: list[str] = []  # the ids of replicas whose history the next commit deletes
        self._changed: dict[Replica, None] = {}
        self._touched: dict[Replica, None] = {}
        self._touched_devices: dict[str, None] = {}
        self._unsaved: dict[Replica, tuple[int, float]] = {}
        """Replicas whose newest status is only in the journal: the first such row, and when it was written."""
        self._described: dict[str, int] = {}
        """Bytes of each replica's configuration and handlers."""
        self._described_bytes = 0
        self._in_procs: dict[tuple[str | None, str], dict[str, None]] = {}
        """The ids of the replicas in each proc mesh, by session and mesh."""
        self._written = now  # when the last commit was, by the weaver's clock
        saved = self._load()
        self.runs.load()
        self._replay(now, saved)
        self.alerts = Part.ALERTS.load()(self, now)
        self.events.heard = self._hear

    def _hear(self, event: WeaverEvent) -> None:
        self.runs.take(event)
        self.alerts.take(event)

    def replica(self, id: str) -> Replica:
        """Return a replica by its id, or by its short name; see `named`."""
        found = self.replicas.get(id) or named(id, self.replicas.values())
        if found is None:
            raise NotFound(unknown(id, self.replicas), code="unknown_replica")
        return found

    def in_procs(self, session: str | None, procs: str) -> list[Replica]:
        return [self.replicas[id] for id in self._in_procs.get((session, procs), ())]

    def add(self, id: str) -> Replica:
        """Add a replica. Raise `LimitReached` if `MAX_REPLICAS` of the user live."""
        if sum(self.states[state] for state in LIVING) >= MAX_REPLICAS:
            raise LimitReached(
                f"{MAX_REPLICAS} replicas of the user live, and there may be no more: end some of them"
            )
        replica = self.replicas[id] = Replica(id)
        self.states[replica.state] += 1
        self.forgotten.pop(id, None)
        return replica

    def check_description(self, id: str, config: Mapping[str, Any], handlers: Mapping[str, str]) -> int:
        """Return the bytes of a replica's description.

        Raises:
            LimitReached: they are more than `MAX_DESCRIPTION`, or with all others more than `MAX_DESCRIBED`.
        """
        size = len(pack_value([config, handlers]))
        if size > MAX_DESCRIPTION:
            raise LimitReached(
                f"the configuration and handlers of {id!r} have {size:,} bytes; {MAX_DESCRIPTION:,} are the most"
            )
        total = self._described_bytes - self._described.get(id, 0) + size
        if total > MAX_DESCRIBED:
            raise LimitReached(
                f"the configurations of the user's replicas would have {total:,} bytes with that of {id!r}; "
                f"{MAX_DESCRIBED:,} are the most: keep large values in files, and their paths in the configuration"
            )
        return size

    def set_description(
        self, replica: Replica, *, config: Mapping[str, Any] | None = None, handlers: dict[str, str] | None = None
    ) -> None:
        """Replace a replica's configuration, its handlers, or both. Raise `LimitReached` as `check_description`.

        The caller saves the replica, or has the values in the journal.
        """
        config = replica.config if config is None else config
        handlers = replica.handlers if handlers is None else handlers
        size = self.check_description(replica.id, config, handlers)
        self._described_bytes += size - self._described.get(replica.id, 0)
        self._described[replica.id] = size
        replica.config, replica.handlers = config, handlers

    def describe(self, replica: Replica, hello: ThreadletHello) -> None:
        self.set_description(replica, config=hello.config, handlers=hello.handlers)
        self._leave_procs(replica)
        replica.journal_head = journal_head(replica.id, origin(hello.instance, self.history.label(replica.id)))
        replica.group, replica.host, replica.pid = hello.group, hello.host, hello.pid
        replica.session, replica.procs, replica.rank = hello.session, hello.procs, hello.rank
        replica.mesh = hello.mesh
        replica.actors = hello.actors
        replica.injectable, replica.respawns = hello.injectable, hello.respawns
        replica.announced, replica.hears, replica.patient = hello.announced, hello.hears, hello.patient
        replica.offer(hello.offers)
        self._enter_procs(replica)
        self.register_devices(replica, hello.devices)

    def register_devices(self, replica: Replica, devices: Sequence[Device]) -> None:
        """Assign exactly these devices to a replica."""
        before = self.devices.devices_of(replica.id)
        there = [device.uuid for device in devices if device.uuid in self.devices]
        known = {device: self.devices.device(device) for device in there}
        self.devices.register(replica.id, devices)
        for device in devices:
            if known.get(device.uuid) != device:
                self.save_device(device.uuid)
        self._forget_unused(before, replica)
        self.save(replica)

    def move(
        self,
        replica: Replica,
        cause: Cause,
        now: float,
        by: int | None = None,
        about: Mapping[str, object] | None = None,
    ) -> int | None:
        """Apply a cause to a replica; return the id of the event that logs the new state, None if there is none.

        ``by`` is the event that led to it; ``about`` is further data for the event.
        """
        before = replica.move(cause, now)
        if before is None:
            return None
        after = replica.state
        self.states[before] -= 1
        self.states[after] += 1
        self._ended.pop(replica.id, None)
        if after is ReplicaState.RUNNING:
            replica.progress = now
        elif after is ReplicaState.PAUSED:
            replica.paused_at = replica.step
        elif after not in LIVING:
            self._ended[replica.id] = None
        self.runs.moved(replica, now)
        self.save(replica)
        data = {"from": before.value, "why": cause.value, "cause": by, **(about or {})}
        return self.events.append(now, after.value, replica.id, **data).id

    def save(self, replica: Replica) -> None:
        """Write a replica with the next commit, in the state that it has then."""
        self._changed[replica] = None
        self.touch(replica)

    def touch(self, replica: Replica) -> None:
        """Include a replica in the next push to watchers."""
        if self.watching:
            self._touched[replica] = None

    def keep_reports(self, replica: Replica, rows: bytes, now: float) -> None:
        """Write the packed list of a replica's status reports, which are applied already, into the journal."""
        self.store.log(replica.journal_head + rows)
        if not replica.unsaved:
            replica.unsaved = True
            self._unsaved[replica] = self.store.journal_id, now
        if self.watching:
            self._touched[replica] = None

    def keep_config(self, replica: Replica, values: Mapping[str, Any], now: float) -> None:
        """Set values of a replica's configuration that no report tells of, and write them into the journal.

        Raises:
            LimitReached: as `check_description`; nothing was set.
        """
        self.set_description(replica, config={**replica.config, **values})
        self.keep_reports(replica, pack_value([[replica.seq, now, None, None, None, {}, values]]), now)

    @property
    def journal_id(self) -> int:
        """The id of the journal row for the reports taken before the next commit."""
        return self.store.journal_id

    def forget_surplus(self) -> None:
        """Forget the replicas that ended first, if more than ``keep_ended`` have ended."""
        while len(self._ended) > self._keep_ended:
            self._forget(self.replicas[next(iter(self._ended))])

    def set_device_status(self, device: str, status: Mapping[str, Any]) -> None:
        """Set the newest status of a device, if a replica has registered it.

        Its health is written with the next commit, its use once in `_STATUS_WRITTEN_EVERY`.
        """
        if device in self.devices:
            before = self.device_status.get(device, {})
            self.device_status[device] = status
            written = self._status_written.get(device, -math.inf)
            changed = _health(status) != _health(before)
            if changed:
                self.alerts.device_changed(device)
            if changed or status["time"] >= written + _STATUS_WRITTEN_EVERY:
                self._status_written[device] = status["time"]
                self.save_device(device)
            if self.watching:
                self._touched_devices[device] = None

    def take_touched(self) -> tuple[list[Replica], list[str]]:
        """Return the replicas and the uuids of devices with frequent changes since the last call."""
        touched = list(self._touched), list(self._touched_devices)
        self._touched.clear()
        self._touched_devices.clear()
        return touched

    def changes_of(self, replicas: Iterable[Replica]) -> Mapping[str, Mapping[str, object]]:
        """Return what changes often of the replicas that were not forgotten, by id."""
        there = self.replicas
        return {one.id: one.changing() for one in replicas if there.get(one.id) is one}

    def statuses_of(self, devices: Iterable[str]) -> Mapping[str, Mapping[str, object]]:
        """Return the statuses of the devices that were not forgotten, by uuid."""
        return {uuid: self.device_status[uuid] for uuid in devices if uuid in self.device_status}

    def save_device(self, device: str) -> None:
        known = self.devices.device(device).to_body()
        state, reason = self.devices.state(device).value, self.devices.reason(device)
        status, left_by = self.device_status.get(device), self.devices.left_by(device)
        kept = {"device": known, "state": state, "reason": reason, "status": status, "left_by": left_by}
        kept["session"] = self._unused.get(device)
        self.store.put("devices", device, kept)

    def drain(self, replica: Replica) -> None:
        self._forget_unused(self.devices.drain(replica.id), replica)
        self.save(replica)

    def set_policy(self, group: str, action: str, by: str, now: float) -> None:
        chosen = self.policy.set(group, action)
        self.store.put("policies", group, {"action": chosen.value, "time": now})
        self.events.append(now, "policy", None, group=group, action=chosen.value, by=by)

    def begin_commit(self, now: float) -> tuple[Commit | None, list[WeaverEvent]]:
        """Return what has to be written, None if nothing, with the events that are new or were amended.

        The commit before it has to be stored.
        """
        for replica in self._changed:
            self._put(replica)
        self._changed.clear()
        most = max(LEAST_SAVED, len(self._unsaved) // COMMITS)
        for replica, (_, since) in list(islice(self._unsaved.items(), most)):
            if since > now - self._save_after:
                break
            self._put(replica)
        self.goodput.save(now)
        self.runs.settle(now)
        self.alerts.settle(now)
        # Without changes, one commit each second still writes due points and makes old history coarser.
        if not (
            self.store.pending
            or self.events.pending
            or self._forgotten
            or self.runs.pending
            or self.alerts.pending
            or now >= self._written + 1.0
        ):
            return None, []
        self._written = now
        commit = self.store.begin()
        events = self.events.write(commit)
        for id in self._forgotten:
            self.history.forget(commit, id, lambda run: self.runs.get(run) is not None)
        self._forgotten.clear()
        self.runs.write(commit)
        self.alerts.write(commit)
        needed = self.history.write(commit, now)
        unsaved = next(iter(self._unsaved.values()), (needed, 0.0))[0]
        # The journal rows that are no longer needed.
        self.runs.needed = min(needed, unsaved)
        commit.execute("DELETE FROM journal WHERE id < ?", self.runs.needed)
        return commit, events

    @property
    def settled(self) -> bool:
        """True if nothing happens here by itself: no replica lives, and everything is stored where it stays."""
        waits = self._changed or self._unsaved or self._forgotten or self.store.pending or self.events.pending
        waits = waits or self.runs.pending
        lives = any(self.states[state] for state in LIVING)
        return not (waits or lives) and self.history.settled and self.goodput.settled and self.alerts.settled

    def _put(self, replica: Replica) -> None:
        self._unsaved.pop(replica, None)
        replica.unsaved = False
        self.runs.save_summary(replica)
        # The journal has no values of the configuration up to this row that are newer.
        stored = {**replica.to_dict(), "journal": self.store.last_row}
        stored["devices"] = self.devices.devices_of(replica.id)
        self.store.put("replicas", replica.id, stored)

    def _forget(self, replica: Replica) -> None:
        self.runs.forgotten(replica)
        del self.replicas[replica.id]
        del self._ended[replica.id]
        self.states[replica.state] -= 1
        self._described_bytes -= self._described.pop(replica.id, 0)
        self._leave_procs(replica)
        self._forget_unused(self.devices.drain(replica.id), replica)
        for known in (self._changed, self._unsaved, self._touched):
            known.pop(replica, None)
        self.store.drop("replicas", replica.id)
        self._forgotten.append(replica.id)
        if self.devices.watched:
            self.forgotten[replica.id] = None

    def _forget_unused(self, devices: Iterable[str], left: Replica) -> None:
        """Forget the active devices that no replica uses. Failed and inactive ones are remembered.

        Args:
            left: the replica that was on the devices.
        """
        for device in devices:
            if not self.devices.replicas_of(device):
                if self.devices.state(device) is DeviceState.ACTIVE:
                    self._forget_device(device)
                else:
                    self._unused.pop(device, None)
                    self._unused[device] = left.session or ""
                    self.save_device(device)
        if len(self._unused) > self._keep_unused:
            self._forget_surplus_devices()

    def _forget_surplus_devices(self) -> None:
        """Forget unused devices: the first ones of the session that has left the most of them.

        So no session can have the devices of another forgotten.
        """
        self._unused = {one: of for one, of in self._unused.items() if not self.devices.replicas_of(one)}
        of_session: dict[str, deque[str]] = defaultdict(deque)
        for device, session in self._unused.items():
            of_session[session].append(device)
        for _ in range(len(self._unused) - self._keep_unused):
            self._forget_device(max(of_session.values(), key=len).popleft())

    def _forget_device(self, device: str) -> None:
        self.devices.forget(device)
        self._unused.pop(device, None)
        self.device_status.pop(device, None)
        self._status_written.pop(device, None)
        self.store.drop("devices", device)

    def _enter_procs(self, replica: Replica) -> None:
        if replica.procs is not None:
            self._in_procs.setdefault((replica.session, replica.procs), {})[replica.id] = None

    def _leave_procs(self, replica: Replica) -> None:
        if replica.procs is not None:
            there = self._in_procs.get((replica.session, replica.procs), {})
            there.pop(replica.id, None)
            if not there:
                self._in_procs.pop((replica.session, replica.procs), None)

    def _load(self) -> Mapping[str, float]:
        """Load what is stored; return, by replica, the row of the journal up to which it has its configuration."""
        saved: dict[str, float] = {}
        for uuid, stored in self.store.rows("devices"):
            device, state = Device(**stored["device"]), DeviceState(stored["state"])
            self.devices.restore(device, state, stored["reason"], stored.get("left_by", ()))
            if stored.get("status") is not None:  # an older Loom stored none
                self.device_status[uuid] = stored["status"]
            if (session := stored.get("session")) is not None:
                self._unused[uuid] = session
        for id, stored in self.store.rows("replicas"):
            replica = self.replicas[id] = Replica.from_dict(stored)
            saved[id] = stored.get("journal", math.inf)  # an older Loom stored each change at once
            for device in stored["devices"]:
                self.devices.add(id, self.devices.device(device))
            self._described[id] = len(pack_value([replica.config, replica.handlers]))
            self._enter_procs(replica)
            self.states[replica.state] += 1
        self._described_bytes = sum(self._described.values())
        ended = [replica for replica in self.replicas.values() if replica.state not in LIVING]
        self._ended = {replica.id: None for replica in sorted(ended, key=lambda replica: replica.changed)}
        for group, stored in sorted(self.store.rows("policies"), key=lambda row: row[1]["time"]):
            self.policy.set(group, stored["action"])
        return saved

    def _replay(self, now: float, saved: Mapping[str, float]) -> None:
        """Apply the status reports of the journal that are not stored elsewhere yet."""
        for row, entries in self.store.journal():
            for id, of, reports in entries:
                replica, (instance, label) = self.replicas.get(id), read_origin(of)
                for report in reports:
                    seq, time, step, epoch, max_step, metrics, config, *about = report
                    self.history.record_again(id, label, row, time, step, metrics)
                    if replica is None:
                        continue
                    if label.partition(AGAIN)[0] == replica.run:
                        self.runs.summarize(replica, step, metrics)
                    if replica.instance != instance:
                        continue
                    is_known = not config or row <= saved[id]
                    if not is_known:
                        self.set_description(replica, config={**replica.config, **config})
                    if seq > replica.seq:
                        replica.seq, replica.reported = seq, time
                        replica.step = replica.step if step is None else step
                        replica.epoch = replica.epoch if epoch is None else epoch
                        replica.max_step = replica.max_step if max_step is None else max_step
                        replica.metrics.update(metrics)
                        replica.status_type = about[0] if about else replica.status_type
                        is_known = False
                    if not (is_known or replica.unsaved):
                        replica.unsaved = True
                        self._unsaved[replica] = row, now


def named(name: str, replicas: Iterable[Replica]) -> Replica | None:
    """Return the replica that has a short name: the only living one, or if none lives, the one that ended last."""
    found = [one for one in replicas if one.short_name == name]
    living = [one for one in found if one.state in LIVING]
    if living:
        return living[0] if len(living) == 1 else None
    return max(found, key=lambda one: one.changed, default=None)


def _health(status: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the part of a device's status that concerns its health."""
    get = status.get
    return get("error"), get("xid"), get("ecc_uncorrected"), get("throttled")
