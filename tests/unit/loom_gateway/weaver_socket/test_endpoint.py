"""The shared watch of a user: full readers and others, snapshots that cross, and readers that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import loom
from loom.token_file import ADMIN
from loom.weaver.server import pushes
from loom.wire.plain import exact_json
from loom_gateway.weaver_socket import endpoint as weaver_watches
from loom_gateway.weaver_socket import subscribers
from loom_gateway.weaver_socket.endpoint import WeaverWatches
from loom_gateway.weaver_socket.subscribers import FeedReader, Since, SubscribingReader
from tests.unit.loom.weaver.running import running
from tests.unit.loom_gateway.weaver_socket.replicas import info

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

    def snapshot(self, *replicas: dict[str, Any], **more: Any) -> None:
        body = {**SNAPSHOT, "replicas": list(replicas)}
        self._pushes.put_nowait(("snapshot", {**body, **({"more": more} if more else {})}))

    def push(self, **body: Any) -> None:
        self._pushes.put_nowait(("event", body))

    def fail(self, error: Exception) -> None:
        self._pushes.put_nowait(error)


class Page(SubscribingReader):
    """The reader of a page, which may see no sessions."""

    def own_part(self) -> dict[str, Any]:
        return {"sessions": []}


class Reader:
    """A reader whose messages a test takes."""

    def __init__(self, reader: FeedReader) -> None:
        self.reader = reader
        self.got: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sending = asyncio.ensure_future(reader.send_to(self._take))

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

    async def join(self, page: bool = False, since: Since | None = None) -> Reader:
        reader = Reader(Page(since) if page else FeedReader())
        reading = self.watches.reading("ann", "ann", reader.reader)
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
        for watch in list(self.watches._watches.values()):
            watch._end_feed()


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(weaver_watches, "BETWEEN_WATCHES", 0.0)
    made = Watched()
    yield made
    await made.close()


def at(message: dict[str, Any]) -> Since:
    return Since(message["feed"], message["at"])


@pytest.mark.guarantees(
    "weaver",
    "Readers of the weaver's feed share a watch, each user has at most 64, and what pages get in addition "
    "does not reach the others",
)
async def test_full_readers_get_more_and_others_do_not(watched: Watched) -> None:
    plain, full = await watched.join(), await watched.join(page=True)
    assert watched.weaver.asked == [False, True]
    watched.weaver.snapshot()
    assert await plain.next() == {"type": "snapshot", **SNAPSHOT}
    known = info("train_0")
    watched.weaver.snapshot(known, **MORE)
    shown = await full.next()
    assert (shown.pop("numbers"), shown.pop("at"), len(shown.pop("feed"))) == ([0], 1, 16)
    assert shown.pop("states")[0] == "registering"
    assert shown == {"type": "snapshot", **SNAPSHOT, "replicas": [known], **MORE, "sessions": []}

    watched.weaver.push(event={"id": 1}, more={"info": info("train_1")})
    watched.weaver.push(changes={"replicas": {}, "devices": {}}, more={"policies": {}})
    changed = {"train_0": {**known, "step": 1}, "train_1": {**known, "step": 2}}
    handlers = {"train_0": {"handlers": {"lr": "float"}, "links": {"mlflow": "https://mlflow/1"}}}
    watched.weaver.push(changes={"replicas": changed, "devices": {}}, more={"replicas": handlers})
    watched.weaver.push(changes={"replicas": changed, "devices": {}})
    watched.weaver.push(changes={"replicas": {}, "devices": {}}, more={"forgotten": ["train_0"]})
    watched.weaver.push(event={"id": 2})

    assert [await plain.next() for _ in range(4)] == [
        {"type": "event", "event": {"id": 1}},
        *[{"type": "delta", "replicas": changed, "devices": {}}] * 2,
        {"type": "event", "event": {"id": 2}},
    ]
    assert [await full.next() for _ in range(5)] == [
        {"type": "event", "event": {"id": 1}, "info": info("train_1"), "number": 1, "at": 2},
        {"type": "delta", "replicas": {}, "devices": {}, "policies": {}, "at": 3},
        {"type": "delta", "replicas": handlers, "devices": {}, "at": 4},
        {"type": "delta", "replicas": {}, "devices": {}, "forgotten": ["train_0"], "at": 6},
        {"type": "event", "event": {"id": 2}, "at": 7},
    ]


async def test_a_page_whose_socket_was_lost_gets_what_it_has_missed(watched: Watched) -> None:
    page = await watched.join(page=True)
    watched.weaver.snapshot(**MORE)
    began = await page.next()
    watched.weaver.push(event={"id": 1})
    last = await page.next()
    await watched.leave(page)
    watched.weaver.push(event={"id": 2})
    watched.weaver.push(changes={"replicas": {}, "devices": {"GPU-0": {}}}, more={"policies": {}})
    await watched.settle()

    again = await watched.join(page=True, since=Since(began["feed"], last["at"]))
    other = await watched.join(page=True, since=at(began))

    assert [await again.next() for _ in range(4)] == [
        {"type": "resumed", "feed": began["feed"], "at": 2},
        {"type": "event", "event": {"id": 2}, "at": 3},
        {"type": "delta", "replicas": {}, "devices": {}, "policies": {}, "at": 4},
        {"type": "delta", "replicas": {}, "devices": {}, "sessions": [], "at": 4},
    ]
    assert [(await other.next())["at"] for _ in range(5)] == [1, 2, 3, 4, 4]
    watched.weaver.push(event={"id": 3})
    assert await again.next() == await other.next() == {"type": "event", "event": {"id": 3}, "at": 5}
    assert (watched.weaver.watches, watched.weaver.asked) == (1, [True])


@pytest.mark.guarantees(
    "page data",
    "A page whose socket was lost goes on without loss or repetition, and nobody goes on with another "
    "user's feed or a revoked token",
)
@pytest.mark.parametrize("wrong", ["another feed", "a position to come", "one that is not kept any more"])
async def test_a_page_that_cannot_go_on_begins_anew(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(subscribers, "MAX_MESSAGES", 1)
    first = await watched.join(page=True)
    watched.weaver.snapshot(**MORE)
    began = at(await first.next())
    for id in (1, 2):
        watched.weaver.push(event={"id": id})
        await first.next()
    since = {
        "another feed": began._replace(feed="0a", at=3),
        "a position to come": began._replace(at=4),
        "one that is not kept any more": began,
    }[wrong]

    again = await watched.join(page=True, since=since)
    watched.weaver.snapshot(**MORE)

    assert (await again.next())["type"] == "snapshot"
    assert first.got.empty()


@pytest.mark.guarantees(
    "page data",
    "A page's subscription, its frames' rate, what is kept for resuming and a feed without pages are bounded",
)
async def test_a_feed_ends_some_time_after_its_last_page(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weaver_watches, "LINGER", 0.0)
    plain, page = await watched.join(), await watched.join(page=True)
    watched.weaver.snapshot(**MORE)
    watched.weaver.snapshot(**MORE)
    began = at(await page.next())
    await watched.leave(page)
    await asyncio.sleep(0.01)
    page = await watched.join(page=True, since=began)
    watched.weaver.snapshot(**MORE)
    assert (await page.next())["type"] == "snapshot"

    await watched.leave(page)
    await watched.leave(plain)
    await asyncio.sleep(0.01)
    assert not watched.watches._watches


async def test_a_page_that_comes_back_in_time_keeps_the_feed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = await watched.join(page=True)
    watched.weaver.snapshot(**MORE)
    began = at(await page.next())
    monkeypatch.setattr(weaver_watches, "LINGER", 0.05)
    await watched.leave(page)
    page = await watched.join(page=True, since=began)
    await asyncio.sleep(0.1)
    watched.weaver.push(event={"id": 1})

    assert [(await page.next())["type"] for _ in range(3)] == ["resumed", "delta", "event"]


async def test_the_feed_of_a_weaver_that_went_away_is_over(watched: Watched) -> None:
    page = await watched.join(page=True)
    watched.weaver.snapshot(info("train_0"), **MORE)
    began = at(await page.next())
    watched.weaver.fail(loom.WeaverUnavailable("killed"))
    assert (await page.next())["type"] == "away"
    await watched.settle()
    again = await watched.join(page=True, since=began)
    watched.weaver.snapshot(**MORE)
    watched.weaver.snapshot(**MORE)

    first, second = await page.next(), await again.next()
    assert (first["type"], second["type"], first["numbers"]) == ("snapshot", "snapshot", [])
    assert first["feed"] == second["feed"] != began.feed


async def test_a_weaver_that_goes_away_without_a_reader_ends_the_watch(watched: Watched) -> None:
    page = await watched.join(page=True)
    watched.weaver.snapshot(**MORE)
    await page.next()
    await watched.leave(page)
    assert watched.watches._watches
    watched.weaver.fail(loom.WeaverUnavailable("killed"))
    await watched.settle()

    assert not watched.watches._watches


async def test_a_full_reader_waits_for_a_full_snapshot_that_was_asked_for(watched: Watched) -> None:
    plain, full = await watched.join(), await watched.join(page=True)
    watched.weaver.snapshot()
    await plain.next()
    await watched.settle()

    assert full.got.empty()


async def test_a_full_reader_gets_what_an_older_weaver_has(watched: Watched) -> None:
    full = await watched.join(page=True)
    watched.weaver.snapshot()

    found = await full.next()
    assert {name: found[name] for name in ("type", *SNAPSHOT, "sessions")} == {
        "type": "snapshot", **SNAPSHOT, "sessions": []
    }  # fmt: skip


async def test_a_full_reader_that_comes_while_the_watch_is_opened_gets_a_full_snapshot(watched: Watched) -> None:
    watched.weaver.opening.clear()
    await watched.join()
    await watched.join(page=True)
    watched.weaver.opening.set()
    await watched.settle()

    assert watched.weaver.asked == [False, True]


async def test_a_full_watch_stays_one_and_begins_as_one_after_the_weaver_was_away(watched: Watched) -> None:
    full = await watched.join(page=True)
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

    async def slowly(body: dict[str, Any]) -> list[str]:
        encoding.set()
        await go_on.wait()
        return await encode(body)

    encode = weaver_watches._encode
    monkeypatch.setattr(weaver_watches, "_encode", slowly)
    leaving, staying = await watched.join(), await watched.join()
    watched.weaver.snapshot()
    await asyncio.wait_for(encoding.wait(), BOUND)
    await watched.leave(leaving)
    go_on.set()
    await staying.next()

    (shared,) = watched.watches._watches.values()
    assert list(shared._readers) == [staying.reader]


async def test_a_large_snapshot_is_written_once_and_item_by_item_for_all_pages(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def counted(value: Any) -> str:
        texts.append(exact_json(value))
        return texts[-1]

    monkeypatch.setattr(weaver_watches, "exact_json", counted)
    more = {
        "policies": {f"group-{number}": "stop" for number in range(500)},
        "handlers": {f"train_{number}": ["lr", "\u2603"] for number in range(500)},
        "events": [{"id": number, "kind": "note"} for number in range(500)],
        "goodput": [],
        "configs": {},
    }
    pages = [await watched.join(page=True) for _ in range(3)]
    watched.weaver.snapshot(**more)
    found = [await page.next() for page in pages]

    assert all({name: one[name] for name in more} == more for one in found)
    assert len(texts) < 1600
    assert max(map(len, texts)) < 100


async def test_a_watch_that_is_refused_ends_its_readers(watched: Watched) -> None:
    reader = await watched.join()
    watched.weaver.fail(loom.Denied("not you"))
    await watched.settle()

    with pytest.raises(loom.Denied, match="not you"):
        reader.reader.failed.result()
    another = await watched.join()
    await watched.leave(reader)
    watched.weaver.snapshot()
    assert (await another.next())["type"] == "snapshot"
    assert list(watched.watches._watches) == ["ann"]


async def test_a_real_weaver_tells_of_a_forgotten_replica_and_its_number_is_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pushes, "CHANGES_EVERY", 0.0)
    async with running() as weaver:
        weaver.admin.weaver.known._keep_ended = 0
        watches, page = WeaverWatches(weaver.client), Reader(Page())

        async def first_with(name: str) -> dict[str, Any]:
            while name not in (message := await page.next()):
                pass
            return message

        with watches.reading(ADMIN, ADMIN, page.reader):
            assert (await page.next())["numbers"] == []
            link = await weaver.threadlet("train_0")
            came = await first_with("info")
            link.send("bye", "done", "finished")
            forgotten = await first_with("forgotten")
            await weaver.threadlet("train_1")
            next_one = await first_with("info")
        watches._watches[ADMIN]._end_feed()
        await page.close()

    assert (came["info"]["id"], came["number"]) == ("train_0", 0)
    assert forgotten["forgotten"] == ["train_0"]
    assert (next_one["info"]["id"], next_one["number"]) == ("train_1", 0)
    assert came["at"] < forgotten["at"] < next_one["at"]
