"""Pages of one feed: what each gets of its subscription, and when."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from loom.process import tasks
from loom_gateway.weaver_socket import page_feed, replica_columns
from loom_gateway.weaver_socket.page_feed import PageFeed
from loom_gateway.weaver_socket.subscribers import PageSubscription, SubscribingReader
from tests.support.page_frames import Frame, read_frame
from tests.unit.loom_gateway.weaver_socket.replicas import info, reports

BOUND = 20.0


class Page:
    """A page, which takes its messages as long as it reads."""

    def __init__(self) -> None:
        self.reader = SubscribingReader()
        self.reads = asyncio.Event()
        self.reads.set()
        self._got: asyncio.Queue[Any] = asyncio.Queue()
        self._sending = asyncio.ensure_future(self.reader.send_to(self._take))

    async def _take(self, message: Any) -> None:
        await self.reads.wait()
        self._got.put_nowait(json.loads(message["text"]) if "text" in message else read_frame(message["bytes"]))

    def subscribe(self, **wanted: Any) -> None:
        self.reader.subscribe(PageSubscription(**wanted))

    async def next(self, wanted: Callable[[Any], bool]) -> Any:
        while True:
            message = await asyncio.wait_for(self._got.get(), BOUND)
            if wanted(message):
                return message

    async def frame(self) -> Frame:
        frame: Frame = await self.next(lambda message: isinstance(message, Frame))
        return frame

    async def delta(self) -> dict[str, Any]:
        """The next delta; frames are passed over."""
        found: dict[str, Any] = await self.next(lambda message: not isinstance(message, Frame))
        return found

    @property
    def waiting(self) -> int:
        return self._got.qsize()

    async def close(self) -> None:
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)


class Feed:
    """A feed with the replicas r0 to r7, and its pages."""

    def __init__(self) -> None:
        self.feed = PageFeed()
        self._pages: list[Page] = []

    async def page(self, **subscription: Any) -> Page:
        """A page with a snapshot."""
        made = Page()
        self._pages.append(made)
        made.subscribe(**subscription)
        self.feed.begin_for(made.reader, json.dumps({"type": "snapshot"}))
        assert await made.delta() == {"type": "snapshot"}
        return made

    async def take(self, more: Any = None, /, **replicas: dict[str, Any]) -> None:
        await self.feed.take({"changes": {"replicas": reports(**replicas), "devices": {}}}, more or {})

    async def take_devices(self, more: Any = None, /, **devices: Any) -> None:
        await self.feed.take({"changes": {"replicas": {}, "devices": devices}}, more or {})

    async def close(self) -> None:
        self.feed.close()
        for page in self._pages:
            await page.close()


@pytest.fixture
async def feed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Feed]:
    """A feed with short rounds, in which nothing goes wrong."""
    monkeypatch.setattr(page_feed, "ROUND", 0.01)
    monkeypatch.setattr(page_feed, "SOONEST_TEXT", 0.0)
    monkeypatch.setattr(page_feed, "MAX_RATE", math.inf)
    monkeypatch.setattr("loom_gateway.weaver_socket.replica_columns.MAX_SHARE", math.inf)
    died = tasks.died.total()
    made = Feed()
    await made.feed.take_snapshot([info(f"r{number}") for number in range(8)])
    yield made
    await made.close()
    assert tasks.died.total() == died


def steps(frame: Frame) -> dict[int, Any]:
    section = frame.section("step")
    assert section is not None
    return section.values


async def several_rounds() -> None:
    await asyncio.sleep(0.05)


async def test_a_dense_frame_comes_first_and_then_what_changes(feed: Feed) -> None:
    page = await feed.page(columns=["step", "state"])
    first = await page.frame()
    await feed.take(r3={"step": 2, "metrics": {"loss": 0.25}})
    second = await page.frame()

    assert [(one.column, one.dense, len(one.values)) for one in first.sections] == [
        ("state", True, 8), ("step", True, 8)
    ]  # fmt: skip
    assert [(one.column, one.dense, one.values) for one in second.sections] == [("step", False, {3: 2})]
    assert (first.position, second.position) == (1, 2)


async def test_a_column_that_is_subscribed_later_comes_dense_and_the_others_do_not(feed: Feed) -> None:
    page = await feed.page(columns=["step"])
    await page.frame()
    page.subscribe(columns=["step", "loss"])

    (section,) = (await page.frame()).sections
    assert (section.column, section.dense) == ("loss", True)


async def test_rows_and_aggregates_come_at_once_and_when_they_change(feed: Feed) -> None:
    page = await feed.page(rows=["r1", "nobody"], aggregates=True)
    first = await page.delta()
    await feed.take(r1={"step": 5})
    second = await page.delta()
    await feed.take(r2={"step": 6, "metrics": {"loss": math.nan}})
    third = await page.delta()

    assert first["replicas"] == reports(r1={})
    assert (first["aggregates"]["train"]["step"], first["at"]) == (1, 1)
    assert second["replicas"] == reports(r1={"step": 5})
    assert (second["aggregates"]["train"]["step"], second["at"]) == (5, 2)
    assert (third["replicas"], third["aggregates"]["train"]["not_finite"]) == ({}, 1)


async def test_a_row_that_comes_to_exist_comes_then(feed: Feed) -> None:
    page = await feed.page(rows=["new"])
    event = {"id": 1, "kind": "registered", "replica": "new"}
    await feed.feed.take({"event": event}, {"info": info("new", step=3)})

    described, row = await page.delta(), await page.delta()
    assert described == {"type": "event", "event": event, "info": info("new", step=3), "number": 8, "at": 2}
    assert row["replicas"] == reports(new={"step": 3})


async def test_a_replica_that_is_forgotten_is_pushed_and_leaves_a_hole(feed: Feed) -> None:
    page = await feed.page(aggregates=True)
    await page.delta()
    await feed.take({"forgotten": ["r2"]})

    forgotten, aggregates = await page.delta(), await page.delta()
    assert (forgotten["forgotten"], aggregates["aggregates"]["train"]["replicas"]) == (["r2"], 7)
    page.subscribe(columns=["state"])
    (section,) = (await page.frame()).sections
    assert [number for number, state in section.values.items() if state == 0x7F] == [2]


async def test_a_page_that_subscribes_to_nothing_gets_no_reports(feed: Feed) -> None:
    page, other = await feed.page(), await feed.page(columns=["step"])
    await other.frame()
    await feed.take(r1={"step": 5})
    await other.frame()

    assert page.waiting == 0


@pytest.mark.guarantees(
    "page data",
    "A page that reads too slowly gets the newest state and no more; pages with the same position share "
    "what is encoded",
)
async def test_readers_with_the_same_position_share_what_is_encoded(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    def encode(column: Any, values: Any, changed: list[int]) -> bytes:
        encoded.append((column, changed))
        return once(column, values, changed)

    once = replica_columns.encode_changed
    monkeypatch.setattr(replica_columns, "encode_changed", encode)
    pages = [await feed.page(columns=["step"]) for _ in range(5)]
    for page in pages:
        await page.frame()
    await several_rounds()
    await feed.take(r1={"step": 5})
    frames = [await page.frame() for page in pages]

    assert len(encoded) == 1
    assert all(steps(frame) == {1: 5} for frame in frames)


@pytest.mark.guarantees(
    "page data",
    "A page that reads too slowly gets the newest state and no more; pages with the same position share "
    "what is encoded",
)
async def test_a_page_that_reads_too_slowly_skips_frames_and_has_the_last_state_in_the_end(feed: Feed) -> None:
    page, other = await feed.page(columns=["step"], aggregates=True), await feed.page(columns=["step"])
    await page.frame()
    await page.delta()
    await other.frame()
    page.reads.clear()
    for step in range(2, 30):
        await feed.take(**{"r1": {"step": step}, f"r{step % 8}": {"step": step}})
        await other.frame()
    assert len(page.reader._waiting) <= 2
    page.reads.set()

    seen = {}
    while seen.get(1) != 29:
        seen |= steps(await page.frame())
    assert seen == {0: 24, 1: 29, 2: 26, 3: 27, 4: 28, 5: 29, 6: 22, 7: 23}
    assert not page.reader.failed.done()


@pytest.mark.guarantees(
    "page data",
    "A page's subscription, its frames' rate, what is kept for resuming and a feed without pages are bounded",
)
async def test_frames_take_no_more_than_their_share_of_the_line(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_feed, "MAX_RATE", 1000)
    page, began = await feed.page(columns=["step"]), asyncio.get_running_loop().time()
    size, steps_seen = 8 + 8 + 4 * 8, 0
    for step in range(2, 6):
        await feed.take(**{f"r{number}": {"step": step} for number in range(8)})
        steps_seen = steps(await page.frame())[7]

    assert steps_seen == 5
    assert asyncio.get_running_loop().time() - began >= 3 * size / 1000 - 0.005


async def test_a_page_that_changes_its_subscription_all_the_time_gets_no_more_frames(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_feed, "ROUND", 0.2)
    page, began = await feed.page(columns=["step"]), asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < began + 0.5:
        for columns in (["step"], ["loss"], []):
            page.subscribe(columns=columns)
            await asyncio.sleep(0)

    assert page.waiting <= 4


async def test_what_is_subscribed_to_stays_after_another_snapshot(feed: Feed) -> None:
    page = await feed.page(columns=["step"], rows=["r0"], aggregates=True)
    await page.frame()
    await page.delta()
    (reader,) = feed.feed.close()
    feed.feed = PageFeed()
    await feed.feed.take_snapshot([info("r0", step=77)])
    feed.feed.begin_for(reader, json.dumps({"type": "snapshot"}))

    assert steps(await page.frame()) == {0: 77}


async def test_the_status_of_a_device_comes_to_whom_it_is_shown_and_only_if_it_has_changed(feed: Feed) -> None:
    await feed.take_devices(g0={"utilization": 1}, g1={"utilization": 2})
    page, other = await feed.page(devices=["g0", "none"]), await feed.page(aggregates=True)

    assert (await page.delta())["devices"] == {"g0": {"utilization": 1}}
    await feed.take_devices(g0={"utilization": 1}, g1={"utilization": 3})
    page.subscribe(devices=["g0", "g1"])
    assert (await page.delta())["devices"] == {"g1": {"utilization": 3}}
    await feed.take_devices(g0={"utilization": 4})
    assert (await page.delta())["devices"] == {"g0": {"utilization": 4}}
    assert (await other.delta())["aggregates"]
    assert not other.waiting


async def test_a_device_that_was_forgotten_and_is_back_has_its_new_status(feed: Feed) -> None:
    page = await feed.page(devices=["g0"])
    await feed.take_devices(g0={"utilization": 1})
    assert (await page.delta())["devices"] == {"g0": {"utilization": 1}}

    await feed.take_devices({"device_states": {"g0": None}})
    assert (await page.delta())["device_states"] == {"g0": None}
    await feed.take_devices(g0={"utilization": 1})

    assert (await page.delta())["devices"] == {"g0": {"utilization": 1}}
