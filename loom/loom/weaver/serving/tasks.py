"""`Tasks`: the background tasks of the weaver, which end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from loom.process import tasks


class Tasks:
    """Tasks on the event loop, referenced until they are done."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._keep(tasks.run("answer a request", work))

    def keep_running(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run work that has to go on, and start it again if it dies."""
        self._keep(tasks.keep_running(name, work))

    def run_to_end(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run work until it has ended by itself, and start it again if it dies."""
        self._keep(tasks.run_to_end(name, work))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()
