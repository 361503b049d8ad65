"""Commits that are written beside the event loop: what is read, sent and answered meanwhile; how large they are."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from loom.control.frame import pack_value
from loom.errors import ProtocolMismatch
from loom.process import tasks
from loom.token_file import ADMIN
from loom.weaver.server import pushes, user_weaver
from loom.weaver.storage import history, store
from loom.weaver.storage.events import EventStore
from loom.weaver.storage.history import CHUNK, MetricHistory
from loom.weaver.storage.store import ROWS, Commit, Store
from tests.unit.loom.weaver.bench import START, Bench, Threadlet
from tests.unit.loom.weaver.raw_threadlet import BOUND
from tests.unit.loom.weaver.test_serving import running


class SlowDisk:
    """Holds up each commit until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = threading.Event()
        """Set while a commit waits."""
        self.free = threading.Event()
        write = Store.write

        def hold(store: Store, commit: Commit) -> None:
            self.held.set()
            assert self.free.wait(BOUND)
            write(store, commit)

        monkeypatch.setattr(Store, "write", hold)

    async def holds(self) -> None:
        """Wait until a commit is held up."""
        assert await asyncio.to_thread(self.held.wait, BOUND)


async def test_a_slow_disk_delays_only_what_has_to_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        disk = SlowDisk(monkeypatch)
        noting = asyncio.ensure_future(
            weaver.client.ask("note", kind="seen", replica="train_0", data={"text": "now"})
        )
        await disk.holds()

        link.send("status", [[1, time.time(), 7, None, None, {"loss": 0.5}, None]])
        await weaver.until(lambda: weaver.admin.weaver.known.replicas["train_0"].step == 7)

        assert not noting.done()
        disk.free.set()
        assert await asyncio.wait_for(noting, BOUND) > 0
        assert await link.receive("stored") == ["stored", 1]
        assert [one["text"] for one in await weaver.client.ask("events", kind="seen")] == ["now"]


async def test_an_answer_that_was_asked_for_after_a_command_waits_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as weaver:
        await weaver.threadlet()
        disk = SlowDisk(monkeypatch)
        giving = asyncio.ensure_future(weaver.client.ask("command", kind="pause", target="*"))
        await disk.holds()
        reading = asyncio.ensure_future(weaver.client.ask("events", kind="command"))
        await weaver.until(lambda: bool(weaver.admin._answers_to_written[1:]))

        assert not giving.done()
        assert not reading.done()
        disk.free.set()
        assert (await asyncio.wait_for(giving, BOUND))["replicas"] == ["train_0"]
        assert [one["kind"] for one in await asyncio.wait_for(reading, BOUND)] == ["command"]


async def test_the_end_of_the_weaver_waits_for_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as weaver:
        await weaver.threadlet()
        disk = SlowDisk(monkeypatch)
        weaver.admin.weaver.note("seen", None, {}, START)
        weaver.admin.commit()
        await disk.holds()
        weaver.admin.weaver.note("seen", None, {}, START)
        threading.Timer(0.05, disk.free.set).start()

        weaver.admin.commit_now()

        kept = [event.kind for event in EventStore(weaver.admin._store).after(0, 100, kind="seen")]
        assert kept == ["seen", "seen"]
        assert not weaver.admin._writer.is_busy


async def test_commands_to_many_replicas_are_sent_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_weaver, "FRAMES_AT_ONCE", 2)
    async with running() as weaver:
        links = [await weaver.threadlet(f"train_{number}") for number in range(7)]

        for kind in ("pause", "resume"):
            await weaver.client.ask("command", kind=kind, target="*")

        for link in links:
            assert [(await link.receive("command"))[2] for _ in range(2)] == ["pause", "resume"]


async def test_what_happens_while_a_snapshot_is_packed_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "CHANGES_EVERY", 0.0)
    monkeypatch.setattr(tasks, "TURN", 0.0)  # a turn for each replica
    on, packed_snapshot = asyncio.Event(), pushes.packed_snapshot

    async def slowly(*arguments: Any) -> bytes:
        packed = await packed_snapshot(*arguments)
        await on.wait()
        return packed

    monkeypatch.setattr(pushes, "packed_snapshot", slowly)
    async with running() as weaver:
        first, *_, last = [await weaver.threadlet(f"train_{number}", devices=[]) for number in range(20)]
        async with weaver.client.watch(ADMIN, full=True) as watch:
            await weaver.until(lambda: weaver.admin.weaver.known.watching)
            (kept,) = weaver.admin._pushes._watches.values()
            first.send("status", [[1, time.time(), 7, None, None, {}, None]])
            last.send("bye", "done", "finished")
            await weaver.until(lambda: len(kept.held) >= 2)
            on.set()

            kind, snapshot = await asyncio.wait_for(watch.next(), BOUND)
            step, states = None, {one["id"]: one["state"] for one in snapshot["replicas"]}
            while step != 7 or states["train_19"] != "finished":
                _, update = await asyncio.wait_for(watch.next(), BOUND)
                step = update.get("changes", {}).get("replicas", {}).get("train_0", {}).get("step", step)
                if "event" in update and update["event"]["kind"] == "finished":
                    states[update["event"]["replica"]] = "finished"

    assert kind == "snapshot"
    assert list(states) == [f"train_{number}" for number in range(20)]
    assert not kept.held


def test_events_are_found_once_while_they_are_written() -> None:
    kept = Store(":memory:")
    log = EventStore(kept)
    first = log.append(START, "stalled", "train_0", step=3)
    found: list[list[dict[str, Any]]] = []

    def look() -> None:
        found.append([event.data for event in log.after(0, 10)])

    for amended in ({"stack": "in train()"}, {"stack": "in wait()"}):
        commit = kept.begin()
        log.write(commit)
        log.amend(first.id, **amended)
        look()
        kept.write(commit)
        look()
        commit.stored()
        look()

    assert found == [[{"step": 3, "stack": "in train()"}]] * 3 + [[{"step": 3, "stack": "in wait()"}]] * 3


def test_history_is_found_once_while_it_is_written() -> None:
    kept = Store(":memory:")
    recorded = MetricHistory(kept, write_after=0.0)
    for step in range(CHUNK + 3):
        recorded.record("train_0", kept.journal_id, START + step, step, {"loss": 1.0})
    found = []

    def look() -> None:
        found.append([step for _, step, _ in recorded.between("train_0", "loss")])

    commit = kept.begin()
    recorded.write(commit, START)
    look()
    kept.write(commit)
    look()
    commit.stored()
    look()

    assert found == [list(range(CHUNK + 3))] * 3


def test_what_is_due_at_once_is_written_by_and_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LEAST_WRITTEN", 3)
    bench = Bench(tmp_path / "store", save_after=5.0)
    threadlets = [Threadlet(bench, f"train_{number}", devices=[]) for number in range(20)]
    for step in range(CHUNK):
        for threadlet in threadlets:
            threadlet.seq += 1
            row = [threadlet.seq, bench.now, step, None, None, {"loss": 1.0}, None]
            bench.weaver.receive(threadlet, pack_value(["status", [row]]), bench.now)
    kept = bench.weaver.known.store

    def chunks() -> int:
        (count,) = kept.reader.execute("SELECT COUNT(*) FROM chunks").fetchone()
        return int(count)

    written, journal = [], []
    for _ in range(7):
        bench.commit()
        written.append(chunks())
        journal.append(len(list(kept.journal())))
        bench.now += 1.0

    assert written == [3, 6, 9, 12, 15, 18, 20]
    assert journal == [1, 1, 1, 1, 1, 1, 0]
    bench.restart()
    steps = [step for _, step, _ in bench.weaver.known.history.between("train_19", "loss")]
    assert steps == list(range(CHUNK))


def test_a_restart_finds_full_chunks_that_were_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LEAST_WRITTEN", 1)
    bench = Bench(tmp_path / "store")
    threadlets = [Threadlet(bench, f"train_{number}", devices=[]) for number in range(5)]
    for step in range(2 * CHUNK + 1):
        for threadlet in threadlets:
            threadlet.seq += 1
            row = [threadlet.seq, bench.now, step, None, None, {"loss": 1.0}, None]
            bench.weaver.receive(threadlet, pack_value(["status", [row]]), bench.now)
    bench.commit()

    bench.restart()

    for number in range(5):
        steps = [step for _, step, _ in bench.weaver.known.history.between(f"train_{number}", "loss")]
        assert steps == list(range(2 * CHUNK + 1))


def test_a_commit_of_many_rows_has_all_of_them() -> None:
    kept = Store(":memory:")
    for number in range(2 * ROWS + 1):
        kept.put("replicas", f"train_{number:05}", {"number": number})
    kept.write(kept.begin())
    for number in range(2 * ROWS):
        kept.drop("replicas", f"train_{number:05}")
    before = [row["number"] for _, row in kept.rows("replicas")]
    kept.write(kept.begin())

    assert before == list(range(2 * ROWS + 1))
    assert list(kept.rows("replicas")) == [(f"train_{2 * ROWS:05}", {"number": 2 * ROWS})]


def test_the_log_of_the_store_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CHECKPOINT_AFTER", 1 << 18)
    kept, sizes = Store(tmp_path / "store"), []
    for number in range(2000):
        kept.put("replicas", f"train_{number % 100}", {"text": os.urandom(1000).hex()})
        kept.write(kept.begin())
        if kept.checkpoint_due:
            kept.checkpoint()
            sizes.append((tmp_path / "store-wal").stat().st_size)

    assert len(sizes) > 10
    assert max(sizes) < 4 << 18


@pytest.mark.parametrize("kind", [b"\xa6status", b"\xd9\x06status"], ids=["as usual", "packed in another way"])
@pytest.mark.parametrize("sent_before", [0, 1], ids=["new", "partly known"])
def test_reports_are_there_after_a_restart_however_their_frame_was_packed(
    tmp_path: Path, kind: bytes, sent_before: int
) -> None:
    bench = Bench(tmp_path / "store")
    threadlet = Threadlet(bench, "train_0", devices=[])
    rows = [[number, bench.now, number, None, None, {"loss": float(number)}, None] for number in (1, 2, 3)]
    if sent_before:
        bench.weaver.receive(threadlet, pack_value(["status", rows[:1]]), bench.now)

    bench.weaver.receive(threadlet, b"\x92" + kind + pack_value(rows), bench.now)
    bench.commit()
    bench.restart()

    replica = bench.weaver.known.replicas["train_0"]
    assert (replica.seq, replica.step, replica.metrics) == (3, 3, {"loss": 3.0})
    assert [value for _, _, value in bench.weaver.known.history.between("train_0", "loss")] == [1.0, 2.0, 3.0]


def test_of_a_frame_with_a_refused_report_those_before_it_are_there_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    threadlet = Threadlet(bench, "train_0", devices=[])
    rows = [[1, bench.now, 1, None, None, {"loss": 1.0}, None], [2, bench.now, "two", None, None, {}, None]]

    with pytest.raises(ProtocolMismatch, match="step is a count"):
        bench.weaver.receive(threadlet, pack_value(["status", rows]), bench.now)
    bench.commit()
    bench.restart()

    assert bench.weaver.known.replicas["train_0"].seq == 1
