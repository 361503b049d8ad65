"""`Pushes`: what watchers of a user's weaver are sent, packed once for all of them.

The weaver's event loop has much else to do. So the changes of thousands of replicas are pushed in parts, and a
snapshot is packed in turns. A push to a watch whose snapshot is being packed waits until that was sent.

Full watchers get more than the reports and events of every watcher: policies, goodput, the newest events, devices'
states, replicas' handlers and descriptions, and the ids of replicas that were forgotten. So a page fetches nothing
again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgpack

from loom.control.frame import pack_value
from loom.control.operations import GetEvents, GetPolicies, GetStatus
from loom.process import tasks
from loom.process.tasks import OwnedTasks, Turns
from loom.weaver.replicas import Replica
from loom.weaver.server.handlers import RequestHandler
from loom.weaver.views import WeaverEvent, to_json
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
        """Replicas with descriptions that were not pushed yet."""
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

    def snapshot(self, now: float) -> Mapping[str, object]:
        """Return the further part of a snapshot."""
        return {
            "policies": self._policies_now(),
            "goodput": self._goodput(self._known.goodput.jobs(), now),
            "events": to_json(self._requests.do(GetEvents(limit=NEWEST_EVENTS))),
        }

    def event(self, event: WeaverEvent) -> Mapping[str, object]:
        """Return the further part of an event: its replica, if the event describes the replica anew."""
        replica = self._known.replicas.get(event.replica or "")
        if replica is None or event.kind not in _DESCRIBING:
            return {}
        return {"info": self._requests.info(replica)}

    def describe(self, replicas: Collection[Replica]) -> None:
        """Note replicas that have new handlers, links or ranks."""
        if self._wanted:
            self._described.update(dict.fromkeys(replicas))

    def changes(self, now: float) -> Mapping[str, object]:
        """Return what has changed since the last call."""
        changes: dict[str, object] = {}
        if self._described:
            changes["replicas"] = {replica.id: replica.described() for replica in self._described}
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
        policies: dict[str, str] = self._requests.do(GetPolicies())
        return policies

    def _device(self, uuid: str) -> Mapping[str, object] | None:
        """Return a device without its status; None for one that was forgotten."""
        if uuid not in self._known.devices:
            return None
        device = self._requests.device(self._known.devices.device(uuid)).to_body()
        return {name: value for name, value in device.items() if name != "status"}

    def _goodput(self, jobs: Collection[str], now: float) -> list[Mapping[str, object]]:
        kept = self._known.goodput
        records = (kept.record(job, now, course=False, faults=NEWEST_FAULTS) for job in jobs)
        return [{**record.to_body(), "user": self._user} for record in records]


CHANGES_EVERY = 0.5
"""Seconds between two pushes of replicas' reports to watchers."""

MAX_CHANGES = 250
"""Replicas, and devices, in one push, so that no watcher is busy with it for more than some milliseconds."""

T = TypeVar("T")


class Watcher(Protocol):
    """A connection that watches."""

    def begin(self, number: int, snapshot: bytes) -> None:
        """Send the packed snapshot of the watch with a number."""

    def push(self, number: int, update: bytes) -> None:
        """Send a packed update for the watch with a number; disconnect a watcher that does not read."""


@dataclass
class _Watch:
    """One watch."""

    full: bool
    packing: int = 0
    """Snapshots that are being packed."""
    held: list[bytes] = field(default_factory=list)
    """Updates that follow the last of them."""


class Pushes:
    """The watches of one user's weaver."""

    def __init__(self, weaver: Weaver, requests: RequestHandler, tasks: OwnedTasks) -> None:
        self._weaver = weaver
        self._requests = requests
        self._tasks = tasks
        self._further = FullWatch(requests.user, weaver, requests)
        self._watches: dict[tuple[Watcher, int], _Watch] = {}
        """The watches, by watcher and number."""
        self._changes_pushed = 0.0
        self._pushing = False
        """True if a part of the changes is to be pushed in the next turn."""

    def __bool__(self) -> bool:
        return bool(self._watches)

    def watch(self, watcher: Watcher, number: int, full: bool, now: float) -> None:
        """Send a watcher the state up to now, and push every change from then on.

        A ``full`` watch also has what `FullWatch` adds, as ``more`` in the snapshot and in each push.
        """
        watch = self._watches.setdefault((watcher, number), _Watch(full))
        watch.full = full
        watch.packing += 1
        self._weaver.known.watching = True
        if full:
            self._further.begin(now)
        more = self._further.snapshot(now) if full else None
        self._tasks.add(
            tasks.run_to_end("send a snapshot", lambda: self._send_snapshot(watcher, number, watch, more))
        )

    def unwatch(self, watcher: Watcher) -> None:
        for key in [key for key in self._watches if key[0] is watcher]:
            del self._watches[key]
        self._weaver.known.watching = bool(self._watches)
        if not self._has_full:
            self._further.end()

    def tick(self, now: float) -> None:
        """Push the frequent changes if it is time."""
        if self._watches and now >= self._changes_pushed + CHANGES_EVERY and not self._pushing:
            self._changes_pushed = now
            self._pushing = True
            replicas, devices = self._weaver.known.take_touched()
            self._push_parts(iter(replicas), iter(devices))

    def tell(self, events: Collection[WeaverEvent], described: Collection[Replica]) -> None:
        """Push events, and note replicas that are described anew."""
        if self._watches:
            full = self._has_full
            self._further.describe(described)
            for event in events:
                self._push({"event": event.to_body()}, self._further.event(event) if full else {})

    def _push_parts(self, replicas: Iterator[Replica], devices: Iterator[str]) -> None:
        """Push some of the changes now, and the others in the next turns of the event loop."""
        known = self._weaver.known
        few, some = list(itertools.islice(replicas, MAX_CHANGES)), list(itertools.islice(devices, MAX_CHANGES))
        part = {"replicas": known.changes_of(few), "devices": known.statuses_of(some)}
        if max(len(few), len(some)) == MAX_CHANGES:
            self._push({"changes": part}, {})
            asyncio.get_running_loop().call_soon(self._push_parts, replicas, devices)
            return
        self._pushing = False
        further = self._further.changes(self._changes_pushed) if self._has_full else {}
        if any(part.values()) or further:
            self._push({"changes": part}, further)

    @property
    def _has_full(self) -> bool:
        return any(watch.full for watch in self._watches.values())

    def _push(self, update: Mapping[str, object], further: Mapping[str, object]) -> None:
        """Push an update to all watchers, and its further part to full ones."""
        packed: dict[bool, bytes] = {}
        for (watcher, number), watch in list(self._watches.items()):
            more = watch.full and bool(further)
            if more not in packed:
                packed[more] = pack_value({**update, "more": further} if more else update)
            if watch.packing:
                watch.held.append(packed[more])
            else:
                watcher.push(number, packed[more])

    async def _send_snapshot(
        self, watcher: Watcher, number: int, watch: _Watch, more: Mapping[str, object] | None
    ) -> None:
        snapshot = await packed_snapshot(self._requests, more)
        watch.packing -= 1
        if self._watches.get((watcher, number)) is not watch:  # it has gone meanwhile
            return
        watcher.begin(number, snapshot)
        if not watch.packing:
            held, watch.held = watch.held, []
            for update in held:
                watcher.push(number, update)


async def packed_snapshot(requests: RequestHandler, more: Mapping[str, object] | None) -> bytes:
    """Return the current state, packed, with a part ``more`` if that is given.

    Changes of the meantime may be in it or not. So each push from the call on has to follow it.
    """
    turns, packer = Turns(), msgpack.Packer()

    async def packed(items: Iterable[T], body: Callable[[T], Mapping[str, object] | None]) -> list[bytes]:
        found = []
        for item in items:
            if (of_item := body(item)) is not None:
                found.append(pack_value(of_item))
                await turns.rest()
        return [packer.pack_array_header(len(found)), *found]

    pieces = [packer.pack_map_header(3 if more is None else 4)]
    pieces += [pack_value("status"), pack_value(requests.do(GetStatus()).to_body())]
    if more is not None:
        pieces += [pack_value("more"), pack_value(more)]
    pieces += [pack_value("replicas"), *await packed(requests.replicas, requests.info_of_known)]
    pieces += [pack_value("devices"), *await packed(requests.devices, requests.device_of_known)]
    return b"".join(pieces)
