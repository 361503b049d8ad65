"""Queries: a statement sees what the weaver has stored of a user's replicas, only reads it, and has its bounds."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

import pytest

from loom.control.frame import pack_value
from loom.errors import LimitReached, LoomError, Unavailable, WrongArguments, error_for_code
from loom.weaver.storage import query
from loom.weaver.storage.query import TABLES, run_query
from loom.weaver.storage.store import journal_head, origin
from tests.unit.loom.weaver.raw_threadlet import BOUND, RawThreadlet, WeaverProcess
from tests.unit.loom.weaver.test_history import START, Recorder

STEPS = 400


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with points in full chunks, in chunks that grow, and in the journal alone; of some runs."""
    recorder = JournalRecorder(tmp_path / "w.sqlite", write_after=30.0)
    rng = random.Random(3)
    for step in range(STEPS):
        if step % (STEPS // 4) == 0:
            recorder.history.enter("train_0", f"run_{step}")
        recorder.record(step, loss=step / 10)
        if rng.random() < 0.2:
            recorder.commit(START + step)
    recorder.commit(START + STEPS)
    return recorder.store.path


class JournalRecorder(Recorder):
    """A `Recorder` whose journal has the weaver's form."""

    def record(self, step: int, replica: str = "train_0", every: float = 1.0, **metrics: float) -> None:
        at = START + step * every
        self.history.record(replica, self.store.journal_id, at, step, metrics)
        of = origin("process", self.history.label(replica))
        self.store.log(journal_head(replica, of) + pack_value([[step + 1, at, step, None, None, metrics, None]]))


def rows(path: str, sql: str) -> list[list[object]]:
    found: list[list[object]] = asyncio.run(run_query(path, sql))["rows"]
    return found


def test_a_query_sees_each_point_once_wherever_it_lies(store: str) -> None:
    found = rows(store, "SELECT step, time, value FROM metrics WHERE replica = 'train_0' ORDER BY step")

    assert found == [[step, START + step, step / 10] for step in range(STEPS)]
    each = rows(store, "SELECT run, count(*) FROM metrics GROUP BY run ORDER BY min(step)")
    assert each == [[f"run_{step}", STEPS // 4] for step in range(0, STEPS, STEPS // 4)]
    assert rows(store, "SELECT count(*), min(step), max(step) FROM steps") == [[STEPS, 0, STEPS - 1]]


def test_events_commands_and_changes_are_tables(weaver: WeaverProcess) -> None:
    threadlet = RawThreadlet(weaver.address)
    threadlet.welcome()
    gateway = weaver.gateway()
    gateway.ask("command", kind="update_config", params={"lr": 0.02}, target="train_0", by="ann")
    id, *_ = threadlet.command()
    threadlet.ack(id, step=7, changes={"lr": {"old": 0.1, "new": 0.02}})
    threadlet.await_stored(threadlet.report(8, at=START, loss=0.5))
    gateway.ask("command_state", id=id, timeout=BOUND)

    def asked(sql: str) -> object:
        return gateway.ask("query", sql=sql)["rows"]

    assert asked("SELECT kind, replica FROM events WHERE kind = 'applied'") == [["applied", "train_0"]]
    assert asked("SELECT replica, step, key, old, new, by FROM config_changes") == [
        ["train_0", 7, "lr", 0.1, 0.02, "ann"]
    ]
    assert asked("SELECT id, by, kind, params, replica, ok, step FROM commands") == [
        [id, "ann", "update_config", '{"lr":0.02}', "train_0", 1, 7]
    ]
    assert asked("SELECT id, group_name FROM replicas") == [["train_0", "train"]]  # a slow query finds it stalled
    assert asked("SELECT metric, metrics.step, value, name FROM metrics JOIN runs ON runs.id = run") == [
        ["loss", 8, 0.5, "train"]
    ]


def test_a_user_queries_own_replicas_only(weaver: WeaverProcess) -> None:
    RawThreadlet(weaver.address).welcome()
    gateway = weaver.gateway()

    gateway.send("ask", 9, "bob", "query", {"sql": "SELECT id FROM replicas"})

    assert gateway.receive()[2]["rows"] == []
    assert gateway.ask("query", sql="SELECT id FROM replicas")["rows"] == [["train_0"]]


TYPES = {
    "replicas": ["TEXT"] * 5 + ["INTEGER", "REAL", "REAL"] + ["TEXT"] * 3,
    "metrics": ["TEXT", "TEXT", "REAL", "INTEGER", "REAL", "TEXT"],
    "runs": ["TEXT"] * 4 + ["REAL", "REAL", "TEXT", "TEXT", "INTEGER"] + ["TEXT"] * 3,
    "steps": ["TEXT", "INTEGER", "REAL"],
    "events": ["INTEGER", "REAL", "TEXT", "TEXT", "TEXT"],
    "config_changes": ["INTEGER", "REAL", "TEXT", "INTEGER", "TEXT", "", "", "TEXT"],
    "commands": ["TEXT", "REAL", "TEXT", "TEXT", "TEXT", "TEXT", "INTEGER", "INTEGER", "TEXT"],
}


def answer(path: str, sql: str) -> dict[str, object]:
    """Do what the process of a query does, in this one."""
    answers: list[bytes] = []
    query._main(path, lambda: sql, answers.append)
    found: dict[str, object] = query.msgpack.unpackb(answers[0])
    if isinstance(error := found.get("error"), list):
        raise error_for_code(*error)
    return found


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("where", ["", " WHERE 0"], ids=["with", "without"])
def test_columns_have_types_with_rows_and_without(store: str, table: str, where: str) -> None:
    assert answer(store, f"SELECT * FROM {table}{where}")["types"] == TYPES[table]


@pytest.mark.parametrize(
    ("sql", "types"),
    [
        ("SELECT count(*), CAST(max(step) AS INTEGER) AS last FROM metrics; -- the last", ["", "INTEGER"]),
        ("WITH mine AS (SELECT step, step AS step FROM steps) SELECT * FROM mine", ["INTEGER", "INTEGER"]),
        ("VALUES (1, 'a')", ["", ""]),
        ("SELECT replica FROM steps UNION SELECT step FROM steps", ["TEXT"]),
    ],
)
def test_a_column_that_is_computed_has_the_type_of_a_cast(store: str, sql: str, types: list[str]) -> None:
    assert answer(store, sql)["types"] == types


HOSTILE = {
    "attach": "ATTACH '/tmp/other' AS other",
    "change": "DELETE FROM events",
    "insert": "INSERT INTO events (id) VALUES (1)",
    "update": "UPDATE replicas SET key = 1",
    "replace": "REPLACE INTO main.replicas VALUES (1, 2)",
    "common table that deletes": "WITH x AS (SELECT 1) DELETE FROM main.replicas",
    "returned": "DELETE FROM main.events RETURNING id",
    "returned from a temporary one": "INSERT INTO temp.recent VALUES (1, 2, 3, 4, 5) RETURNING replica",
    "pragma": "PRAGMA journal_mode = DELETE",
    "pragma that writes": "PRAGMA main.user_version = 7",
    "pragma of memory": "PRAGMA hard_heap_limit = 1",
    "pragma that reads": "PRAGMA database_list",
    "detach": "DETACH main",
    "reindex": "REINDEX",
    "analyze": "ANALYZE",
    "drop": "DROP VIEW metrics",
    "alter": "ALTER TABLE main.events ADD COLUMN mine",
    "index": "CREATE INDEX mine ON events (id)",
    "view": "CREATE TEMP VIEW mine AS SELECT 1",
    "virtual table": "CREATE VIRTUAL TABLE temp.mine USING fts5(x)",
    "explain": "EXPLAIN SELECT * FROM main.events",
    "query plan": "QUERY PLAN SELECT * FROM events",
    "savepoint": "SAVEPOINT mine",
    "pragma table": "SELECT * FROM pragma_table_info('events')",
    "extension": "SELECT load_extension('/tmp/x')",
    "table": "CREATE TABLE mine (x)",
    "temporary table": "CREATE TEMP TABLE mine (x)",
    "trigger": "CREATE TEMP TRIGGER mine AFTER INSERT ON recent BEGIN SELECT 1; END",
    "vacuum": "VACUUM INTO '/tmp/copy'",
    "vacuum in place": "VACUUM",
    "files": "SELECT writefile('/tmp/mine', 'x')",
    "file": "SELECT readfile('/etc/passwd')",
    "pages": "SELECT * FROM dbstat",
    "two": "SELECT 1; SELECT 2",
    "none": " ",
    "schema": "SELECT * FROM sqlite_master",
    "stored rows": "SELECT * FROM main.chunks",
    "stored events": "SELECT * FROM main.events",
    "stored rows by a table's name": "WITH events AS (SELECT * FROM journal) SELECT * FROM events",
    "stored rows counted": "SELECT count(*) FROM policies",
    "transaction": "COMMIT",
    "tokenizer": "SELECT fts3_tokenizer('simple')",
    "long value": "SELECT zeroblob(1000000000)",
    "garbage": "\x00\udcff select ';--",
}


@pytest.mark.parametrize("sql", HOSTILE.values(), ids=HOSTILE)
def test_a_statement_that_does_not_only_read_the_tables_is_refused(store: str, sql: str) -> None:
    before = Path(store).read_bytes()

    # Python 3.10 cannot bound a value, only the result.
    wanted = LimitReached if sql == HOSTILE["long value"] and sys.version_info < (3, 11) else WrongArguments
    with pytest.raises(wanted) as refused:
        answer(store, sql)

    assert len(str(refused.value)) < 700
    assert Path(store).read_bytes() == before


def test_an_unknown_table_is_answered_with_those_that_there_are(store: str) -> None:
    with pytest.raises(WrongArguments, match=f"no such table: losses; there are {', '.join(TABLES)}"):
        answer(store, "SELECT * FROM losses")


@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
        "SELECT count(*) FROM metrics a, metrics b, metrics c, metrics d",
    ],
)
def test_a_statement_without_an_end_is_ended(store: str, sql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "QUERY_TIMEOUT", 0.3)

    with pytest.raises(LimitReached, match="took longer than"):
        answer(store, sql)


def test_a_result_that_is_too_large_is_refused_with_its_bounds(store: str) -> None:
    with pytest.raises(LimitReached, match="100,000 rows or 8 MiB"):
        answer(store, "SELECT a.step FROM metrics a, metrics b")
    with pytest.raises(LimitReached, match="100,000 rows or 8 MiB"):
        answer(store, "SELECT hex(zeroblob(5000000))")


def test_a_process_that_takes_too_much_memory_or_hangs_is_ended(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grows = """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 99)
        SELECT count(DISTINCT i || hex(zeroblob(7000000))) FROM n"""
    with pytest.raises(LimitReached, match=r"MiB of memory|took longer"):
        rows(store, grows)
    monkeypatch.setattr(query, "QUERY_TIMEOUT", 0.01)
    monkeypatch.setattr(query, "_GRACE", 0.0)
    with pytest.raises(LimitReached, match="took longer"):
        rows(store, "SELECT 1")


def test_the_weaver_answers_others_while_a_query_runs(weaver: WeaverProcess) -> None:
    asking, other = weaver.gateway(), weaver.gateway()
    slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 3000000) SELECT count(*) FROM n"
    other.ask("status")
    asking.send("ask", 1, "admin", "query", {"sql": slow})
    began = time.monotonic()

    waits = []
    for _ in range(20):
        asked = time.monotonic()
        other.ask("status")
        waits.append(time.monotonic() - asked)

    assert sorted(waits)[10] < 0.1
    assert asking.receive() == ["answer", 1, {"columns": ["count(*)"], "rows": [[3_000_000]], "types": [""]}]
    assert time.monotonic() - began < BOUND


async def test_too_many_queries_are_refused(store: str) -> None:
    many = [run_query(store, "SELECT 1") for _ in range(query.MAX_AT_ONCE + 1)]
    done = await asyncio.gather(*many, return_exceptions=True)

    assert [type(one) for one in done if isinstance(one, LoomError)] == [LimitReached]


async def test_a_store_in_memory_is_read_by_no_query() -> None:
    with pytest.raises(Unavailable):
        await run_query(":memory:", "SELECT 1")
