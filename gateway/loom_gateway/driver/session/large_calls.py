"""Starts large calls on a thread of their own.

To start a call is to have Monarch pickle its arguments, which takes a second for a gigabyte; the client's thread
would read nothing meanwhile, and small calls to other actors would wait.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import Counter
from collections.abc import Callable

from loom.wire.bodies import EndpointCall
from loom.wire.messages import ADVERBS, Kind, Message

LARGE = 1 << 20
"""Bytes of arguments from which a call is started aside."""

MOST = 2
"""Calls that are being started aside, or wait for that, before the client's thread waits too."""

QUIET = 30.0
"""Seconds without another one after which the memory of those before is given back. Sooner, the next one would have
to get it anew, which takes longer than to copy into it."""

_CALLS = frozenset(ADVERBS.values())


class LargeCalls:
    """Decides which operations are started aside, and what has to wait for them.

    Operations on the same actors are started in the order in which they came, and so is everything that is no call,
    since it may make or stop what a call goes to.

    Args:
        start: starts an operation; called on either thread.
        root: the id of the whole mesh that the mesh of an id is a part of.
    """

    def __init__(self, start: Callable[[Message], None], root: Callable[[int], int]) -> None:
        self._start = start
        self._root = root
        self._queue: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self.under_way: Counter[int] = Counter()
        """How many calls are being started aside, or wait for that, by the root of what they go to."""
        self._done = threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, message: Message) -> bool:
        """Take an operation if it is to be started aside; else return False, once it may be started.

        By one thread, the client's. Not called for an operation that is not `LARGE` while none is `under_way`.
        """
        if message.kind not in _CALLS:
            if message.kind != Kind.END:  # which comes after nothing
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
            self._thread = threading.Thread(target=self._run, name="large calls", daemon=True)
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
                del message  # or its arguments would stay until the next one comes
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
    """Return to the system what was freed: glibc would keep up to twice the size of a large call's arguments."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
