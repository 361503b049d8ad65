"""Waiting for many futures at once, of any jobs, in threads and on event loops; in the cluster, for Monarch's too.

Each future calls back when its answer comes, so that no thread has to poll.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from loom.errors import WaitTimeout
from loom.in_cluster import is_monarchs
from loom.process.threads import get_within
from loom_proxy.futures.future import FutureProxy
from loom_proxy.futures.timing import check_timeout


class MonarchFuture:
    """A watched Monarch future: whether it is done, and the functions to call then.

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
    """Observe Monarch futures. Return their forms to watch; a done future's form says so already.

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

    # The bodies of some futures need the caller's context, such as the running actor.
    _loop().call_soon_threadsafe(begin, context=contextvars.copy_context())
    begun.result()
    return watched


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="watch Monarch's futures", daemon=True).start()
    return loop


R = TypeVar("R")

Watched: TypeAlias = "dict[FutureProxy[Any], FutureProxy[Any] | MonarchFuture]"
"""Each awaited future with what tells of it: the future itself, or what observes one of Monarch's."""

_WHEN = (FIRST_COMPLETED, FIRST_EXCEPTION, ALL_COMPLETED)


class DoneAndNotDone(NamedTuple):
    """The result of `wait`."""

    done: set[FutureProxy[Any]]
    """Futures with an answer: a result, an error or a cancellation."""
    not_done: set[FutureProxy[Any]]
    """Futures without an answer."""


def wait(
    futures: Iterable[FutureProxy[Any]], timeout: float | None = None, return_when: str = ALL_COMPLETED
) -> DoneAndNotDone:
    """Wait for several futures, of one job or of many; the counterpart of `concurrent.futures.wait`.

    Args:
        futures: the futures to wait for; one that is given twice counts once.
        timeout: seconds to wait at most; None waits for ever. When the time is up, `wait` does not raise.
        return_when: ``"FIRST_COMPLETED"``, ``"FIRST_EXCEPTION"`` (or when all are done, if none fails), or
            ``"ALL_COMPLETED"``, which are the constants of `concurrent.futures`.

    Returns:
        The sets ``done`` and ``not_done``.
    """
    if return_when not in _WHEN:
        raise ValueError(f"return_when is {return_when!r}: give one of {', '.join(_WHEN)}")
    timeout = check_timeout(timeout)
    watched = _watched(futures)
    with contextlib.suppress(WaitTimeout):
        if return_when == ALL_COMPLETED:
            _wait_for_all(watched, _deadline(timeout))
        else:
            _wait_for_one(watched, AsCompleted(watched, timeout), only_failed=return_when == FIRST_EXCEPTION)
    done = {future for future, one in watched.items() if one.done()}
    return DoneAndNotDone(done, set(watched) - done)


def _wait_for_all(watched: Watched, deadline: float | None) -> None:
    _flush(watched)
    for one in watched.values():
        if not one.done():
            one._wait(_seconds_until(deadline))


def _wait_for_one(watched: Watched, completed: AsCompleted[Any], only_failed: bool) -> None:
    try:
        for future in completed:
            if not only_failed or _failed(watched[future]):
                return
    finally:
        completed.leave()


def as_completed(futures: Iterable[FutureProxy[R]], timeout: float | None = None) -> AsCompleted[R]:
    """Return an iterator over futures in the order of their answers, those that are done first.

    The counterpart of `concurrent.futures.as_completed`, for ``for`` and, on any event loop, ``async for``.

    Args:
        futures: the futures to wait for; one that is given twice comes once.
        timeout: seconds from now for all of them together; None waits for ever.

    Raises:
        WaitTimeout: while iterating, if the time is up. The futures stay as they were.
    """
    timeout = check_timeout(timeout)
    return AsCompleted(_watched(futures), timeout)


class AsCompleted(Generic[R]):
    """The iterator, and asynchronous iterator, of `as_completed`. For one reader at a time."""

    def __init__(self, watched: Watched, timeout: float | None) -> None:
        self._watched = watched
        self._total = len(watched)
        self._timeout = timeout
        self._deadline = _deadline(timeout)
        self._arrived: queue.SimpleQueue[FutureProxy[R]] = queue.SimpleQueue()
        self._wake: Callable[[], object] = lambda: None
        """Wakes the event loop on which the reader waits, if it waits on one."""
        self._callbacks = {future: partial(self._arrive, future) for future in watched}
        """The callback of each future that the reader has not taken."""
        _flush(watched)
        for future, callback in self._callbacks.items():
            if not watched[future]._add(callback):
                callback()

    def _arrive(self, future: FutureProxy[R]) -> None:
        self._arrived.put(future)
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile, and the wait with it
            self._wake()

    def __iter__(self) -> Iterator[FutureProxy[R]]:
        return self

    def __next__(self) -> FutureProxy[R]:
        if not self._callbacks:
            raise StopIteration
        return self._take(_seconds_until(self._deadline))

    def __aiter__(self) -> AsyncIterator[FutureProxy[R]]:
        return self

    async def __anext__(self) -> FutureProxy[R]:
        if not self._callbacks:
            raise StopAsyncIteration
        here = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, here.set)
        if self._arrived.empty():  # else a future arrived before `_wake` was set
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(here.wait(), _seconds_until(self._deadline))
        return self._take(0.0)

    def _take(self, seconds: float | None) -> FutureProxy[R]:
        try:
            future = get_within(self._arrived, seconds)
        except queue.Empty:
            left = len(self._callbacks)
            self.leave()
            raise WaitTimeout(
                f"{left} of {self._total} futures had no answer within {self._timeout:g} s; "
                f"their operations go on, and can be waited for again"
            ) from None
        del self._callbacks[future]
        return future

    def leave(self) -> None:
        """Remove the callbacks from the futures that have no answer."""
        for future, callback in self._callbacks.items():
            self._watched[future]._drop(callback)


def _watched(futures: Iterable[FutureProxy[Any]]) -> Watched:
    distinct = dict.fromkeys(futures)
    for future in distinct:
        if not isinstance(future, FutureProxy):
            raise TypeError(f"{future!r} is not a future of Loom's but a {type(future).__name__}")
    monarchs = [future for future in distinct if is_monarchs(future)]
    observed = watch(monarchs) if monarchs else {}
    return {future: observed.get(future, future) for future in distinct}


def _flush(watched: Watched) -> None:
    proxies = [one for one in watched.values() if isinstance(one, FutureProxy)]
    for connection in {id(future._connection): future._connection for future in proxies}.values():
        connection.flush()


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _seconds_until(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


def _failed(future: FutureProxy[Any] | MonarchFuture) -> bool:
    if isinstance(future, MonarchFuture):
        return future.failed()
    return not future.cancelled() and future.exception() is not None
