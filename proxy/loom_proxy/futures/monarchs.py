"""Monarch's futures, which a program in the cluster holds, in the form that `wait` and `as_completed` watch."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any


class MonarchFuture:
    """A Monarch future that is watched: whether it is done, and whom to call then.

    Monarch's future itself tells neither. An event loop of this process, on a thread of its own, observes it; that
    takes nothing from other waits.
    """

    def __init__(self, future: Any) -> None:
        self._future = future
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._done = threading.Event()
        self._failed = False

    def observe(self) -> None:
        """Begin to observe the future. On the observing loop."""
        observed = self._future.as_asyncio()
        if observed.done():
            self._complete(observed)
        else:
            observed.add_done_callback(self._complete)

    def _complete(self, observed: asyncio.Future[Any]) -> None:
        self._failed = observed.cancelled() or observed.exception() is not None
        with self._lock:
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def done(self) -> bool:
        return self._done.is_set()

    def failed(self) -> bool:
        """Return whether the future, which is done, has an error."""
        return self._failed

    def _add(self, callback: Callable[[], None]) -> bool:
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return True
            return False

    def _drop(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def _wait(self, timeout: float | None) -> None:
        self._done.wait(timeout)


def watch(futures: Iterable[Any]) -> dict[Any, MonarchFuture]:
    """Observe Monarch futures. Return their forms to watch; those of futures that are done say so already.

    Raises:
        ValueError: a future was consumed.
    """
    watched = {future: MonarchFuture(future) for future in futures}
    begun: concurrent.futures.Future[None] = concurrent.futures.Future()

    def begin() -> None:
        try:
            for future in watched.values():
                future.observe()
        except Exception as error:  # noqa: BLE001 - for the caller, as of a future that was consumed
            begun.set_exception(error)
        else:
            begun.set_result(None)

    # What the caller's context holds, such as the running actor, belongs to the bodies of some futures.
    _loop().call_soon_threadsafe(begin, context=contextvars.copy_context())
    begun.result()
    return watched


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="watch Monarch's futures", daemon=True).start()
    return loop
