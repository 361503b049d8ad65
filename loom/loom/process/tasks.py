"""Background tasks of an event loop: each is kept, and one that dies is logged, counted, and may be started again.

`run` is for work whose failure matters to nobody later. A task that has to live as long as its process, or until it
has come to its end, is started with `keep_running` or `run_to_end`.

asyncio itself keeps no reference to a task, and says nothing of an error that no caller waits for. `Turns` divide
work that would hold the event loop for too long.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from loom.process.backoff import Backoff

TURN = 0.002
"""Seconds for which one piece of work holds the event loop."""


class Turns:
    """Divides long work into turns, between which the event loop does what else there is."""

    def __init__(self) -> None:
        self._end = time.perf_counter() + TURN

    async def rest(self) -> None:
        """Let the event loop do other work, if this turn is over."""
        if time.perf_counter() >= self._end:
            await asyncio.sleep(0)
            self._end = time.perf_counter() + TURN


logger = logging.getLogger(__name__)

AGAIN = Backoff(0.1, 10.0)  # waits before a task that died is started again
STEADY = 30.0  # seconds of a task's life after which these waits are short again

died: Counter[str] = Counter()
"""The number of times that tasks of this process have died, by name."""

MOST_TOLD = 16  # different errors of a task that are logged with their tracebacks

_tasks: set[asyncio.Task[Any]] = set()


def run(name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Run something to its end in the background. An error is logged and counted, and nothing else."""
    task = _keep(asyncio.get_running_loop().create_task(_logged(name, work), name=name))
    task.add_done_callback(lambda _: work.close())  # the task may have been cancelled before it began
    return task


def keep_running(
    name: str, work: Callable[[], Coroutine[Any, Any, Any]], backoff: Backoff = AGAIN, steady: float = STEADY
) -> asyncio.Task[None]:
    """Run something in the background until the task is cancelled, and again when it has died or ended.

    The waits of ``backoff`` are short again after ``steady`` seconds of its life.
    """
    again = _again(work, False, Deaths(name, backoff, steady))
    return _keep(asyncio.get_running_loop().create_task(again, name=name))


def run_to_end(name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[None]:
    """Run something in the background until it has ended by itself, and again when it has died."""
    return _keep(asyncio.get_running_loop().create_task(_again(work, True, Deaths(name)), name=name))


def _keep(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


class OwnedTasks:
    """Tasks that end together, with what has started them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run something to its end, as the function `run` does."""
        self.add(run(name, work))

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()


async def _logged(name: str, work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except Exception as error:  # noqa: BLE001 - it is logged, whatever it is
        Deaths(name).note(error)


class Deaths:
    """The deaths of one background task or thread: each is counted, and each error is logged once in full.

    Its ``waits`` are the pauses before it is started again.
    """

    def __init__(self, name: str, backoff: Backoff = AGAIN, steady: float = STEADY) -> None:
        self._name = name
        self._backoff = backoff
        self._steady = steady
        self._told: set[str] = set()
        self._waits = iter(backoff)
        self._began = time.monotonic()

    def note(self, error: BaseException) -> None:
        """Count and log a death, in the handler of its error."""
        died[self._name] += 1
        if repr(error) in self._told or len(self._told) >= MOST_TOLD:
            logger.debug("the background task %r died again: %r", self._name, error)
        else:
            self._told.add(repr(error))
            logger.error("the background task %r died", self._name, exc_info=error)

    def wait(self) -> float:
        """Return the seconds before the next start: few, if it has lived for the steady seconds."""
        now = time.monotonic()
        if now - self._began > self._steady:
            self._waits = iter(self._backoff)
        wait = next(self._waits)
        self._began = now + wait
        return wait


def _note(deaths: Deaths, error: BaseException) -> None:
    """Note a death, or raise the error again if it ends the task: its cancellation.

    A `CancelledError` may also come of something that the task waited for, and that was cancelled. Python 3.10
    cannot tell the two apart.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or sys.version_info < (3, 11) or task.cancelling():
            raise error
    deaths.note(error)


async def _again(work: Callable[[], Coroutine[Any, Any, Any]], until_end: bool, deaths: Deaths) -> None:
    while True:
        try:
            await work()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is started again, whatever it died of
            _note(deaths, error)
        else:
            if until_end:
                return
        await asyncio.sleep(deaths.wait())
