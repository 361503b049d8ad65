"""`Intake`: shares the weaver's event loop between users, and between what they send and everything else.

An event loop handles all sockets with data before it does anything else, and libuv looks for more data up to 48
times before that. With thousands of threadlets on a busy host, or with one session that floods the weaver with
questions, this takes seconds, in which nobody is answered, no commit begins, and no page gets anything. So the
intake handles data for `TURN` seconds at a time, a piece of one user, then a piece of the next. What is left waits
for the next turn, and nothing more is read from its connection until then: peers that send more than the weaver can
take wait in their own sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)

TURN = 0.005
"""Seconds for which data is handled before the event loop does other work."""

MAX_WAITING = 32 << 20
"""Bytes that may wait for the next turns; what comes on top of them is handled at once."""


class IntakeSource(ABC):
    """A connection that gives its data to an `Intake`."""

    user: str = ""
    """The user among whose connections this one waits; empty for the gateway, and while it is not known."""
    unhandled: bytes = b""
    """What waits for a turn, and was not begun. It belongs to the intake, as the next two do."""
    begun: Iterator[object] | None = None
    """The handling of data that waits for another turn."""
    at_end: Callable[[], object] | None = None
    """What to call once everything is handled, if no more will come."""

    @property
    def waits(self) -> bool:
        """Whether something of this source waits for a turn."""
        return bool(self.unhandled) or self.begun is not None

    @abstractmethod
    def handle(self, data: bytes) -> Iterator[object]:
        """Handle data in the order in which it was read, in pieces, and yield between two of them."""

    @abstractmethod
    def read(self, more: bool) -> None:
        """Read from the connection, or stop reading."""

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once."""


class Intake:
    """Handles data in turns: the users' one after the other, the oldest of each user first.

    Args:
        clock: seconds, which never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: dict[str, deque[IntakeSource]] = {}
        """The sources that wait, by user; the user whose turn is next comes first."""
        self._bytes = 0
        """How much waits, and was not begun."""
        self._end: float | None = None
        """When the turn ends; None before the first data of a turn."""

    def take(self, source: IntakeSource, data: bytes) -> None:
        """Handle data now, or in later turns."""
        now = self._clock()
        if self._end is None:
            self._end = now + TURN
            asyncio.get_running_loop().call_soon(self._next_turn)
        if source.waits or (now >= self._end and self._bytes < MAX_WAITING):
            self._put_off(source, data)
            return
        work = source.handle(data)
        for _ in work:
            if self._clock() >= self._end:
                source.begun = work
                self._wait(source)
                return

    def finish(self, source: IntakeSource, at_end: Callable[[], object]) -> None:
        """Call ``at_end`` when what waits of a source is handled. No more of it will come."""
        if source.waits:
            source.at_end = at_end
        else:
            at_end()

    def _put_off(self, source: IntakeSource, data: bytes) -> None:
        if not source.waits:
            self._wait(source)
        source.unhandled += data
        self._bytes += len(data)

    def _wait(self, source: IntakeSource) -> None:
        source.read(False)
        self._waiting.setdefault(source.user, deque()).append(source)

    def _next_turn(self) -> None:
        self._end = self._clock() + TURN
        while self._waiting:
            user, sources = next(iter(self._waiting.items()))
            del self._waiting[user]
            source = sources.popleft()
            if sources:
                self._waiting[user] = sources  # after the other users
            self._handle_piece(source)
            if self._clock() >= self._end:
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_turn)
        else:
            self._end = None

    def _handle_piece(self, source: IntakeSource) -> None:
        """Handle a piece of what waits of a source, which then waits for the next one, or is read again."""
        try:
            if source.begun is None:
                source.begun = source.handle(self._claim(source))
            if next(source.begun, self) is self:  # it has no further piece
                source.begun = None
        except Exception:  # noqa: BLE001 - a bug of Loom, of which the other sources must not hear
            _log.exception("a peer of the weaver is disconnected: what it sent cannot be handled")
            self._claim(source)
            source.begun = None
            source.abort()
        if source.waits:
            self._waiting.setdefault(source.user, deque()).append(source)
        elif source.at_end is not None:
            source.at_end()
        else:
            source.read(True)

    def _claim(self, source: IntakeSource) -> bytes:
        data, source.unhandled = source.unhandled, b""
        self._bytes -= len(data)
        return data
