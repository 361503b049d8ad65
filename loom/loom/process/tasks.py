"""Background tasks of an event loop: each is kept, and one that dies is logged, counted, and may be started again.

asyncio itself keeps no reference to a task, and says nothing of an error that no caller waits for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from loom.process.backoff import Backoff

logger = logging.getLogger(__name__)

AGAIN = Backoff(0.1, 10.0)  # waits before a task that died is started again
STEADY = 30.0  # seconds of a task's life after which these waits are short again

died: Counter[str] = Counter()
"""How often tasks of this process have died, by name."""

_tasks: set[asyncio.Task[Any]] = set()


def run(name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Run something to its end in the background. An error is logged and counted, and nothing else."""
    task = _keep(asyncio.get_running_loop().create_task(_logged(name, work), name=name))
    task.add_done_callback(lambda _: work.close())  # the task may have been cancelled before it began
    return task


def keep_running(name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[NoReturn]:
    """Run something in the background until the task is cancelled, and again when it has died or ended."""
    return _keep(asyncio.get_running_loop().create_task(_again(name, work), name=name))


def _keep(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def _logged(name: str, work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except Exception:
        died[name] += 1
        logger.exception("the background task %r died", name)


async def _again(name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> NoReturn:
    waits = iter(AGAIN)
    while True:
        began = time.monotonic()
        await _logged(name, work())
        if time.monotonic() - began > STEADY:
            waits = iter(AGAIN)
        await asyncio.sleep(next(waits))
