"""One watch of the weaver for each watched user, shared by everyone who watches that user's replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import Send

from loom.errors import LimitReached, LoomError, WatcherTooSlow, WeaverUnavailable
from loom.process import tasks
from loom.weaver.client import Watch, WeaverClient
from loom_gateway.rest.exact_json import exact_json

MAX_WAITING = 8 << 20  # characters that may wait for a reader, in addition to the last snapshot
MAX_READERS = 64  # readers of one user at the same time
BETWEEN_WATCHES = 0.2  # the shortest pause in seconds between two watches of the weaver for one user


class FeedReader:
    """Messages that wait for one reader."""

    full = False
    """Whether the reader gets full snapshots and changes; see `loom.weaver.client.Watch.refresh`."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the reason when the reader gets no more messages."""
        self._texts: deque[str] = deque()
        self._size = 0  # characters in `_texts`
        self._limit = MAX_WAITING
        self._some = asyncio.Event()

    def own_part(self) -> dict[str, Any]:
        """Return what this reader's snapshot has in addition to that of others."""
        return {}

    def add(self, text: str, is_snapshot: bool = False) -> None:
        if is_snapshot:
            self._limit = MAX_WAITING + len(text)
        self._size += len(text)
        if self._size > self._limit:
            self.fail(
                WatcherTooSlow(f"more than {MAX_WAITING >> 20} MiB waited for this reader: read faster, or less")
            )
            return
        self._texts.append(text)
        self._some.set()

    def fail(self, error: LoomError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def send_to(self, send: Send) -> None:
        """Send the waiting messages, forever."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._texts:
                text = self._texts.popleft()
                await send({"type": "websocket.send", "text": text})
                self._size -= len(text)


class WeaverWatches:
    """The watches of all watched users."""

    def __init__(self, weaver: WeaverClient) -> None:
        self._weaver = weaver
        self._watches: dict[str, _SharedWatch] = {}
        self._readers: Counter[str] = Counter()  # by the user who reads

    @contextmanager
    def reading(self, by: str, user: str, reader: FeedReader) -> Iterator[None]:
        """Give a reader a snapshot of a user's replicas and devices, and then each change.

        Raises:
            LimitReached: ``by`` has as many readers as a user may have.
        """
        if self._readers[by] >= MAX_READERS:
            raise LimitReached(
                f"{MAX_READERS} programs watch the weaver as {by!r} already: close one of them first"
            )
        self._readers[by] += 1
        watch = self._watches.setdefault(user, _SharedWatch(self._weaver, user))
        watch.join(reader)
        try:
            yield
        finally:
            if watch.leave(reader) and self._watches.get(user) is watch:
                del self._watches[user]
            self._readers[by] -= 1
            if not self._readers[by]:
                del self._readers[by]


class _SharedWatch:
    """One watch, and its readers. Each message is encoded once, or twice if full readers get more than others."""

    def __init__(self, weaver: WeaverClient, user: str) -> None:
        self._weaver = weaver
        self._user = user
        self._readers: dict[FeedReader, None] = {}
        self._new: dict[FeedReader, None] = {}  # readers that have no snapshot yet
        self._watch: Watch | None = None
        self._asked = 0  # snapshots that are on their way
        self._full = False  # whether the last of them, and the changes after it, are full
        self._task: asyncio.Task[Any] | None = None

    def join(self, reader: FeedReader) -> None:
        self._new[reader] = None
        if self._task is None:
            self._task = tasks.run("watch the weaver", self._run())
        elif self._watch is not None and (not self._asked or self._lacks_full):
            self._ask(self._watch)

    def leave(self, reader: FeedReader) -> bool:
        """Forget a reader; return whether it was the last, with which the watch ends."""
        self._readers.pop(reader, None)
        self._new.pop(reader, None)
        if self._readers or self._new or self._task is None:
            return False
        self._task.cancel()
        return True

    @property
    def _lacks_full(self) -> bool:
        """Whether there are full readers, but no full snapshot was asked for."""
        return not self._full and any(reader.full for reader in [*self._readers, *self._new])

    def _ask(self, watch: Watch) -> None:
        """Ask for another snapshot."""
        self._asked += 1
        self._full = self._full or self._lacks_full
        with contextlib.suppress(WeaverUnavailable):  # the next watch begins with a snapshot
            watch.refresh(self._full)

    async def _run(self) -> None:
        while True:
            try:
                self._full = False
                self._full = self._lacks_full
                async with self._weaver.watch(self._user, self._full) as self._watch:
                    self._asked = 1
                    self._new |= self._readers
                    self._readers = {}
                    if self._lacks_full:  # one came while the watch was opened
                        self._ask(self._watch)
                    while True:
                        await self._pass_on(*await self._watch.next())
            except WeaverUnavailable as error:
                text = exact_json({"type": "away", "reason": str(error)})
                for reader in [*self._readers, *self._new]:
                    reader.add(text)
            except LoomError as error:
                for reader in [*self._readers, *self._new]:
                    reader.fail(error)
                return
            finally:
                self._watch = None
            await asyncio.sleep(BETWEEN_WATCHES)
            await self._weaver.available()

    async def _pass_on(self, kind: str, body: dict[str, Any]) -> None:
        more = body.pop("more", {})
        if kind == "snapshot":
            await self._pass_snapshot(body, more)
            return
        plain = full = None
        for reader in self._readers:
            if reader.full and more:
                full = full or exact_json(_full_message(body, more))
                reader.add(full)
            elif _says_anything(body):
                plain = plain or exact_json(_message(body))
                reader.add(plain)

    async def _pass_snapshot(self, body: dict[str, Any], more: dict[str, Any]) -> None:
        self._asked -= 1
        # A full reader waits for the last snapshot if this one was asked for before the reader came.
        new = [reader for reader in self._new if more or not reader.full or not self._asked]
        # A large one takes long, and this loop relays every session's calls.
        text = await asyncio.to_thread(exact_json, {"type": "snapshot", **body})
        full = _joined(text, await asyncio.to_thread(exact_json, more)) if more else text
        for reader in new:
            if reader not in self._new:  # it has left meanwhile
                continue
            del self._new[reader]
            shared = full if reader.full else text
            reader.add(_joined(shared, exact_json(reader.own_part())), is_snapshot=True)
            self._readers[reader] = None


def _says_anything(body: dict[str, Any]) -> bool:
    """Return whether a push has anything for readers that are not full."""
    return "event" in body or any(body["changes"].values())


def _message(body: dict[str, Any]) -> dict[str, Any]:
    if "event" in body:
        return {"type": "event", "event": body["event"]}
    return {"type": "delta", **body["changes"]}


def _full_message(body: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    message = _message(body)
    described = {"replicas": {**message["replicas"], **more["replicas"]}} if "replicas" in more else {}
    return {**message, **more, **described}


def _joined(text: str, more: str) -> str:
    """Return the JSON of an object with the items of another; neither is decoded."""
    return text if more == "{}" else f"{text[:-1]}, {more[1:]}"
