"""`Intake`: shares the weaver's event loop between what thousands of threadlets send and everything else.

An event loop handles all sockets with data before it does anything else, and libuv looks for more data up to 48
times before that. With thousands of threadlets on a busy host this takes seconds, in which nobody is answered, no
commit begins, and no page gets anything. So the intake handles data for `TURN` seconds at a time. What comes after
that waits for the next turn, and nothing more is read from its threadlet until then: threadlets that send more than
the weaver can take wait in their own sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)

TURN = 0.005
"""Seconds for which data is handled before the event loop does other work."""

MAX_WAITING = 32 << 20
"""Bytes that may wait for the next turns; what comes on top of them is handled at once."""


class Source(ABC):
    """A connection that gives its data to an `Intake`."""

    unhandled: bytes = b""
    """What waits for a turn; it belongs to the intake."""

    @abstractmethod
    def handle(self, data: bytes) -> None:
        """Handle data in the order in which it was read."""

    @abstractmethod
    def read(self, more: bool) -> None:
        """Read from the connection, or stop reading."""

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once."""


class Intake:
    """Handles data in turns, the oldest first.

    Args:
        clock: seconds, which never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: deque[Source] = deque()
        self._bytes = 0
        """How much waits."""
        self._end: float | None = None
        """When the turn ends; None before the first data of a turn."""

    def take(self, source: Source, data: bytes) -> None:
        """Handle data now, or in a later turn."""
        now = self._clock()
        if self._end is None:
            self._end = now + TURN
            asyncio.get_running_loop().call_soon(self._next_turn)
        if source.unhandled or (now >= self._end and self._bytes < MAX_WAITING):
            self._put_off(source, data)
        else:
            source.handle(data)

    def finish(self, source: Source) -> None:
        """Handle what waits of a source, of which no more will come."""
        data = self._claim(source)
        if data:
            source.handle(data)

    def _put_off(self, source: Source, data: bytes) -> None:
        if not source.unhandled:
            self._waiting.append(source)
            source.read(False)
        source.unhandled += data
        self._bytes += len(data)

    def _claim(self, source: Source) -> bytes:
        data, source.unhandled = source.unhandled, b""
        self._bytes -= len(data)
        return data

    def _next_turn(self) -> None:
        self._end = self._clock() + TURN
        while self._waiting:
            source = self._waiting.popleft()
            if data := self._claim(source):  # else it has finished
                self._handle(source, data)
            if self._clock() >= self._end:
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_turn)
        else:
            self._end = None

    def _handle(self, source: Source, data: bytes) -> None:
        try:
            source.handle(data)
            source.read(True)
        except Exception:  # noqa: BLE001 - a bug of Loom, of which the other sources must not hear
            _log.exception("a threadlet is disconnected: what it sent cannot be handled")
            source.abort()
