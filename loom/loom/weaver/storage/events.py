"""The event log: everything that happened, with its cause."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection
from typing import Any

import msgpack

from loom.weaver.views import WeaverEvent


class EventStore:
    """The events in the store's file. If there are more than ``keep``, the oldest are dropped."""

    def __init__(self, db: sqlite3.Connection, keep: int = 200_000) -> None:
        self._db = db
        self._keep = keep
        (self.last,) = db.execute("SELECT COALESCE(MAX(id), 0) FROM events").fetchone()
        (first,) = db.execute("SELECT COALESCE(MIN(id), 1) FROM events").fetchone()
        self._first: int = first
        self._new: list[WeaverEvent] = []
        self._amended: list[WeaverEvent] = []

    @property
    def pending(self) -> bool:
        return bool(self._new or self._amended)

    def append(self, time: float, kind: str, replica: str | None = None, **data: Any) -> WeaverEvent:
        self.last += 1
        event = WeaverEvent(self.last, time, kind, replica, data)
        self._new.append(event)
        return event

    def amend(self, id: int, **data: Any) -> WeaverEvent | None:
        """Add data to an event and return it; return None if the event is too old to be in the log."""
        found = self.after(id - 1, 1)
        if not found or found[0].id != id:
            return None
        event = found[0]
        event.data.update(data)
        if event not in self._new:
            self._amended.append(event)
        return event

    def after(
        self,
        id: int,
        limit: int,
        replica: str | None = None,
        kind: str | None = None,
        newest: bool = False,
        among: Collection[str] | None = None,
    ) -> list[WeaverEvent]:
        """Return at most ``limit`` events after an id, the oldest first: the first ones, or the ``newest``.

        Args:
            among: only events about one of these replicas; None: any, and those about none.
        """
        ids = None if among is None else json.dumps(list(among))
        wanted = [("id > ?", id), ("replica = ?", replica), ("kind = ?", kind)]
        wanted.append(("replica IN (SELECT value FROM json_each(?))", ids))
        clauses = [(clause, value) for clause, value in wanted if value is not None]
        where = " AND ".join(clause for clause, _ in clauses)
        order = "DESC" if newest else "ASC"
        rows = self._db.execute(
            f"SELECT id, time, kind, replica, data FROM events WHERE {where} ORDER BY id {order} LIMIT ?",
            (*(value for _, value in clauses), limit),
        )
        amended = {event.id: event for event in self._amended}
        found = [
            amended.get(row[0]) or WeaverEvent(row[0], row[1], row[2], row[3], msgpack.unpackb(row[4]))
            for row in rows
        ]
        if newest:
            found.reverse()
        found += [
            event
            for event in self._new
            if event.id > id
            and replica in (None, event.replica)
            and kind in (None, event.kind)
            and (among is None or event.replica in among)
        ]
        return found[-limit:] if newest else found[:limit]

    def write(self) -> None:
        """Write the new and amended events; only while the store commits."""
        self._db.executemany(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)",
            [(new.id, new.time, new.kind, new.replica, msgpack.packb(new.data)) for new in self._new],
        )
        self._db.executemany(
            "UPDATE events SET data = ? WHERE id = ?",
            [(msgpack.packb(event.data), event.id) for event in self._amended],
        )
        if self.last - self._first >= self._keep + self._keep // 100:
            self._first = self.last - self._keep + 1
            self._db.execute("DELETE FROM events WHERE id < ?", (self._first,))

    def take_new(self) -> list[WeaverEvent]:
        """Return the events, new and amended, that `write` has written since the last call."""
        taken = self._new + self._amended
        self._new, self._amended = [], []
        return taken
