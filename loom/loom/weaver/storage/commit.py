"""`Commit`: what one transaction writes, collected on the event loop and written on any thread.

SQLite runs a whole statement without Python's interpreter lock. A statement therefore has many rows: a thread that
writes them one by one would wait for the event loop at each.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any

ROWS = 200
"""Rows of one statement. Each takes up to 6 of the 32,766 parameters that SQLite allows."""


class Commit:
    """The statements of a transaction, in order.

    Args:
        journal_id: the last row of the journal that is written with it, or before it.
        waits_for_disk: whether it is on the disk when it is written.
    """

    def __init__(self, journal_id: int, waits_for_disk: bool = False) -> None:
        self.journal_id = journal_id
        self.waits_for_disk = waits_for_disk
        self.bytes = 0
        """How much it writes, about."""
        self._steps: list[Callable[[sqlite3.Connection], object]] = []
        self._when_stored: list[Callable[[], object]] = []

    def insert(self, table: str, rows: Sequence[tuple[Any, ...]], replace: bool = False) -> None:
        """Insert rows; with ``replace``, in place of those with the same keys."""
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        for some in _parts(rows):
            places = ",".join([f"({','.join('?' * len(some[0]))})"] * len(some))
            values = itertools.chain.from_iterable(some)
            self.execute(f"{verb} INTO {table} VALUES {places}", *values)

    def delete(self, table: str, column: str, values: Sequence[Any]) -> None:
        """Delete the rows that have one of the values in a column."""
        for some in _parts(values):
            self.execute(f"DELETE FROM {table} WHERE {column} IN ({','.join('?' * len(some))})", *some)

    def update(self, table: str, name: str, value: Any, column: str, values: Sequence[Any]) -> None:
        """Set a column to a value in the rows that have one of the values in another column."""
        for some in _parts(values):
            places = ",".join("?" * len(some))
            self.execute(f"UPDATE {table} SET {name} = ? WHERE {column} IN ({places})", value, *some)

    def execute(self, statement: str, *parameters: Any) -> None:
        self.bytes += sum(len(one) for one in parameters if isinstance(one, bytes))
        self.run(lambda db: db.execute(statement, parameters))

    def run(self, step: Callable[[sqlite3.Connection], object]) -> None:
        """Do something within the transaction, after what was asked for before."""
        self._steps.append(step)

    def when_stored(self, call: Callable[[], object]) -> None:
        """Call something on the event loop once the transaction is stored."""
        self._when_stored.append(call)

    def write(self, db: sqlite3.Connection) -> None:
        """Write everything in one transaction. After a `sqlite3.Error` nothing is, and the call may be repeated."""
        calls = len(self._when_stored)
        try:
            db.execute("BEGIN IMMEDIATE")
            for step in self._steps:
                step(db)
            db.execute("COMMIT")
        except BaseException:
            del self._when_stored[calls:]  # the steps' own, who add them again
            if db.in_transaction:  # SQLite itself gives up a transaction for which the disk has no room
                db.execute("ROLLBACK")
            raise

    def stored(self) -> None:
        """Make the calls of `when_stored`, after `write` has returned."""
        for call in self._when_stored:
            call()


def _parts(rows: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (rows[start : start + ROWS] for start in range(0, len(rows), ROWS))
