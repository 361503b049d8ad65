"""`WeaverFeed`: events and updates of replicas and devices, over the weaver's WebSocket or by polling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from loom.control.operations import Ask
from loom.errors import GatewayUnreachable, NotAGateway, RateLimited, WeaverUnavailable
from loom.weaver.views import CHANGING_FIELDS, Away, Delta, Snapshot, WeaverEvent, WeaverUpdate
from loom_proxy.transport.websocket import NoUpgrade

if TYPE_CHECKING:
    from loom_proxy.weaver.watch import WeaverWatch


PAGE = 1000  # events that one request reads
EVERY = 1.0  # seconds between two requests without a WebSocket

_TRANSIENT = (WeaverUnavailable, GatewayUnreachable, NotAGateway, RateLimited)


class WeaverFeed:
    """The updates and the events of one weaver.

    Args:
        look: returns the state of all replicas and devices.
        transport: ``"websocket"``, ``"http"`` or ``"auto"``; see `loom_proxy.weaver.client.WeaverProxy`.
        socket: returns a watch over the weaver's WebSocket; None if there is none to try.
    """

    def __init__(
        self,
        transport: str,
        ask: Ask,
        look: Callable[[], Snapshot],
        socket: Callable[[], WeaverWatch] | None,
    ) -> None:
        self._transport = transport
        self._ask = ask
        self._look = look
        self._socket = None if transport == "http" else socket

    def watch(self, timeout: float | None) -> Iterator[WeaverUpdate]:
        if self._socket is not None:
            try:
                yield from self._socket().updates(timeout)
                return
            except NoUpgrade:  # only the first connection raises it, so nothing is read twice
                if self._transport != "auto":
                    raise
        yield from poll(self._look, self.after, timeout)

    async def watch_async(self, timeout: float | None) -> AsyncIterator[WeaverUpdate]:
        if self._socket is not None:
            try:
                async for update in self._socket().updates_async(timeout):
                    yield update
                return
            except NoUpgrade:
                if self._transport != "auto":
                    raise
        polled = poll(self._look, self.after, timeout)
        while (polled_update := await asyncio.to_thread(next, polled, None)) is not None:
            yield polled_update

    def events(self, after: int | None, follow: bool, *, limit: int, **wanted: Any) -> Iterator[WeaverEvent]:
        reader = _Reader(self, wanted)
        yield from reader.first(after, limit)
        if follow:
            for update in self.watch(None):
                yield from reader.new(update)

    async def events_async(
        self, after: int | None, follow: bool, *, limit: int, **wanted: str | None
    ) -> AsyncIterator[WeaverEvent]:
        reader = _Reader(self, wanted)
        for event in await asyncio.to_thread(list, reader.first(after, limit)):
            yield event
        if follow:
            async for update in self.watch_async(None):
                for event in await asyncio.to_thread(list, reader.new(update)):
                    yield event

    def page(self, **wanted: Any) -> list[WeaverEvent]:
        return [WeaverEvent.from_body(one) for one in self._ask("events", **wanted)]

    def after(self, after: int, **wanted: Any) -> Iterator[WeaverEvent]:
        while page := self.page(after=after, limit=PAGE, **wanted):
            yield from page
            after = page[-1].id
            if len(page) < PAGE:
                return


class _Reader:
    """A reader of events of a ``kind`` or a ``replica`` without a gap, first by requests and then from updates."""

    def __init__(self, feed: WeaverFeed, wanted: Mapping[str, Any]) -> None:
        self._feed = feed
        self._wanted = wanted
        self._last = 0

    def first(self, after: int | None, limit: int) -> Iterator[WeaverEvent]:
        """Read the events after the one with an id; for None, the newest ones."""
        if after is None:
            yield from self._noted(self._feed.page(after=None, limit=limit, **self._wanted))
        else:
            self._last = after
            yield from self._noted(self._feed.after(after, **self._wanted))

    def new(self, update: WeaverUpdate) -> Iterator[WeaverEvent]:
        if isinstance(update, Snapshot):  # a new connection begins: events may have been missed before it
            yield from self._noted(self._feed.after(self._last, **self._wanted))
        elif isinstance(update, WeaverEvent) and update.id > self._last:
            wanted = {name: self._wanted[name] for name in ("kind", "replica")}
            if all(value in (None, getattr(update, name)) for name, value in wanted.items()):
                yield update
            self._last = update.id

    def _noted(self, events: Iterable[WeaverEvent]) -> Iterator[WeaverEvent]:
        for event in events:
            self._last = event.id
            yield event


def poll(
    look: Callable[[], Snapshot],
    events: Callable[[int], Iterator[WeaverEvent]],
    timeout: float | None = None,
) -> Iterator[WeaverUpdate]:
    """Yield the present state, and then each change, until there was none for ``timeout`` seconds."""
    before: Snapshot | None = look()
    assert before is not None
    yield before
    last = int(before.status["event"])
    heard = time.monotonic()
    while timeout is None or time.monotonic() - heard < timeout:
        time.sleep(EVERY if timeout is None else min(EVERY, timeout))
        updates: list[WeaverUpdate] = []
        try:
            now = look()
            if before is None:
                updates.append(now)
            else:
                updates += events(last)
                updates += _differences(before, now)
        except _TRANSIENT as error:
            if before is None:
                continue
            now = None
            updates.append(Away(str(error)))
        for update in updates:
            if isinstance(update, WeaverEvent):
                last = update.id
            yield update
        if updates:
            heard = time.monotonic()
        if before is None and now is not None:
            last = int(now.status["event"])
        before = now


def _differences(before: Snapshot, now: Snapshot) -> Iterator[Delta]:
    replicas = {
        id: {name: getattr(one, name) for name in CHANGING_FIELDS}
        for id, one in now.replicas.items()
        if before.replicas.get(id) != one
    }
    devices = {
        uuid: one.status
        for uuid, one in now.devices.items()
        if one.status is not None and (uuid not in before.devices or before.devices[uuid].status != one.status)
    }
    if replicas or devices:
        yield Delta(replicas, devices)
