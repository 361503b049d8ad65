"""The event log: everything that happened, with its cause."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import msgpack

from loom.weaver.storage.store import Commit, Store
from loom.weaver.views import WeaverEvent


class EventStore:
    """The events in the store's file. If there are more than ``keep``, the oldest are dropped."""

    def __init__(self, store: Store, keep: int = 200_000) -> None:
        self._db = db = store.reader
        self._keep = keep
        (self.last,) = db.execute("SELECT COALESCE(MAX(id), 0) FROM events").fetchone()
        (first,) = db.execute("SELECT COALESCE(MIN(id), 1) FROM events").fetchone()
        self._first: int = first
        # A weaver that starts after the machine's clock was set back goes on with earlier times.
        times = "SELECT time, LAG(time) OVER (ORDER BY id) AS before FROM events"
        (goes_back,) = db.execute(f"SELECT EXISTS (SELECT 1 FROM ({times}) WHERE time < before)").fetchone()
        self._grows = not goes_back  # whether times grow with ids
        self._newest = self._time(self.last)
        self.heard: Callable[[WeaverEvent], object] = lambda event: None
        """Called with each new event."""
        self._new: list[WeaverEvent] = []
        self._amended: dict[int, WeaverEvent] = {}
        self._written: list[WeaverEvent] = []
        """The events of a commit that is not stored yet."""
        self._written_amended: dict[int, WeaverEvent] = {}

    @property
    def pending(self) -> bool:
        return bool(self._new or self._amended)

    def append(self, time: float, kind: str, replica: str | None = None, **data: Any) -> WeaverEvent:
        return self.add(time, kind, replica, data)

    def add(self, time: float, kind: str, replica: str | None, data: Mapping[str, Any]) -> WeaverEvent:
        """Append an event with data that thousands may share, and nobody changes."""
        self.last += 1
        self._grows = self._grows and time >= self._newest
        self._newest = time
        event = WeaverEvent(self.last, time, kind, replica, data)
        self._new.append(event)
        self.heard(event)
        return event

    def amend(self, id: int, **data: Any) -> WeaverEvent | None:
        """Add data to an event and return it; return None if the event is too old to be in the log."""
        found = self.after(id - 1, 1)
        if not found or found[0].id != id:
            return None
        event = replace(found[0], data={**found[0].data, **data})
        if self._new and id >= self._new[0].id:
            self._new[id - self._new[0].id] = event
        else:
            self._amended[id] = event
        return event

    def after(
        self,
        id: int,
        limit: int,
        replica: str | None = None,
        kind: str | None = None,
        newest: bool = False,
        among: Collection[str] | None = None,
        since: float = -math.inf,
        until: float = math.inf,
    ) -> list[WeaverEvent]:
        """Return at most ``limit`` events after an id, the oldest first: the first ones, or the ``newest``.

        Args:
            since, until: only events between these times, in seconds since the epoch.
            among: only events about one of these replicas; None: any, and those about none.
        """
        ids = None if among is None else json.dumps(list(among))
        in_memory = [*self._written, *self._new]  # some of them may be stored by now
        upto = in_memory[0].id if in_memory else self.last + 1
        stored = range(self._first, upto)
        after, before = id, upto
        wanted: list[tuple[str, Any]] = []
        if self._grows:
            after = max(id, self._first_at(since, stored) - 1)
            before = min(upto, self._first_at(math.nextafter(until, math.inf), stored))
        else:
            wanted = [("time >= ?", since), ("time <= ?", until)]
        wanted += [("id > ?", after), ("id < ?", before), ("replica = ?", replica), ("kind = ?", kind)]
        wanted.append(("replica IN (SELECT value FROM json_each(?))", ids))
        clauses = [(clause, value) for clause, value in wanted if value is not None]
        where = " AND ".join(clause for clause, _ in clauses)
        order = "DESC" if newest else "ASC"
        rows = self._db.execute(
            f"SELECT id, time, kind, replica, data FROM events WHERE {where} ORDER BY id {order} LIMIT ?",
            (*(value for _, value in clauses), limit),
        )
        found = [WeaverEvent(row[0], row[1], row[2], row[3], msgpack.unpackb(row[4])) for row in rows]
        if newest:
            found.reverse()
        found += [
            event
            for event in in_memory
            if event.id > id
            and replica in (None, event.replica)
            and kind in (None, event.kind)
            and (among is None or event.replica in among)
            and since <= event.time <= until
        ]
        amended = {**self._written_amended, **self._amended}
        found = [amended.get(event.id, event) for event in found]
        return found[-limit:] if newest else found[:limit]

    def _first_at(self, time: float, stored: range) -> int:
        """Return the id of the first stored event at a time or later, if times grow with ids."""
        if math.isinf(time):
            return stored.start if time < 0 else stored.stop
        return stored.start + bisect.bisect_left(stored, time, key=self._time)

    def _time(self, id: int) -> float:
        row = self._db.execute("SELECT time FROM events WHERE id = ?", (id,)).fetchone()
        return -math.inf if row is None else float(row[0])

    def write(self, commit: Commit) -> list[WeaverEvent]:
        """Add the new and amended events to a commit, and return them. The commit before it has to be stored."""
        self._written, self._new = self._new, []
        self._written_amended, self._amended = self._amended, {}
        new, amended = self._written, self._written_amended
        shared = {id(one.data): one.data for one in new}
        packed = {at: msgpack.packb(data) for at, data in shared.items()}
        commit.insert("events", [(one.id, one.time, one.kind, one.replica, packed[id(one.data)]) for one in new])
        for event in amended.values():
            commit.execute("UPDATE events SET data = ? WHERE id = ?", msgpack.packb(event.data), event.id)
        if self.last - self._first >= self._keep + self._keep // 100:
            self._first = self.last - self._keep + 1
            commit.execute("DELETE FROM events WHERE id < ?", self._first)
        commit.when_stored(self._forget_written)
        return [*new, *amended.values()]

    def _forget_written(self) -> None:
        self._written, self._written_amended = [], {}
