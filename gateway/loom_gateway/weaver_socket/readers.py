"""The readers of a feed: the messages that wait for each socket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from starlette.types import Send

from loom.errors import LoomError, WatcherTooSlow
from loom_gateway.weaver_socket.resuming import Since
from loom_gateway.weaver_socket.subscriptions import PageSubscription, ShownSubscription

MAX_WAITING = 8 << 20  # characters that may wait for a reader, in addition to the last snapshot


class FeedReader:
    """Messages that wait for one reader."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the reason when the reader gets no more messages."""
        self._waiting: deque[tuple[str | bytes, bool]] = deque()
        """The messages, each with whether it is a state: see `add_state`."""
        self._size = 0  # characters in `_waiting`, without states
        self._states = 0  # states that the reader has not taken
        self._limit = MAX_WAITING
        self._some = asyncio.Event()

    def add(self, text: str, is_snapshot: bool = False) -> None:
        if is_snapshot:
            self._limit = MAX_WAITING + len(text)
        self._size += len(text)
        if self._size > self._limit:
            self.fail(
                WatcherTooSlow(f"more than {MAX_WAITING >> 20} MiB waited for this reader: read faster, or less")
            )
            return
        self._waiting.append((text, False))
        self._some.set()

    def fail(self, error: LoomError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    @property
    def is_behind(self) -> bool:
        """Whether the last state still waits, so that another one would only wait behind it."""
        return self._states > 0

    def add_state(self, message: str | bytes) -> None:
        """Add a message that needs no other before it; add none while the reader is behind."""
        self._states += 1
        self._waiting.append((message, True))
        self._some.set()

    async def send_to(self, send: Send) -> None:
        """Send the waiting messages, forever."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._waiting:
                message, is_state = self._waiting.popleft()
                await send({"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message})
                if is_state:
                    self._states -= 1
                else:
                    self._size -= len(message)


class SubscribingReader(FeedReader):
    """The reader of a page: it gets full snapshots, events and changes with positions, and what it subscribes to.

    Args:
        since: the last message that the page took from the socket before this one.
    """

    def __init__(self, since: Since | None = None) -> None:
        super().__init__()
        self.since = since
        self.shown = ShownSubscription()
        self.at = 0
        """The position of the last message."""
        self.frame_due = self.text_due = 0.0
        """When the next frame, and the next text with what the page subscribes to, may be sent."""
        self.wake: Callable[[], None] = _nothing
        """Makes the feed, once there is one, look at a new subscription."""

    def own_part(self) -> dict[str, Any]:
        """Return what this reader's snapshot has in addition to that of others."""
        return {}

    def subscribe(self, wanted: PageSubscription) -> None:
        self.shown.subscribe(wanted)
        self.wake()

    def add_at(self, at: int, text: str, is_snapshot: bool = False) -> None:
        """Add the message of a position."""
        self.at = at
        self.add(text, is_snapshot)


def _nothing() -> None:
    """Do nothing."""
