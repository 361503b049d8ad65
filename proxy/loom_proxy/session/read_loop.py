"""The read loop of a connection, which its reader thread runs or a thread that waits for an answer.

An answer that the reader thread takes in costs a switch to the thread that waits for it: on a cold processor, as
much as sending the call. So a thread that waits reads inline, by itself, while no other thread waits for anything;
the reader thread rests meanwhile. The reader thread reads again when another thread waits, or when no thread has
read for `REST` seconds. Events and log lines, which no thread waits for, are thus at most that late.

Ctrl-C, or the interrupt of a notebook's cell, does not break off an `Uninterrupted` block. Python raises
KeyboardInterrupt in the main thread between any two instructions. Between taking a frame from the stream and
noting how much of it was sent, that would lose the frame, and with it the session.
"""

from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from loom.wire.sockets import Waker

# The C module: `signal` wraps its functions to return enums, which takes longer than the rest of a block.
_signal: Any = import_module("_signal")
_handler, _handle = _signal.getsignal, _signal.signal
_SIGINT = int(signal.SIGINT)
_get_ident, _main_thread = threading.get_ident, threading.main_thread


class Uninterrupted:
    """A ``with`` block that a SIGINT does not interrupt: a signal that comes meanwhile is handled at its end.

    Only for blocks that do not wait, or that check `came` often. Outside the main thread, in which alone Python
    handles signals, it does nothing.
    """

    __slots__ = ("_previous", "came")

    def __init__(self) -> None:
        self.came = False
        self._previous: Any = None

    def __enter__(self) -> Uninterrupted:
        if _get_ident() == _main_thread().ident:
            previous = _handler(_SIGINT)
            if previous is not None:  # None: a handler that C code installed, which could not be put back
                _handle(_SIGINT, self._note)
                self._previous = previous
        return self

    def _note(self, number: int, frame: object) -> None:
        self.came = True

    def __exit__(self, *error: object) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            _handle(_SIGINT, previous)
            if self.came:
                signal.raise_signal(signal.SIGINT)


REST = 0.005  # seconds without a reading thread after which the reader thread reads again

LOOK = 0.05
"""Seconds after which an inline read checks for a cancellation or Ctrl-C, neither of which comes by the socket."""


class FrameSource(Protocol):
    """The connection that a `ReadLoop` reads from."""

    def fileno(self) -> int:
        """Return the descriptor to poll for reading; -1 if `select.poll` cannot wait for this source."""

    def read(self, wait: bool) -> bool:
        """Take in what has come; with ``wait``, wait a while for it. Return False at the end of the source."""

    @property
    def away(self) -> bool:
        """True if the source is lost until `reconnect`."""

    def reconnect(self) -> bool:
        """Restore a lost source, waiting for it if need be; return False if it has ended for good."""


class ReadLoop:
    """A loop in which one thread at a time reads from a source, until the source ends.

    The ``waker`` wakes the reading thread when another connection has brought something to take in.
    """

    def __init__(self, source: FrameSource, waker: Waker | None = None) -> None:
        self._source = source
        self._waker = waker
        self._turn = threading.Lock()
        self._waiters: set[object] = set()
        """Futures and receivers that threads and event loops wait for without reading inline."""
        self._inline_reads = 0  # inline reads that have ended: the reader thread rests while the count grows
        self._refused = False  # whether a thread could have read inline, but found the reader thread reading
        self._resting = False  # whether the reader thread leaves reading to the threads that wait
        self._wake = threading.Semaphore(0)  # released to end the rest of the reader thread
        self._over = False
        self._poll = self._poll_of_source()

    def _poll_of_source(self) -> select.poll | None:
        if not hasattr(select, "poll") or self._source.fileno() < 0:
            return None
        poll = select.poll()
        poll.register(self._source.fileno(), select.POLLIN)
        if self._waker is not None:
            poll.register(self._waker, select.POLLIN)
        return poll

    def add_waiter(self, thing: object) -> None:
        """Note that a thing is waited for without reading, so that the reader thread reads."""
        self._waiters.add(thing)
        if self._resting:
            self._wake.release()

    def remove_waiter(self, thing: object) -> None:
        """Note that a thing has come or that the wait for it was given up."""
        self._waiters.discard(thing)

    def read_inline(self, arrived: Callable[[], bool], seconds: float) -> bool | None:
        """Read in this thread until ``arrived`` returns True.

        Return False if it has not within ``seconds``, and None if the reader thread has to read instead.
        """
        if self._poll is None or self._waiters or self._over or self._source.away:
            return None
        with Uninterrupted() as held:
            if not self._turn.acquire(blocking=False):
                self._refused = True
                return None
            try:
                return self._read_until(arrived, seconds, held)
            finally:
                self._inline_reads += 1
                self._turn.release()

    def _read_until(self, arrived: Callable[[], bool], seconds: float, held: Uninterrupted) -> bool | None:
        assert self._poll is not None
        deadline = time.monotonic() + seconds
        left = seconds
        while not arrived():
            if self._source.away:
                return None
            if self._over or left <= 0 or held.came:
                return False
            if self._poll.poll(min(left, LOOK) * 1000):
                self._read(wait=False)
            left = deadline - time.monotonic()
        return True

    def _read(self, wait: bool) -> None:
        goes_on = False
        try:
            goes_on = not self._over and self._source.read(wait)
        finally:
            self._over = not goes_on

    def let_go(self) -> None:
        """Read no more: this is a forked child of the process that reads."""
        self._over = True
        self._waiters.clear()

    def run(self) -> None:
        """Read whenever no other thread does, until the source ends. The reader thread runs this."""
        while not self._over:
            with self._turn:
                if self._source.away:
                    self._over = not self._source.reconnect()
                    self._poll = None if self._over else self._poll_of_source()
                else:
                    self._read(wait=True)
            if self._refused and not self._waiters:
                self._refused = False
                self._rest()

    def _rest(self) -> None:
        """Leave reading to the threads that wait, as long as one reads in each `REST` seconds."""
        self._resting = True
        try:
            while not self._waiters and not self._over:
                reads = self._inline_reads
                self._wake.acquire(timeout=REST)
                if reads == self._inline_reads:  # none came, or one still has the turn
                    return
        finally:
            self._resting = False
