"""The readers of a feed: what a page has and subscribes to, and the messages that wait for each socket."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError
from starlette.types import Send

from loom.errors import LoomError, WatcherTooSlow, WrongArguments
from loom_gateway.weaver_socket.replica_columns import NAMES, Column

MAX_ROWS = 200
"""Replicas of which a page gets whole changes, and devices of which it gets the status."""

Identity = Annotated[str, Field(min_length=1, max_length=500)]


class PageSubscription(BaseModel, extra="forbid"):
    """The part of replicas' reports that a page gets."""

    aggregates: bool = False
    columns: Annotated[list[str], Field(max_length=len(NAMES))] = []
    """Names of `loom_gateway.weaver_socket.replica_columns.Column`."""
    rows: Annotated[list[Identity], Field(max_length=MAX_ROWS)] = []
    """Ids of replicas of which all changes come; one that does not exist may come to exist."""
    devices: Annotated[list[Identity], Field(max_length=MAX_ROWS)] = []
    """Uuids of devices whose status comes, likewise."""


def read_subscription(message: Mapping[str, Any]) -> PageSubscription:
    """Return the subscription that a message asks for. Raise `WrongArguments` if its fields make no sense."""
    fields = {name: value for name, value in message.items() if name not in ("type", "id")}
    try:
        found = PageSubscription.model_validate(fields, strict=True)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise WrongArguments(f"the subscription makes no sense: {wrong[:2000]}") from None
    unknown = [name for name in found.columns if name not in NAMES]
    if unknown:
        raise WrongArguments(f"there is no column {unknown[0]!r:.80}; there are {', '.join(NAMES)}")
    return found


class ShownSubscription:
    """A page's subscription, with the position up to which the page has each part; None for a part that is new."""

    def __init__(self) -> None:
        self.aggregates = False
        self.aggregates_at: int | None = None
        self.columns: dict[Column, int | None] = {}
        self.rows: dict[str, int | None] = {}
        self.devices: dict[str, int | None] = {}
        self.changed = False
        """True if a part is new, which is sent without waiting for the next round."""

    def __bool__(self) -> bool:
        return bool(self.aggregates or self.columns or self.rows or self.devices)

    def subscribe(self, wanted: PageSubscription) -> None:
        """Replace the subscription. Unchanged values of a part that stays are not sent again."""
        columns = {NAMES[name]: self.columns.get(NAMES[name]) for name in wanted.columns}
        self.columns = {column: columns[column] for column in sorted(columns)}
        self.rows = {id: self.rows.get(id) for id in wanted.rows}
        self.devices = {uuid: self.devices.get(uuid) for uuid in wanted.devices}
        self.aggregates_at = self.aggregates_at if self.aggregates and wanted.aggregates else None
        self.aggregates = wanted.aggregates
        self.changed = True

    def forget(self) -> None:
        """Note that the page has nothing: a snapshot of another feed comes."""
        self.aggregates_at = None
        self.columns = dict.fromkeys(self.columns)
        self.rows = dict.fromkeys(self.rows)
        self.devices = dict.fromkeys(self.devices)
        self.changed = True


MAX_MESSAGES = 5000
"""Messages of one feed that are kept."""

MAX_SIZE = 4 << 20
"""Characters of these messages together."""


class Since(NamedTuple):
    """The last message that a page took, before its socket was lost."""

    feed: str
    at: int

    @classmethod
    def read(cls, text: str | None) -> Since | None:
        """Return what the ``since`` of an address says, ``FEED.POSITION``; None if it makes no sense."""
        found = re.fullmatch(r"([0-9a-f]{1,64})\.([0-9]{1,18})", text or "")
        return None if found is None else cls(found[1], int(found[2]))


class KeptMessages:
    """The newest messages of a feed, by position."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, str]] = deque()
        self._size = 0
        self.begins = 0
        """The position after which every message is kept."""

    def begin(self, at: int) -> None:
        """Keep the messages after a position."""
        self._kept.clear()
        self._size, self.begins = 0, at

    def add(self, at: int, text: str) -> None:
        self._kept.append((at, text))
        self._size += len(text)
        while len(self._kept) > MAX_MESSAGES or self._size > MAX_SIZE:
            self.begins, oldest = self._kept.popleft()
            self._size -= len(oldest)

    def after(self, at: int) -> Iterator[tuple[int, str]]:
        """Yield the position and the text of each kept message after a position."""
        return ((position, text) for position, text in self._kept if position > at)


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
        """True if the last state still waits, so that another one would only wait behind it."""
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

    def own_part(self) -> Mapping[str, object]:
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
