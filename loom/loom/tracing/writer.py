"""Writes what a process records, some of it at a time.

The code that writes is seldom in the processor's caches when an event comes. To write one by itself takes a tenth
of a millisecond, most of it waiting for memory, and wakes who reads the lines. One of many takes a fifth of that.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from loom.process.threads import keep_going

T = TypeVar("T")

EVERY = 1.0
"""Seconds between two writes: the most that a killed process loses."""
MOST = 10_000
"""Entries that wait at most; who brings one more writes them."""


class Writer(Generic[T]):
    """Gives entries to a function: one after a quiet second at once, others in a thread, and at the process's end.

    A process that is killed, or ends by ``os._exit``, loses what waits. `take` may be called from a signal handler
    or a finalizer.

    Args:
        write: gets the entries in order. It must not raise.
    """

    def __init__(self, write: Callable[[list[T]], object]) -> None:
        self._write = write
        self._waiting: list[T] = []
        self.after_fork()

    def after_fork(self) -> None:
        """Forget what waits: it is the parent's, which writes it."""
        self._waiting.clear()
        self._runs = self._ends = False
        # Reentrant: a finalizer may bring an entry while this thread is writing.
        self._lock = threading.RLock()

    def take(self, entry: T) -> None:
        """Have an entry written soon."""
        self._waiting.append(entry)
        if not self._runs:
            self._begin()
        elif len(self._waiting) > MOST:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            entries = self._waiting[:]
            del self._waiting[: len(entries)]
            if entries:
                self._write(entries)

    def _begin(self) -> None:
        self._runs = True
        if not self._ends:
            self._ends = True
            atexit.register(self._end)
            # A process of `multiprocessing` ends by `os._exit`, after finalizers of its own.
            if (util := sys.modules.get("multiprocessing.util")) is not None:
                util.Finalize(None, self.flush, exitpriority=0)
        try:
            writing = "write spans", self._run
            threading.Thread(target=keep_going, args=writing, name="loom-timing", daemon=True).start()
        except BaseException as error:
            self._runs = False
            if not isinstance(error, RuntimeError):  # Ctrl-C, or the end of a run
                raise
            # The interpreter is ending, or there may be no more threads: each entry is written at once.
        self.flush()

    def _end(self) -> None:
        """Write what waits, and each further entry at once: of a function that `atexit` calls after this one."""
        self.flush()
        self.take = self._take_at_once  # type: ignore[method-assign]

    def _take_at_once(self, entry: T) -> None:
        self._write([entry])

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            time.sleep(EVERY)
            # A thread for each burst: an idle process stays asleep, and its next entry is written at once.
            goes_on = self._runs = bool(self._waiting)
            self.flush()
