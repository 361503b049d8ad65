"""Waiting for many futures at once, of any jobs, in threads and on event loops.

Nothing here has a thread or asks again and again: each future tells when its answer comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from loom.errors import WaitTimeout
from loom_proxy.futures.future import FutureProxy
from loom_proxy.futures.timeouts import check_timeout

R = TypeVar("R")

_WHEN = (FIRST_COMPLETED, FIRST_EXCEPTION, ALL_COMPLETED)


class DoneAndNotDone(NamedTuple):
    """What `wait` found."""

    done: set[FutureProxy[Any]]
    """Futures whose answer is here: a result, an error, or that they were cancelled."""
    not_done: set[FutureProxy[Any]]
    """The others."""


def wait(
    futures: Iterable[FutureProxy[Any]], timeout: float | None = None, return_when: str = ALL_COMPLETED
) -> DoneAndNotDone:
    """Wait for several futures, of one job or of many. As `concurrent.futures.wait`.

    Args:
        futures: what to wait for; one that is given twice counts once.
        timeout: seconds to wait at most; None waits for ever. When the time is up, what is there is returned.
        return_when: ``"FIRST_COMPLETED"``, ``"FIRST_EXCEPTION"`` (or when all are done, if none fails), or
            ``"ALL_COMPLETED"``, as the constants of `concurrent.futures`.

    Returns:
        The sets ``done`` and ``not_done``.
    """
    if return_when not in _WHEN:
        raise ValueError(f"return_when is {return_when!r}: give one of {', '.join(_WHEN)}")
    check_timeout(timeout)
    awaited = _distinct(futures)
    arrivals = _Arrivals(awaited)
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        if return_when == FIRST_EXCEPTION:
            _wait_for_a_failure(arrivals, len(awaited), deadline)
        else:
            count = len(awaited) if return_when == ALL_COMPLETED else min(1, len(awaited))
            arrivals.block_until(count, _seconds_until(deadline))
    finally:
        arrivals.leave()
    done = {future for future in awaited if future.done()}
    return DoneAndNotDone(done, set(awaited) - done)


def _wait_for_a_failure(arrivals: _Arrivals[Any], count: int, deadline: float | None) -> None:
    for _ in range(count):
        if not arrivals.block_until(1, _seconds_until(deadline)) or _failed(arrivals.take()):
            return


def as_completed(futures: Iterable[FutureProxy[R]], timeout: float | None = None) -> AsCompleted[R]:
    """Each future as its answer comes, those that are done first. As `concurrent.futures.as_completed`.

    For ``for`` and, on any event loop, for ``async for``.

    Args:
        futures: what to wait for; one that is given twice comes once.
        timeout: seconds from now that all may take together; None waits for ever.

    Raises:
        WaitTimeout: while iterating: the time is up. The futures are as they were.
    """
    check_timeout(timeout)
    return AsCompleted(_distinct(futures), timeout)


class AsCompleted(Generic[R]):
    """What `as_completed` gives: an iterator and an asynchronous iterator of futures. For one reader at a time."""

    def __init__(self, futures: dict[FutureProxy[R], None], timeout: float | None) -> None:
        self._arrivals = _Arrivals(futures)
        self._total = len(futures)
        self._left = len(futures)
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def __iter__(self) -> Iterator[FutureProxy[R]]:
        return self

    def __next__(self) -> FutureProxy[R]:
        if not self._left:
            raise StopIteration
        if not self._arrivals.block_until(1, _seconds_until(self._deadline)):
            self._give_up()
        self._left -= 1
        return self._arrivals.take()

    def __aiter__(self) -> AsyncIterator[FutureProxy[R]]:
        return self

    async def __anext__(self) -> FutureProxy[R]:
        if not self._left:
            raise StopAsyncIteration
        if not await self._arrivals.until_one(_seconds_until(self._deadline)):
            self._give_up()
        self._left -= 1
        return self._arrivals.take()

    def _give_up(self) -> None:
        self._arrivals.leave()
        raise WaitTimeout(
            f"{self._left} of {self._total} futures had no answer within {self._timeout:g} s; "
            f"their operations go on, and can be waited for again"
        )


class _Arrivals(Generic[R]):
    """Futures in the order in which their answers come. For one reader at a time."""

    def __init__(self, futures: dict[FutureProxy[R], None]) -> None:
        self.arrived: deque[FutureProxy[R]] = deque()
        self._lock = threading.Lock()
        self._needed = 0
        self._wake: Callable[[], None] | None = None
        self._callbacks: dict[FutureProxy[R], Callable[[], None]] = {}
        for connection in {id(future._connection): future._connection for future in futures}.values():
            connection.flush()
        for future in futures:
            callback = self._callbacks[future] = partial(self._arrive, future)
            if not future._add(callback):
                callback()

    def _arrive(self, future: FutureProxy[R]) -> None:
        with self._lock:
            self.arrived.append(future)
            if self._wake is None or len(self.arrived) < self._needed:
                return
            wake, self._wake = self._wake, None
        wake()

    def take(self) -> FutureProxy[R]:
        """The one that has waited longest."""
        future = self.arrived.popleft()
        del self._callbacks[future]
        return future

    def leave(self) -> None:
        """Leave nothing behind in the futures that have no answer."""
        for future, callback in self._callbacks.items():
            future._drop(callback)

    def block_until(self, count: int, seconds: float | None) -> bool:
        """Wait for that many that have not been taken; False when the time is up."""
        gate = threading.Lock()
        gate.acquire()
        if not self._wake_at(count, gate.release):
            return True
        return gate.acquire(timeout=-1 if seconds is None else seconds) or not self._sleep_on(count)

    async def until_one(self, seconds: float | None) -> bool:
        """The same on an event loop, for one."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[bool] = loop.create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
                loop.call_soon_threadsafe(_resolve, arrived, True)

        if not self._wake_at(1, wake):
            return True
        timer = None if seconds is None else loop.call_later(seconds, _resolve, arrived, False)
        try:
            return await arrived or not self._sleep_on(1)
        except BaseException:
            self._sleep_on(1)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _wake_at(self, count: int, wake: Callable[[], None]) -> bool:
        """Have ``wake`` called when that many have come; False if they are here already."""
        with self._lock:
            if len(self.arrived) >= count:
                return False
            self._needed, self._wake = count, wake
            return True

    def _sleep_on(self, count: int) -> bool:
        """Take back what `_wake_at` arranged; whether that many have still not come."""
        with self._lock:
            self._wake = None
            return len(self.arrived) < count


def _distinct(futures: Iterable[FutureProxy[R]]) -> dict[FutureProxy[R], None]:
    distinct = dict.fromkeys(futures)
    for future in distinct:
        if not isinstance(future, FutureProxy):
            raise TypeError(f"{future!r} is not a future of Loom's but a {type(future).__name__}")
    return distinct


def _seconds_until(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


def _failed(future: FutureProxy[Any]) -> bool:
    return not future.cancelled() and future.exception() is not None


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
