"""Waits for Monarch's futures and passes on what they give.

There are two ways to wait. A thread that blocks in ``Future.get`` is told soonest, but waits for one future at a
time; the event loop waits for any number, and is told two thread switches later. Calls are waited for by the
thread; while one keeps it for longer than `PATIENCE`, those behind it go over to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

__all__ = ["PATIENCE", "Answer", "Answers", "Gatherer", "Key"]

PATIENCE = 0.02
"""Seconds that the thread waits for one future before those behind it are waited for elsewhere."""

GATHERED = 0.001
"""Seconds that answers are gathered while one comes after the other."""

LINGER = 0.005
"""Seconds that an answer lingers at most for one that does not come after all."""

Key: TypeAlias = tuple[int, int | None]
"""An operation's id and, for one result of several, its index."""


class Answer(Protocol):
    """Takes an operation's outcome; an answer that is not eager may wait for the next flush."""

    def __call__(self, key: Key, value: Any, error: BaseException | None, eager: bool) -> None: ...


class Gatherer:
    """Lets answers that come close together go out together.

    Args:
        loop: the event loop, which sees to what lingers.
        flush: sends what has been gathered.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, flush: Callable[[], None]) -> None:
        self._loop = loop
        self._flush = flush
        self._flushed = 0.0
        self._armed = False

    def gathered(self, more: bool) -> None:
        """Note an answer that was not eager; ``more`` says whether another is expected. On any thread."""
        now = time.perf_counter()
        if not more or now - self._flushed > GATHERED:
            self._flush()
            self._flushed = now
        elif not self._armed:
            self._armed = True
            self._loop.call_soon_threadsafe(self._loop.call_later, LINGER, self._late)

    def _late(self) -> None:
        self._armed = False
        self._flush()


class Answers:
    """Waits for futures.

    Args:
        loop: the event loop of the second way.
        answer: called with each outcome, on either's thread.
        gatherer: sends the answers of the first way.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, answer: Answer, gatherer: Gatherer) -> None:
        self._loop = loop
        self._answer = answer
        self._gatherer = gatherer
        self._giving = threading.Lock()  # by the client's thread and that of large starts
        self._given = 0
        # Counted up by one thread each: this one, and the event loop's.
        self._answered = 0
        self._moved = 0
        self._since = 0.0
        self._slow = False
        self._checking = False
        self._futures: queue.SimpleQueue[tuple[Key, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="answers", daemon=True).start()

    def soon(self, key: Key, future: Any) -> None:
        """Wait for a future that is likely to be done in a moment."""
        if self._slow:
            self.whenever(key, future)
            return
        with self._giving:
            self._given += 1
        self._futures.put((key, future))
        if self._given - self._answered - self._moved > 1 and not self._checking:
            self._checking = True
            self._loop.call_soon_threadsafe(self._check_later)

    def whenever(self, key: Key, future: Any) -> None:
        """Wait for a future that may take long."""
        self._loop.call_soon_threadsafe(self._observe, key, future)

    def in_order(self, keys: Sequence[Key], futures: Sequence[Any]) -> None:
        """Wait for futures of which any may be done first; the first outcome is the first key's.

        Monarch's futures of one stream take what comes from one port, in whatever order they are waited for.
        """
        self._loop.call_soon_threadsafe(self._observe_in_order, iter(keys), futures)

    # -- on the event loop ----------------------------------------------------------------------------------

    def _observe_in_order(self, keys: Iterator[Key], futures: Sequence[Any]) -> None:
        for future in futures:
            future.as_asyncio().add_done_callback(lambda done: self._done(next(keys), done))

    def _observe(self, key: Key, future: Any) -> None:
        future.as_asyncio().add_done_callback(lambda done: self._done(key, done))

    def _done(self, key: Key, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        self._answer(key, None if error else done.result(), error, True)

    def _check_later(self) -> None:
        self._loop.call_later(PATIENCE, self._check)

    def _check(self) -> None:
        """Relieve the thread if it has been waiting for one future all the while."""
        self._checking = False
        since = self._since
        if since and time.perf_counter() - since > PATIENCE:
            self._slow = True
            with contextlib.suppress(queue.Empty):
                while True:
                    self._observe(*self._futures.get_nowait())
                    self._moved += 1
        elif not self._futures.empty():
            self._checking = True
            self._check_later()

    # -- the thread -----------------------------------------------------------------------------------------

    def _wait(self) -> None:
        while True:
            key, future = self._futures.get()
            self._since = time.perf_counter()
            try:
                value, error = future.get(), None
            except BaseException as raised:  # noqa: BLE001 - passed on to the laptop
                value, error = None, raised
            self._since = 0.0
            self._slow = False
            self._answered += 1
            self._answer(key, value, error, False)
            self._gatherer.gathered(more=not self._futures.empty())
