"""The shared watch of a user: full readers and others, snapshots that cross, and readers that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import loom
from loom_gateway.weaver_socket import watches as weaver_watches
from loom_gateway.weaver_socket.watches import FeedReader, WeaverWatches

BOUND = 20.0
SNAPSHOT = {"status": {}, "replicas": [], "devices": []}
MORE = {"policies": {"train": "stop"}}


class Weaver:
    """Stands in for a weaver's client and its watch, which pushes what a test says."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        """For each snapshot that was asked for, whether it is a full one."""
        self.opening = asyncio.Event()
        self.opening.set()
        self.watches = 0
        self._pushes: asyncio.Queue[Any] = asyncio.Queue()

    @asynccontextmanager
    async def watch(self, user: str, full: bool) -> AsyncIterator[Weaver]:
        self.watches += 1
        await self.opening.wait()
        self.asked.append(full)
        yield self

    def refresh(self, full: bool) -> None:
        self.asked.append(full)

    async def next(self) -> tuple[str, dict[str, Any]]:
        push = await self._pushes.get()
        if isinstance(push, Exception):
            raise push
        return push  # type: ignore[no-any-return]

    async def available(self) -> None:
        """It is there at once."""

    def snapshot(self, **more: Any) -> None:
        self._pushes.put_nowait(("snapshot", {**SNAPSHOT, **({"more": more} if more else {})}))

    def push(self, **body: Any) -> None:
        self._pushes.put_nowait(("event", body))

    def fail(self, error: Exception) -> None:
        self._pushes.put_nowait(error)


class Reader(FeedReader):
    """A reader whose messages a test takes."""

    def __init__(self, full: bool = False) -> None:
        super().__init__()
        self.full = full
        self.got: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sending = asyncio.ensure_future(self.send_to(self._take))

    def own_part(self) -> dict[str, Any]:
        return {"sessions": []} if self.full else {}

    async def _take(self, message: Any) -> None:
        self.got.put_nowait(json.loads(message["text"]))

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.got.get(), BOUND)

    async def close(self) -> None:
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)


class Watched:
    """Readers of one user."""

    def __init__(self) -> None:
        self.weaver = Weaver()
        fake: Any = self.weaver
        self.watches = WeaverWatches(fake)
        self._readers: list[tuple[Reader, Any]] = []

    async def join(self, full: bool = False) -> Reader:
        reader = Reader(full)
        reading = self.watches.reading("ann", "ann", reader)
        reading.__enter__()
        self._readers.append((reader, reading))
        await self.settle()
        return reader

    async def leave(self, reader: Reader) -> None:
        (held,) = [one for one in self._readers if one[0] is reader]
        self._readers.remove(held)
        held[1].__exit__(None, None, None)
        await reader.close()

    async def settle(self) -> None:
        """Let everything happen that can."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for reader, _ in list(self._readers):
            await self.leave(reader)


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(weaver_watches, "BETWEEN_WATCHES", 0.0)
    made = Watched()
    yield made
    await made.close()


async def test_full_readers_get_more_and_others_do_not(watched: Watched) -> None:
    plain, full = await watched.join(), await watched.join(full=True)
    assert watched.weaver.asked == [False, True]
    watched.weaver.snapshot()
    assert await plain.next() == {"type": "snapshot", **SNAPSHOT}
    watched.weaver.snapshot(**MORE)
    assert await full.next() == {"type": "snapshot", **SNAPSHOT, **MORE, "sessions": []}

    watched.weaver.push(event={"id": 1}, more={"info": {"id": "train_0"}})
    watched.weaver.push(changes={"replicas": {}, "devices": {}}, more={"policies": {}})
    both = {"train_0": {"step": 1, "handlers": {"lr": "float"}}}
    watched.weaver.push(
        changes={"replicas": {"train_0": {"step": 1}, "train_1": {"step": 2}}, "devices": {}},
        more={"replicas": both},
    )
    watched.weaver.push(event={"id": 2})

    assert [await plain.next() for _ in range(3)] == [
        {"type": "event", "event": {"id": 1}},
        {"type": "delta", "replicas": {"train_0": {"step": 1}, "train_1": {"step": 2}}, "devices": {}},
        {"type": "event", "event": {"id": 2}},
    ]
    assert [await full.next() for _ in range(4)] == [
        {"type": "event", "event": {"id": 1}, "info": {"id": "train_0"}},
        {"type": "delta", "replicas": {}, "devices": {}, "policies": {}},
        {"type": "delta", "replicas": {**both, "train_1": {"step": 2}}, "devices": {}},
        {"type": "event", "event": {"id": 2}},
    ]


async def test_a_full_reader_waits_for_a_full_snapshot_that_was_asked_for(watched: Watched) -> None:
    plain, full = await watched.join(), await watched.join(full=True)
    watched.weaver.snapshot()
    await plain.next()
    await watched.settle()

    assert full.got.empty()


async def test_a_full_reader_gets_what_an_older_weaver_has(watched: Watched) -> None:
    full = await watched.join(full=True)
    watched.weaver.snapshot()

    assert await full.next() == {"type": "snapshot", **SNAPSHOT, "sessions": []}


async def test_a_full_reader_that_comes_while_the_watch_is_opened_gets_a_full_snapshot(watched: Watched) -> None:
    watched.weaver.opening.clear()
    await watched.join()
    await watched.join(full=True)
    watched.weaver.opening.set()
    await watched.settle()

    assert watched.weaver.asked == [False, True]


async def test_a_full_watch_stays_one_and_begins_as_one_after_the_weaver_was_away(watched: Watched) -> None:
    full = await watched.join(full=True)
    watched.weaver.snapshot(**MORE)
    await full.next()
    await watched.join()
    assert watched.weaver.asked == [True, True]

    watched.weaver.fail(loom.WeaverUnavailable("killed"))

    assert await full.next() == {"type": "away", "reason": "killed"}
    await asyncio.sleep(0)
    await watched.settle()
    assert watched.weaver.watches == 2
    assert watched.weaver.asked == [True, True, True]


async def test_a_reader_that_leaves_while_its_snapshot_is_encoded_is_forgotten(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, go_on = asyncio.Event(), asyncio.Event()

    async def in_a_thread(encode: Any, value: Any) -> str:
        encoding.set()
        await go_on.wait()
        return str(encode(value))

    monkeypatch.setattr(weaver_watches.asyncio, "to_thread", in_a_thread)
    leaving, staying = await watched.join(), await watched.join()
    watched.weaver.snapshot()
    await asyncio.wait_for(encoding.wait(), BOUND)
    await watched.leave(leaving)
    go_on.set()
    await staying.next()

    (shared,) = watched.watches._watches.values()
    assert list(shared._readers) == [staying]


async def test_a_watch_that_is_refused_ends_its_readers(watched: Watched) -> None:
    reader = await watched.join()
    watched.weaver.fail(loom.Denied("not you"))
    await watched.settle()

    with pytest.raises(loom.Denied, match="not you"):
        reader.failed.result()
