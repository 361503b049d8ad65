"""`BridgeState`: what a bridge remembers when it is killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loom.errors import Conflict, WrongArguments

KEEP_DONE = 7 * 24 * 3600.0
"""Seconds for which the ids of requests that were done are kept: far longer than the stream keeps requests."""

KEPT_DONE = 10_000
"""The ids of requests that are kept however old they are."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS bridge (id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS done (request TEXT PRIMARY KEY, time REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS replicas (replica TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
"""


class BridgeState:
    """The requests that were done, the replicas that were registered, and the bridge's id, in a file of SQLite.

    Written state outlives the process at once. Only one bridge at a time uses a file.

    Raises:
        Conflict: another bridge uses the file.
        WrongArguments: the file cannot be written, or is something else.
    """

    def __init__(self, path: Path | None) -> None:
        where = ":memory:" if path is None else str(path)
        try:
            if path is not None:
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(where, timeout=0.5, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            # The newest ones in any case: the machine's clock may be ahead.
            newest = f"SELECT request FROM done ORDER BY time DESC LIMIT {KEPT_DONE}"
            old = time.time() - KEEP_DONE
            self._db.execute(f"DELETE FROM done WHERE time < ? AND request NOT IN ({newest})", (old,))
            self._db.execute(
                "INSERT INTO bridge SELECT ? WHERE NOT EXISTS (SELECT * FROM bridge)", (uuid.uuid4().hex,)
            )
            self._db.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            if "locked" in str(error):
                raise Conflict(
                    f"--state {path}: another bridge uses this file; give each a file of its own"
                ) from error
            raise WrongArguments(f"--state {path}: this is no file for the state of a bridge ({error})") from error
        (self.id,) = self._db.execute("SELECT id FROM bridge").fetchone()

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def is_done(self, request: str) -> bool:
        """Return whether a request was done."""
        return self._db.execute("SELECT 1 FROM done WHERE request = ?", (request,)).fetchone() is not None

    def note_done(self, request: str) -> None:
        """Remember that a request was done."""
        self._db.execute("INSERT OR IGNORE INTO done VALUES (?, ?)", (request, time.time()))

    def replicas(self) -> dict[str, Mapping[str, Any]]:
        """Return what was put for each replica."""
        return {replica: json.loads(body) for replica, body in self._db.execute("SELECT * FROM replicas")}

    def put_replica(self, replica: str, body: Mapping[str, object]) -> None:
        """Remember a replica."""
        self._db.execute("INSERT OR REPLACE INTO replicas VALUES (?, ?)", (replica, json.dumps(body)))

    def drop_replica(self, replica: str) -> None:
        """Forget a replica."""
        self._db.execute("DELETE FROM replicas WHERE replica = ?", (replica,))
