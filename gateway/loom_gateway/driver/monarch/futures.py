"""Waiting for Monarch's futures, to answer operations with their results.

There are two ways to wait. A thread that blocks in ``Future.get`` gets the result soonest, but waits for one future
at a time. The event loop waits for any number, and gets each result two thread switches later. The thread waits for
calls. If one keeps it longer than `PATIENCE`, those behind it move to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from loom.process.threads import keep_going
from loom_gateway.driver.session.replies import Replies, ReplyId

PATIENCE = 0.02  # seconds that the thread waits for one future before those behind it move to the event loop


class Futures:
    """Waits for futures, and answers their operations on the waiting thread or the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, replies: Replies) -> None:
        self._loop = loop
        self._replies = replies
        self._queueing = threading.Lock()  # held by the client's thread or that of large calls
        self._queued = 0  # futures that `soon` has queued
        # Each counter has one writer: the waiting thread, and the event loop.
        self._answered = 0  # queued futures that the thread has answered
        self._moved = 0  # queued futures that moved to the event loop
        self._since = 0.0  # when the thread's current wait began; 0: it does not wait
        self._slow = False  # set while the thread is held up, so that all go to the event loop
        self._checking = False  # whether a check of the thread is planned
        self._futures: queue.SimpleQueue[tuple[ReplyId, Any]] = queue.SimpleQueue()
        threading.Thread(target=keep_going, args=("answer", self._wait), name="futures", daemon=True).start()

    def soon(self, reply: ReplyId, future: Any) -> None:
        """Wait for a future that is likely to be done at once."""
        if self._slow:
            self.whenever(reply, future)
            return
        with self._queueing:
            self._queued += 1
        self._futures.put((reply, future))
        if self._queued - self._answered - self._moved > 1 and not self._checking:
            self._checking = True
            self._loop.call_soon_threadsafe(self._check_later)

    def whenever(self, reply: ReplyId, future: Any) -> None:
        """Wait for a future that may take long."""
        self._loop.call_soon_threadsafe(self._observe, reply, future)

    def in_order(self, replies: Sequence[ReplyId], futures: Sequence[Any]) -> None:
        """Wait for futures that finish in any order. The first result answers the first reply.

        Monarch's futures of one stream share one port, and each takes whatever message comes next.
        """
        self._loop.call_soon_threadsafe(self._observe_in_order, iter(replies), futures)

    def _observe_in_order(self, replies: Iterator[ReplyId], futures: Sequence[Any]) -> None:
        for future in futures:
            future.as_asyncio().add_done_callback(lambda done: self._done(next(replies), done))

    def _observe(self, reply: ReplyId, future: Any) -> None:
        try:
            future.as_asyncio().add_done_callback(lambda done: self._done(reply, done))
        except Exception as error:  # noqa: BLE001 - passed on to the laptop
            self._replies.answer(reply, None, error, True)

    def _done(self, reply: ReplyId, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        self._replies.answer(reply, None if error else done.result(), error, True)

    def _check_later(self) -> None:
        self._loop.call_later(PATIENCE, self._check)

    def _check(self) -> None:
        """Move the queued futures to the event loop if the thread has been waiting for one future all the time."""
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

    def _wait(self) -> None:
        while True:
            reply, future = self._futures.get()
            self._since = time.perf_counter()
            try:
                value, error = future.get(), None
            except BaseException as raised:  # noqa: BLE001 - passed on to the laptop
                value, error = None, raised
            self._since = 0.0
            self._slow = False
            self._answered += 1
            self._replies.answer(reply, value, error, False)
            self._replies.gathered(more=not self._futures.empty())
