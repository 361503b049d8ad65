"""Who reads from the connection: its reader thread, or a thread that waits for an answer, in its place.

An answer that the reader thread takes in costs a switch to the thread that waits for it: on a cold processor, as
much as sending the call. So a thread that waits reads by itself while nobody else waits for anything; the reader
thread rests meanwhile. It comes back when somebody else waits, or when nobody has read for `REST`: so what nobody
waits for, such as events and log lines, is taken in at most that much later.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from loom.wire.waker import Bell
from loom_proxy.session.interrupts import Uninterrupted

REST = 0.005
"""Seconds without a reading thread after which the reader thread reads again."""

LOOK = 0.05
"""Seconds after which a thread that reads looks for what comes without being read: a cancellation, Ctrl-C."""


class Source(Protocol):
    """What is read from."""

    def fileno(self) -> int:
        """What to wait for; -1 if a thread cannot wait for it with `select.poll`."""

    def read(self, wait: bool) -> bool:
        """Take in what has come, if need be after waiting a while for it; False when there will be no more."""

    @property
    def away(self) -> bool:
        """Whether there is nothing to read from until `come_back`."""

    def come_back(self) -> bool:
        """Have something to read from again, after waiting for it; False when there never will be."""


class Reading:
    """Lets one thread at a time read from a source, until that ends.

    Args:
        source: what is read from.
        bell: what is rung when there is something to take in from elsewhere, if anything.
    """

    def __init__(self, source: Source, bell: Bell | None = None) -> None:
        self._source = source
        self._bell = bell
        self._turn = threading.Lock()
        """Held by the thread that reads."""
        self._awaited: set[object] = set()
        """What threads and event loops wait for without reading by themselves."""
        self._visits = 0
        self._refused = False
        """Whether a thread had to wait for the reader thread, but could have read by itself."""
        self._resting = False
        self._wake = threading.Semaphore(0)
        self._over = False
        self._poll = self._poll_of_source()

    def _poll_of_source(self) -> select.poll | None:
        if not hasattr(select, "poll") or self._source.fileno() < 0:
            return None
        poll = select.poll()
        poll.register(self._source.fileno(), select.POLLIN)
        if self._bell is not None:
            poll.register(self._bell, select.POLLIN)
        return poll

    def awaits(self, thing: object) -> None:
        """Somebody waits for a thing without reading: the reader thread is to read."""
        self._awaited.add(thing)
        if self._resting:
            self._wake.release()

    def awaits_no_more(self, thing: object) -> None:
        """It came, or the wait for it was given up."""
        self._awaited.discard(thing)

    def visit(self, arrived: Callable[[], bool], seconds: float) -> bool | None:
        """Read until something has arrived; False if it has not within ``seconds``, None if others have to."""
        if self._poll is None or self._awaited or self._over or self._source.away:
            return None
        with Uninterrupted() as held:
            if not self._turn.acquire(blocking=False):
                self._refused = True
                return None
            try:
                return self._read_until(arrived, seconds, held)
            finally:
                self._visits += 1
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

    def run(self) -> None:
        """Read whenever no other thread does, until the source ends: the body of the reader thread."""
        while not self._over:
            with self._turn:
                if self._source.away:
                    self._over = not self._source.come_back()
                    self._poll = None if self._over else self._poll_of_source()
                else:
                    self._read(wait=True)
            if self._refused and not self._awaited:
                self._refused = False
                self._rest()

    def _rest(self) -> None:
        """Leave the reading to threads that wait, as long as they come."""
        self._resting = True
        try:
            while not self._awaited and not self._over:
                visits = self._visits
                self._wake.acquire(timeout=REST)
                if visits == self._visits:  # nobody came; or one who stays for long, whose turn is waited for
                    return
        finally:
            self._resting = False
