"""`UnreadAnswers`: answers of calls that were sent to a client whose program has not read them.

A result that has arrived on the laptop is lost with the laptop's program unless the driver has it still. So the
driver keeps each answer until the client tells that it was read. These answers are bounded, and nothing is said of
those that go: they had been delivered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from loom.wire.bodies import OperationError, OperationResult
from loom.wire.messages import Kind, Message
from loom_gateway.driver.clients.results import StoredResults, is_stored

MOST = 1 << 14  # answers that are kept unread
IN_MEMORY = 64 << 20  # bytes of them in memory, besides the newest; of older ones, large ones go to the disk
STORED_FROM = 256 << 10  # bytes of an answer that is worth the disk
OVERHEAD = 512  # bytes that an answer takes besides its payload

Answer: TypeAlias = "tuple[int, int | None]"  # the operation's id and, of several answers, the number
Request: TypeAlias = "tuple[int, Sequence[Any]]"


def answer_of(message: Message) -> Answer:
    """Return which answer a message is."""
    kind: Any = OperationResult if message.kind == Kind.RESULT else OperationError
    return message.id, kind.from_body(message.body).index


class UnreadAnswers:
    """The unread answers of one session's clients. Safe on any thread. ``results`` keeps large ones on the disk."""

    def __init__(self, results: StoredResults, loop: asyncio.AbstractEventLoop) -> None:
        self._results = results
        self._loop = loop
        self._lock = threading.Lock()  # guards all below
        self._kept: dict[Answer, tuple[Message, Request, int]] = {}  # each with its bytes; the oldest first
        self._bytes = 0  # of all of those
        self._moved: dict[Answer, tuple[Message, Request]] = {}  # older ones, which are or will be on the disk

    def keep(self, message: Message, call: Request) -> None:
        """Keep an answer of a call."""
        answer = (message.id, None) if len(message.body) == 1 else answer_of(message)
        size = _bytes(message)
        with self._lock:
            self._kept[answer] = message, call, size
            self._bytes += size
            if self._bytes > IN_MEMORY or len(self._kept) > MOST:
                self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest answers, or move them to the disk if they are large. With the lock held."""
        to_disk = []
        while len(self._kept) > 1 and (self._bytes > IN_MEMORY or len(self._kept) > MOST):
            oldest = next(iter(self._kept))
            message, call, size = self._kept.pop(oldest)
            self._bytes -= size
            if message.size >= STORED_FROM:
                self._moved[oldest] = message, call
                to_disk.append(oldest)
        if to_disk:  # on another thread, because a small answer may wait for this one
            self._loop.call_soon_threadsafe(self._loop.run_in_executor, None, self._move, to_disk)

    def _move(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            found = self._moved.get(answer)
            if found is None:
                continue  # it was read meanwhile
            stored = self._results.keep(found[0])
            with self._lock:
                if self._moved.pop(answer, None) is not None and stored is not None:
                    self._moved[answer] = stored, found[1]

    def read(self, answers: Iterable[Answer]) -> None:
        """Drop answers that were read."""
        with self._lock:
            for one in answers:
                self._pop(one)

    def replace(self, message: Message) -> None:
        """Keep an answer in another form, such as with its payload on the disk, if it is kept."""
        answer = answer_of(message)
        with self._lock:
            found = self._kept.get(answer)
            if found is not None:
                size = _bytes(message)
                self._bytes += size - found[2]
                self._kept[answer] = message, found[1], size

    def pop(self, message: Message) -> None:
        """Drop an answer that was not sent, if the message is one."""
        if message.kind in (Kind.RESULT, Kind.ERROR):
            with self._lock:
                self._pop(answer_of(message))

    def _pop(self, answer: Any) -> None:
        found = self._kept.pop(answer, None)
        if found is not None:
            self._bytes -= found[2]
        else:
            self._moved.pop(answer, None)

    def drop_oldest_stored(self) -> bool:
        """Drop the oldest answer on the disk. Return False if there is none."""
        with self._lock:
            kept: list[tuple[Answer, Any]] = [*self._moved.items(), *self._kept.items()]
            oldest = next((one for one, found in kept if _on_disk(found[0])), None)
            self._pop(oldest)
            return oldest is not None

    def take(self, belongs: Callable[[int], bool]) -> list[tuple[Message, Request]]:
        """Return and drop the answers to the operations of a client that is gone, the oldest first."""
        with self._lock:
            taken = [one for one in (*self._moved, *self._kept) if belongs(one[0])]
            found = [(self._moved.get(one) or self._kept[one])[:2] for one in taken]
            for one in taken:
                self._pop(one)
        return found


def _bytes(message: Message) -> int:
    parts = message.parts
    if len(parts) == 1 and len(parts[0]) < STORED_FROM:  # nearly always
        return OVERHEAD + len(parts[0])
    return OVERHEAD + sum(len(part) for part in parts if not is_stored(part))


def _on_disk(message: Message) -> bool:
    return any(map(is_stored, message.parts))
