"""``select`` over a user's history: read-only SQL on a snapshot of the store's file, in a process of its own.

The weaver's process only waits for it. The process opens the file read-only, sees what was committed, and lets the
statement read the tables of `TABLES` alone: they are views that decode the store's rows as they are read. SQLite's
authorizer refuses everything else, and the process's own limits end a statement that takes too much.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from struct import unpack_from
from typing import Any

import msgpack

from loom.control.operations import QUERY_TIMEOUT
from loom.errors import LimitReached, LoomError, Unavailable, WrongArguments, error_for_code
from loom.process.child import python
from loom.weaver.storage.history import AGAIN
from loom.weaver.storage.store import read_origin
from loom.wire.plain import exact_json

MAX_ROWS = 100_000
"""Rows of one result."""

MAX_BYTES = 8 << 20
"""Bytes of one result."""

MAX_AT_ONCE = 4
"""Queries of all users that run at once."""

MEMORY = 1 << 30
"""Bytes of memory of one query's process."""

_GRACE = 2.0  # seconds after `QUERY_TIMEOUT` in which the process says so itself, before it is killed
_MAX_VALUE = 16 << 20  # bytes of the longest text or blob within a statement
_NUMBERS = 512  # more than a chunk has points
_OPCODES = 10_000  # steps of SQLite's machine between two looks at the clock

TABLES: Mapping[str, str] = {
    "replicas": """
        SELECT json_extract(r, '$.id') AS id, json_extract(r, '$.group') AS group_name,
            json_extract(r, '$.state') AS state, json_extract(r, '$.session') AS session,
            json_extract(r, '$.host') AS host, json_extract(r, '$.pid') AS pid,
            json_extract(r, '$.registered') AS registered, json_extract(r, '$.changed') AS changed,
            json_extract(r, '$.ending') AS ending, json_extract(r, '$.end_reason') AS end_reason,
            json_extract(r, '$.config') AS config
        FROM (SELECT unpacked(data) AS r FROM main.replicas)""",
    "metrics": """
        SELECT s.replica AS replica, s.metric AS metric, point(c.data, n.i, 0) AS time,
            point(c.data, n.i, 1) AS step, point(c.data, n.i, 2) AS value, run_in(r.run) AS run
        FROM main.series s LEFT JOIN main.runs_of_series r ON r.series = s.id
            CROSS JOIN main.chunks c CROSS JOIN temp.numbers n
        WHERE c.series = s.id AND n.i < length(c.data) / 24
        UNION ALL SELECT replica, metric, time, step, value, run FROM temp.recent""",
    "runs": """
        SELECT json_extract(r, '$.id') AS id, json_extract(r, '$.name') AS name,
            json_extract(r, '$.state') AS state, json_extract(r, '$.session') AS session,
            json_extract(r, '$.began') AS began, json_extract(r, '$.ended') AS ended,
            json_extract(r, '$.reason') AS reason, json_extract(r, '$.first') AS first,
            json_extract(r, '$.step') AS step, json_extract(r, '$.config') AS config,
            json_extract(r, '$.summary') AS summary, json_extract(r, '$.tags') AS tags
        FROM (SELECT unpacked(data) AS r FROM main.runs) WHERE json_extract(r, '$.name') IS NOT NULL""",
    "steps": """
        SELECT replica, step, min(time) AS time FROM metrics WHERE step IS NOT NULL GROUP BY replica, step""",
    "events": "SELECT id, time, kind, replica, unpacked(data) AS data FROM main.events",
    "config_changes": """
        SELECT e.id AS event, e.time AS time, e.replica AS replica, json_extract(e.data, '$.step') AS step,
            c.key AS key, json_extract(c.value, '$.old') AS old, json_extract(c.value, '$.new') AS new,
            json_extract(e.data, '$.by') AS by
        FROM (
            SELECT id, time, replica, unpacked(data) AS data FROM main.events WHERE kind IN ('config', 'applied')
        ) e
            CROSS JOIN json_each(e.data, '$.changes') c""",
    "commands": """
        SELECT json_extract(g.c, '$.id') AS id, json_extract(g.c, '$.time') AS time,
            json_extract(g.c, '$.by') AS by, json_extract(g.c, '$.kind') AS kind,
            json_extract(g.c, '$.params') AS params, r.value AS replica, json_extract(a.o, '$.ok') AS ok,
            json_extract(a.o, '$.step') AS step, json_extract(a.o, '$.reason') AS reason
        FROM (SELECT unpacked(data) AS c FROM main.commands) g CROSS JOIN json_each(g.c, '$.replicas') r
            LEFT JOIN (SELECT command, replica, unpacked(data) AS o FROM main.outcomes) a
            ON a.command = json_extract(g.c, '$.id') AND a.replica = r.value""",
}
"""The tables of a statement, and the views that they are. The guide to trackers and queries describes them."""

_COLUMNS = """
    CREATE TABLE replicas (
        id TEXT, group_name TEXT, state TEXT, session TEXT, host TEXT, pid INTEGER, registered REAL, changed REAL,
        ending TEXT, end_reason TEXT, config TEXT);
    CREATE TABLE metrics (replica TEXT, metric TEXT, time REAL, step INTEGER, value REAL, run TEXT);
    CREATE TABLE runs (
        id TEXT, name TEXT, state TEXT, session TEXT, began REAL, ended REAL, reason TEXT, first TEXT, step INTEGER,
        config TEXT, summary TEXT, tags TEXT);
    CREATE TABLE steps (replica TEXT, step INTEGER, time REAL);
    CREATE TABLE events (id INTEGER, time REAL, kind TEXT, replica TEXT, data TEXT);
    CREATE TABLE config_changes (
        event INTEGER, time REAL, replica TEXT, step INTEGER, key TEXT, old, new, by TEXT);
    CREATE TABLE commands (
        id TEXT, time REAL, by TEXT, kind TEXT, params TEXT, replica TEXT, ok INTEGER, step INTEGER,
        reason TEXT);"""
"""The types of the tables' columns; values of a configuration may be of any."""

_NAMES = {"INT": "INTEGER", "INTEGER": "INTEGER", "REAL": "REAL", "TEXT": "TEXT"}
"""The types of a result's columns, by SQLite's names for them."""

_ONLY_READS = "a query only reads: it is one SELECT statement"
_TABLE_FUNCTIONS = ("json_each", "json_tree")
_REFUSED_FUNCTIONS = frozenset(("load_extension", "fts3_tokenizer"))

_running = 0


async def run_query(path: str, sql: str) -> Mapping[str, Any]:
    """Return the columns, rows and types of a statement over the store with a path.

    Raises:
        WrongArguments: the statement makes no sense, reads something else than `TABLES`, or does not only read.
        LimitReached: its time, rows, bytes or memory are over, or `MAX_AT_ONCE` others run.
        Unavailable: the store is in memory only.
    """
    global _running
    if path == ":memory:":
        raise Unavailable("this weaver keeps its history in memory only, where no query reads it")
    if _running >= MAX_AT_ONCE:
        raise LimitReached(f"{MAX_AT_ONCE} queries run already: ask again when one of them is done")
    _running += 1
    try:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *python(__spec__.name, path), stdin=pipe, stdout=pipe, stderr=pipe, limit=MAX_BYTES
        )
        try:
            within = QUERY_TIMEOUT + _GRACE
            out, err = await asyncio.wait_for(child.communicate(sql.encode(errors="replace")), within)
        except asyncio.TimeoutError:
            raise _too_long() from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    finally:
        _running -= 1
    if not out:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        raise _too_large() if child.returncode else LoomError(f"the query's process has failed: {last:.200}")
    answer: dict[str, Any] = msgpack.unpackb(out)
    if "error" in answer:
        raise error_for_code(*answer["error"])
    return answer


def _run(label: str) -> str | None:
    """Return the id of the run in a label of `loom.weaver.storage.history`."""
    return label.partition(AGAIN)[0] or None


def _too_long() -> LimitReached:
    return LimitReached(f"the query took longer than {QUERY_TIMEOUT:g} s: narrow it with WHERE, or read in parts")


def _too_large() -> LimitReached:
    return LimitReached(f"the query needs more than {MEMORY >> 20} MiB of memory: narrow it, or read in parts")


class _Snapshot:
    """A read-only connection to a store, on which one statement runs."""

    def __init__(self, path: str) -> None:
        self._ends = time.monotonic() + QUERY_TIMEOUT
        self._read: set[str] = set()
        """The tables that a statement reads."""
        self._refused = ""
        """The reason why a statement is refused."""
        self._db = db = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        db.create_function("unpacked", 1, _unpacked, deterministic=True)
        db.create_function("run_in", 1, lambda label: _run(label or ""), deterministic=True)
        db.create_function("point", 3, _point, deterministic=True)
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute("CREATE TEMP TABLE numbers (i INTEGER PRIMARY KEY)")
        db.executemany("INSERT INTO temp.numbers VALUES (?)", ((i,) for i in range(_NUMBERS)))
        db.execute(
            "CREATE TEMP TABLE recent (replica TEXT, metric TEXT, time REAL, step INTEGER, value REAL, run TEXT)"
        )
        for name in _TABLE_FUNCTIONS:  # SQLite declares them on first use, which the authorizer would refuse
            db.execute(f"SELECT * FROM {name}('[]')").close()
        self._stored = {
            "recent",
            "numbers",
            *(name for (name,) in db.execute("SELECT name FROM main.sqlite_master")),
        }
        """The tables that a statement reads by the views alone."""
        self._through: set[tuple[str | None, str | None]] = set()
        """A stored table, and a view that reads it."""
        for name, view in TABLES.items():
            db.execute(f"CREATE TEMP VIEW {name} AS {view}")
        self._guards = False
        """True while the authorizer refuses; until then it learns what the views read."""
        db.set_authorizer(self._authorize)
        for name in TABLES:
            db.execute(f"EXPLAIN SELECT * FROM {name}").close()
        if sys.version_info >= (3, 11):  # from Python 3.11 on; the process's memory is bounded in any case
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE)
            db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        db.set_progress_handler(lambda: time.monotonic() > self._ends, _OPCODES)

    def answer(self, sql: str) -> Mapping[str, Any]:
        """Return the columns, rows and types of a statement. Raise as `run_query`."""
        try:
            self._db.execute("BEGIN")
            self._prepare(sql)
            if "recent" in self._read:
                self._read_journal()
            cursor = self._guarded(sql)
            if cursor.description is None:
                raise WrongArguments(_ONLY_READS)
            columns, rows, size = [one[0] for one in cursor.description], [], 0
            for row in cursor:
                rows.append([one.hex() if isinstance(one, bytes) else one for one in row])
                size += sum(len(one) if isinstance(one, (str, bytes)) else 8 for one in row)
                if len(rows) > MAX_ROWS or size > MAX_BYTES:
                    raise LimitReached(
                        f"the result has more than {MAX_ROWS:,} rows or {MAX_BYTES >> 20} MiB: narrow it with "
                        "WHERE or LIMIT, or read it in parts"
                    )
            return {"columns": columns, "rows": rows, "types": _types(sql, len(columns))}
        except MemoryError:
            raise _too_large() from None
        except (sqlite3.Error, sqlite3.Warning, UnicodeError) as error:
            raise self._reason(error) from error

    def _prepare(self, sql: str) -> None:
        """Check a statement, and note what it reads, without running it."""
        self._guarded(f"EXPLAIN {sql}").close()

    def _guarded(self, sql: str) -> sqlite3.Cursor:
        """Begin a statement under the authorizer."""
        self._guards = True
        try:
            return self._db.execute(sql)
        finally:
            self._guards = False

    def _authorize(
        self, action: int, first: str | None, second: str | None, schema: str | None, view: str | None
    ) -> int:
        if not self._guards:
            self._through.add((first, view))
            return sqlite3.SQLITE_OK
        if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and second not in _REFUSED_FUNCTIONS:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ and first is not None:
            self._read.add(first)
            known = first in _TABLE_FUNCTIONS or (view is not None and (first, view) in self._through)
            if first in TABLES:
                known = known or schema == "temp" or not second
            elif not second:  # the rows of a subquery are counted, or of a stored table
                known = known or not (first in self._stored or first.startswith("sqlite_"))
            if known:
                return sqlite3.SQLITE_OK
            self._refused = f"there is no table {first!r:.80}; there are {', '.join(TABLES)}"
        self._refused = self._refused or _ONLY_READS
        return sqlite3.SQLITE_DENY

    def _read_journal(self) -> None:
        """Add the points that are in no chunk yet, of the same snapshot."""
        upto: dict[tuple[str, str, str], int] = {}
        series = (
            "SELECT replica, metric, COALESCE(run, ''), upto FROM series LEFT JOIN runs_of_series ON series = id"
        )
        for replica, metric, run, last in self._db.execute(f"{series} ORDER BY id"):
            upto[replica, metric, run] = last
        for row, data in self._db.execute("SELECT id, data FROM journal ORDER BY id"):
            points = [
                (replica, metric, report[1], report[2], value, _run(read_origin(origin)[1]))
                for replica, origin, reports in msgpack.unpackb(data)
                for report in reports
                for metric, value in report[5].items()
                if upto.get((replica, metric, read_origin(origin)[1]), row) < row
            ]
            self._db.executemany("INSERT INTO temp.recent VALUES (?, ?, ?, ?, ?, ?)", points)

    def _reason(self, error: Exception) -> LoomError:
        text = str(error)
        if self._refused:
            return WrongArguments(self._refused)
        if text == "interrupted" or time.monotonic() > self._ends:
            return _too_long()
        if "no such table" in text:
            return WrongArguments(f"{text}; there are {', '.join(TABLES)}")
        if "one statement" in text or "cannot modify" in text:
            return WrongArguments(_ONLY_READS)
        return WrongArguments(f"the query makes no sense: {text:.500}")


def _types(sql: str, count: int) -> list[str]:
    """Return the type of each column of a statement that was answered; empty if SQLite knows none.

    SQLite tells the type of an expression to nothing but a table that is made of it: here one of empty tables.
    """
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(_COLUMNS)
        try:
            db.execute(f"CREATE VIEW answered AS {sql}")
            db.execute("CREATE TABLE typed AS SELECT * FROM answered LIMIT 0")
        except sqlite3.Error:  # such as a comment behind which a view has no end
            return [""] * count
        found = [_NAMES.get(kind, "") for (kind,) in db.execute("SELECT type FROM pragma_table_info('typed')")]
    return found if len(found) == count else [""] * count


def _unpacked(data: bytes) -> str:
    return exact_json(msgpack.unpackb(data))


def _point(data: bytes, place: int, part: int) -> float | int | None:
    """Return the time, step or value (0, 1, 2) of a point in a chunk; None for a step that is not known."""
    (value,) = unpack_from("=d", data, 24 * place + 8 * part)
    return (int(value) if value == value else None) if part == 1 else value


def _main(path: str, read: Callable[[], str], write: Callable[[bytes], object]) -> None:
    try:
        answer = _Snapshot(path).answer(read())
    except LoomError as error:
        answer = {"error": [error.code, str(error)]}
    except (MemoryError, sqlite3.OperationalError) as error:
        failed = (
            _too_large() if isinstance(error, MemoryError) else Unavailable(f"the store cannot be read: {error}")
        )
        answer = {"error": [failed.code, str(failed)]}
    write(msgpack.packb(answer, unicode_errors="replace"))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    seconds = int(QUERY_TIMEOUT + _GRACE)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    _main(sys.argv[1], lambda: sys.stdin.buffer.read().decode(errors="replace"), sys.stdout.buffer.write)
