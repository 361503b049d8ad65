"""What the weaver has to know after it was killed, in one SQLite file.

Everything that happens between two commits is written by one commit, and what a commit holds is not acknowledged to
anybody before it. A commit survives the death of the process; one made within the last moments before the machine
loses power may not (WAL with ``synchronous=NORMAL``), but the file stays sound.

Status reports come too fast for a row each in an index. They are kept in a journal, one row a commit, as they came;
what they amount to (points of history, the newest status of a replica) is written later, when there is enough of it
or it is old, and the rows of the journal that are then not needed any more are dropped.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack

from loom.errors import UnsafeStateFolder

_VERSION = 1

_KEYED = ("replicas", "devices", "policies", "commands", "goodput")

# Version 1 had no goodput at first: what is missing is added, and an older Loom takes no notice of it.
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
CREATE INDEX IF NOT EXISTS chunks_of_series ON chunks (series, first);
CREATE INDEX IF NOT EXISTS chunks_by_age ON chunks (level, last);
""" + "".join(
    f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;"
    for table in _KEYED
)


class Store:
    """The file. Rows that are put into it are written by the next commit, and only then found by anybody.

    Raises:
        UnsafeStateFolder: the folder cannot be written to, or the file is no SQLite file or of another version of
            Loom.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.db = sqlite3.connect(path, isolation_level=None)
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute("PRAGMA synchronous=NORMAL")
            self.db.execute("PRAGMA wal_autocheckpoint=4096")
            self.db.execute("PRAGMA cache_size=-16384")
            (version,) = self.db.execute("PRAGMA user_version").fetchone()
            if version in (0, _VERSION):
                self.db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT")
        except sqlite3.Error as error:
            raise UnsafeStateFolder(f"cannot keep the weaver's state in {path}: {error}") from error
        if version not in (0, _VERSION):
            raise UnsafeStateFolder(f"{path} is of version {version}; this Loom knows {_VERSION}: move it away")
        (last,) = self.db.execute("SELECT COALESCE(MAX(id), 0) FROM journal").fetchone()
        (seen,) = self.db.execute("SELECT COALESCE(MAX(upto), 0) FROM series").fetchone()
        self.journal_id: int = max(last, seen) + 1
        """The row of the journal that the next commit writes."""
        self._journal: list[Any] = []
        self._rows: dict[str, dict[str, bytes | None]] = {table: {} for table in _KEYED}
        self._acknowledgements: list[tuple[str, str, bytes]] = []

    @property
    def pending(self) -> bool:
        """Whether there is something to commit."""
        return bool(self._journal or self._acknowledgements or any(self._rows.values()))

    def put(self, table: str, key: str, data: dict[str, Any]) -> None:
        """Write a row of ``replicas``, ``devices``, ``policies``, ``commands`` or ``goodput`` by its key."""
        self._rows[table][key] = msgpack.packb(data)

    def drop(self, table: str, key: str) -> None:
        """Drop a row, if there is one."""
        self._rows[table][key] = None

    def put_acknowledgement(self, command: str, replica: str, body: dict[str, Any]) -> None:
        """Write what a replica made of a command."""
        self._acknowledgements.append((command, replica, msgpack.packb(body)))

    def log(self, entry: list[Any]) -> None:
        """Write an entry into the journal."""
        self._journal.append(entry)

    def rows(self, table: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The committed rows of a table, by key."""
        for key, data in self.db.execute(f"SELECT key, data FROM {table} ORDER BY key"):
            yield key, msgpack.unpackb(data)

    def acknowledgements(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield what replicas made of commands: the command's id, the replica's, the acknowledgement."""
        for command, replica, data in self.db.execute("SELECT command, replica, data FROM outcomes"):
            yield command, replica, msgpack.unpackb(data)

    def journal(self) -> Iterator[tuple[int, list[Any]]]:
        """The rows of the journal, the oldest first: id, entries."""
        for id, data in self.db.execute("SELECT id, data FROM journal ORDER BY id"):
            yield id, msgpack.unpackb(data)

    @contextmanager
    def committing(self) -> Iterator[int]:
        """Commit what was put; the body may write more into the same commit, and is given the journal's last row.

        Raises:
            sqlite3.Error: it could not be written. Nothing was.
        """
        self.db.execute("BEGIN IMMEDIATE")
        try:
            self._write()
            yield self.journal_id if self._journal else self.journal_id - 1
            self.db.execute("COMMIT")
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        if self._journal:
            self.journal_id += 1
            self._journal = []
        self._acknowledgements = []
        for rows in self._rows.values():
            rows.clear()

    def trim_journal(self, before: int) -> None:
        """Drop the rows of the journal before one; only while `committing`."""
        self.db.execute("DELETE FROM journal WHERE id < ?", (before,))

    def close(self) -> None:
        """Close the file. What was not committed is lost."""
        self.db.close()

    def _write(self) -> None:
        if self._journal:
            self.db.execute("INSERT INTO journal VALUES (?, ?)", (self.journal_id, msgpack.packb(self._journal)))
        for table, rows in self._rows.items():
            if not rows:
                continue
            kept = [(key, data) for key, data in rows.items() if data is not None]
            dropped = [(key,) for key, data in rows.items() if data is None]
            self.db.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", kept)
            self.db.executemany(f"DELETE FROM {table} WHERE key = ?", dropped)
            if table == "commands":
                self.db.executemany("DELETE FROM outcomes WHERE command = ?", dropped)
        self.db.executemany("INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?)", self._acknowledgements)
