"""The thread that starts large calls.

To start a call, Monarch pickles its arguments, which takes a second for a gigabyte. On the client's own thread,
small calls to other actors would wait that long.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import Counter
from collections.abc import Callable

from loom.process.threads import keep_going
from loom.wire.bodies import EndpointCall
from loom.wire.messages import ADVERBS, Kind, Message

LARGE = 1 << 20  # smallest arguments, in bytes, with which a call is started on the separate thread
MOST = 2  # number of large calls that may be queued or starting before the client's thread waits too

QUIET = 30.0
"""Seconds without a large call after which freed memory goes back to the system. If it went back sooner, the next
large call would have to allocate it again, which takes longer than to copy into it."""

_WAITS_FOR_NOTHING = frozenset({Kind.END, Kind.READ})
_CALLS = frozenset(ADVERBS.values())


class LargeCalls:
    """Decides which operations start on the separate thread, and which have to wait for those.

    Operations on the same actors start in the order in which they arrived. So does every operation that is not a
    call, because it may create or stop the target of a call. ``root`` returns the id of the whole mesh that
    contains a mesh.
    """

    def __init__(self, start: Callable[[Message], None], root: Callable[[int], int]) -> None:
        self._start = start
        self._root = root
        self._queue: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self.under_way: Counter[int] = Counter()  # large calls queued or starting, by the root of their mesh
        self._done = threading.Condition()  # notified after each start; guards `under_way`
        self._thread: threading.Thread | None = None

    def take(self, message: Message) -> bool:
        """Queue an operation if it is a large call. Else wait until it may start, and return False.

        Only the client's thread calls this. The caller may skip it for an operation below `LARGE` while none is
        `under_way`.
        """
        if message.kind not in _CALLS:
            if message.kind not in _WAITS_FOR_NOTHING:
                self._wait(lambda: not self.under_way)
            return False
        root = self._root(EndpointCall.fields(message.body)[0])
        if message.size < LARGE:
            self._wait(lambda: root not in self.under_way)
            return False
        self._wait(lambda: sum(self.under_way.values()) < MOST)
        with self._done:
            self.under_way[root] += 1
        if self._thread is None:
            self._thread = threading.Thread(
                target=keep_going, args=("start large calls", self._run), name="large calls", daemon=True
            )
            self._thread.start()
        self._queue.put((root, message))
        return True

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._done:
            self._done.wait_for(ready)

    def _run(self) -> None:
        while True:
            root, message = self._next()
            try:
                self._start(message)
            finally:
                del message  # else its arguments would stay in memory until the next large call
                with self._done:
                    self.under_way -= Counter({root: 1})
                    self._done.notify_all()

    def _next(self) -> tuple[int, Message]:
        try:
            return self._queue.get(timeout=QUIET)
        except queue.Empty:
            give_back_memory()
            return self._queue.get()


def give_back_memory() -> None:
    """Return freed memory to the system. glibc would keep up to twice the size of a large call's arguments."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
