"""The weaver's store: a file of SQLite, and what one transaction writes into it.

One commit writes everything that happened since the last. Nothing is acknowledged before its commit. A commit
survives the death of the process. A commit with a command, an acknowledgement or a policy is on the disk when
it returns (``synchronous=FULL``), with all before it, and survives a loss of power. In a store with ``each_waits``
every commit is. Else the others do not wait for the disk (``synchronous=NORMAL``): the last moments of reports may
be lost with the power, but the file stays sound.

``python -m tests.benchmarks weaver`` measures what waiting for the disk costs a commit: a few milliseconds on a
virtual disk, twice for a command and its acknowledgement.

Status reports come too fast for an indexed row each. The journal keeps them as they came, one row for each commit.
The points of history and the newest status of a replica that result from them are written later, when there is
enough or when they are old, a few with each commit. Then the journal rows that are no longer needed are dropped.

A `Commit` may be written on another thread, while reads on the event loop find what was stored before it. From
time to time `Store.checkpoint` moves what was committed from SQLite's log into the file, with a connection of its
own, so that no commit waits for it.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack

from loom.control.frame import pack_value
from loom.errors import UnsafeStateFolder

_ORIGIN = "\x1e"


def origin(instance: str, label: str) -> str:
    """Return what a row of the journal says of the process that made reports, and of the run that they are of.

    An older Loom, which knows no runs, takes it for a former process.
    """
    return f"{instance}{_ORIGIN}{label}"


def journal_head(replica: str, origin: str) -> bytes:
    """Return the beginning of an entry of the journal: the packed rows of status reports follow."""
    return _THREE + pack_value(replica) + pack_value(origin)


_THREE: bytes = msgpack.Packer().pack_array_header(3)


def read_origin(origin: str) -> tuple[str, str]:
    """Return the process and the label of the run; that is empty in the rows of an older Loom."""
    instance, _, label = origin.partition(_ORIGIN)
    return instance, label


ROWS = 200
"""Rows of one statement. Each takes up to 10 of the 32,766 parameters that SQLite allows."""


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
        """The approximate number of values that it writes."""
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

    def write(self, db: sqlite3.Connection, check: Callable[[], object] = lambda: None) -> None:
        """Write everything in one transaction. After an error nothing is, and the call may be repeated.

        ``check`` is called when nobody else can write any more, and what it raises ends the transaction.
        """
        calls = len(self._when_stored)
        try:
            db.execute("BEGIN IMMEDIATE")
            check()
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


_VERSION = 1

_ALERTS = ("alert_rules", "alert_incidents", "alerts")

_KEYED = ("replicas", "devices", "policies", "commands", "goodput", "runs", "run_ranks", "run_marks", *_ALERTS)

_DURABLE = ("commands", "policies", *_ALERTS)
"""The tables whose changes are acknowledged to users, or sent to them."""

CHECKPOINT_AFTER = 8 << 20
"""Bytes in commits after which a checkpoint is due."""

_ALSO = 8192  # bytes that each commit counts in addition, since SQLite writes whole pages

_PASSES = 5
"""Passes of a checkpoint, at most."""

_WAIT = 300.0  # seconds that a statement waits for another connection

# Version 1 had neither goodput, aged, outlines, wide ones, runs nor alerts at first. A missing table is added;
# an older Loom ignores it.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS outcomes (
    command TEXT, replica TEXT, data BLOB NOT NULL, PRIMARY KEY (command, replica)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, replica TEXT, data BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS journal (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS series (
    id INTEGER PRIMARY KEY, replica TEXT NOT NULL, metric TEXT NOT NULL, upto INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY, series INTEGER NOT NULL, level INTEGER NOT NULL, first REAL NOT NULL,
    last REAL NOT NULL, data BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS aged (series INTEGER PRIMARY KEY, points INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS runs_of_series (series INTEGER PRIMARY KEY, run TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS outlines (
    series INTEGER NOT NULL, chunk INTEGER NOT NULL, points INTEGER NOT NULL, first REAL NOT NULL,
    last_time REAL NOT NULL, first_step REAL, last_step REAL, mean REAL, low REAL, high REAL,
    PRIMARY KEY (series, chunk)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS wide_outlines (
    series INTEGER NOT NULL, chunk INTEGER NOT NULL, last_chunk INTEGER NOT NULL, chunks INTEGER NOT NULL,
    points INTEGER NOT NULL, first REAL NOT NULL, last_time REAL NOT NULL, first_step REAL, last_step REAL,
    mean REAL, low REAL, high REAL, PRIMARY KEY (series, chunk)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS chunks_of_series ON chunks (series, first);
CREATE INDEX IF NOT EXISTS chunks_by_age ON chunks (level, last);
""" + "".join(
    f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;"
    for table in _KEYED
)


_MEND = """
DELETE FROM outlines WHERE NOT EXISTS (
    SELECT 1 FROM chunks WHERE id = chunk AND chunks.series = outlines.series AND chunks.first = outlines.first
);
DELETE FROM wide_outlines WHERE chunks != (
    SELECT COUNT(*) FROM outlines
    WHERE outlines.series = wide_outlines.series AND outlines.chunk BETWEEN wide_outlines.chunk AND last_chunk
);
"""
"""An older Loom deletes chunks without their outlines, and outlines without the wide ones."""


class Store:
    """The store's file. The next commit writes the rows that were put; reads find them only then.

    Args:
        check: called within each commit; raises if the store is another weaver's by now.
        each_waits: whether each commit waits for the disk, also one that only has reports.
    """

    def __init__(
        self, path: str | Path, check: Callable[[], object] = lambda: None, each_waits: bool = False
    ) -> None:
        self.path = str(path)
        """The file, or ``:memory:``."""
        self._check = check
        self._each_waits = each_waits
        try:
            self.db = self._connect()
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute("PRAGMA synchronous=NORMAL")
            self.db.execute("PRAGMA wal_autocheckpoint=0")
            self.db.execute("PRAGMA cache_size=-16384")
            (version,) = self.db.execute("PRAGMA user_version").fetchone()
            if version in (0, _VERSION):
                # Whoever commits while this waits is done before anything is read.
                self.db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {_MEND} PRAGMA user_version={_VERSION}; COMMIT")
            # A store in memory has one connection only.
            self.reader = self.db if self.path == ":memory:" else self._connect()
            """Finds what is committed, while ``db`` writes on another thread."""
        except sqlite3.Error as error:
            raise UnsafeStateFolder(f"cannot keep the weaver's state in {path}: {error}") from error
        if version not in (0, _VERSION):
            raise UnsafeStateFolder(f"{path} is of version {version}; this Loom knows {_VERSION}: move it away")
        (last,) = self.db.execute("SELECT COALESCE(MAX(id), 0) FROM journal").fetchone()
        (seen,) = self.db.execute("SELECT COALESCE(MAX(upto), 0) FROM series").fetchone()
        self.journal_id: int = max(last, seen) + 1
        """The id of the journal row that the next commit writes."""
        self._journal: list[bytes] = []
        self._rows: dict[str, dict[str, bytes | None]] = {table: {} for table in _KEYED}
        self._acknowledgements: list[tuple[str, str, bytes]] = []
        self._waits_for_disk = False
        """True if a commit waits for the disk, as SQLite is set now."""
        self._since_checkpoint = 0
        """Bytes that were committed since the last checkpoint began."""

    @property
    def pending(self) -> bool:
        return bool(self._journal or self._acknowledgements or any(self._rows.values()))

    @property
    def last_row(self) -> int:
        """The id of the last row of the journal, with what the next commit writes."""
        return self.journal_id if self._journal else self.journal_id - 1

    def put(self, table: str, key: str, data: Mapping[str, Any]) -> None:
        """Put a row of one of the tables with keys."""
        self._rows[table][key] = msgpack.packb(data)

    def drop(self, table: str, key: str) -> None:
        self._rows[table][key] = None

    def put_acknowledgement(self, command: str, replica: str, packed: bytes) -> None:
        self._acknowledgements.append((command, replica, packed))

    def log(self, entry: bytes) -> None:
        """Add a packed entry to the row of the journal that the next commit writes."""
        self._journal.append(entry)

    def rows(self, table: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the committed rows of a table, in the order of their keys."""
        for key, data in self.reader.execute(f"SELECT key, data FROM {table} ORDER BY key"):
            yield key, msgpack.unpackb(data)

    def rows_after(self, table: str, prefix: str, limit: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the first committed rows of a table whose keys begin with a text, in the order of their keys."""
        statement = f"SELECT key, data FROM {table} WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
        for key, data in self.reader.execute(statement, (prefix, prefix + "\U0010ffff", limit)):
            yield key, msgpack.unpackb(data)

    def acknowledgements(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield (command id, replica id, acknowledgement) for every stored acknowledgement."""
        for command, replica, data in self.reader.execute("SELECT command, replica, data FROM outcomes"):
            yield command, replica, msgpack.unpackb(data)

    def journal(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield (id, entries) for each row of the journal, the oldest first."""
        for id, data in self.reader.execute("SELECT id, data FROM journal ORDER BY id"):
            yield id, msgpack.unpackb(data)

    def begin(self) -> Commit:
        """Return a commit of the rows that were put. More may be added to it; then `write` has to get it."""
        rows, self._rows = self._rows, {table: {} for table in _KEYED}
        acknowledgements, self._acknowledgements = self._acknowledgements, []
        journal, self._journal = self._journal, []
        waits = self._each_waits or any(rows[table] for table in _DURABLE) or bool(acknowledgements)
        commit = Commit(self.journal_id if journal else self.journal_id - 1, waits)
        if journal:
            row = b"".join([msgpack.Packer().pack_array_header(len(journal)), *journal])
            commit.insert("journal", [(self.journal_id, row)])
            self.journal_id += 1
        for table, changed in rows.items():
            dropped = [key for key, data in changed.items() if data is None]
            commit.insert(table, [(key, data) for key, data in changed.items() if data is not None], replace=True)
            commit.delete(table, "key", dropped)
            if table == "commands":
                commit.delete("outcomes", "command", dropped)
        commit.insert("outcomes", acknowledgements, replace=True)
        return commit

    def write(self, commit: Commit) -> None:
        """Write a commit; on any thread, but one at a time."""
        if commit.waits_for_disk != self._waits_for_disk:
            self.db.execute(f"PRAGMA synchronous={'FULL' if commit.waits_for_disk else 'NORMAL'}")
            self._waits_for_disk = commit.waits_for_disk
        commit.write(self.db, self._check)
        self._since_checkpoint += commit.bytes + _ALSO

    @property
    def checkpoint_due(self) -> bool:
        return self._since_checkpoint >= CHECKPOINT_AFTER

    def checkpoint(self) -> None:
        """Move what was committed into the file; on any thread, while there are further commits."""
        self._since_checkpoint = 0
        if self.reader is not self.db:
            with closing(self._connect()) as db:
                # SQLite begins its log anew only if all of it was moved. Each pass leaves what came meanwhile.
                for _ in range(_PASSES):
                    _, logged, moved = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                    if moved == logged:
                        return

    def close(self) -> None:
        """Close the file. Uncommitted rows are lost."""
        self.reader.close()
        self.db.close()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=_WAIT)
