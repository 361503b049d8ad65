"""`WorkerWatch`, which looks for a gateway's workers and publishes their addresses, and whether one answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from loom.errors import WorkerUnreachable
from loom.process import tasks
from loom.process.state_file import write_json
from loom_gateway.workers.sources import WorkerAddress, WorkerHosts, WorkerList, parse_worker_address

ANSWERS_WITHIN = 2.0  # seconds


async def answers(address: str) -> bool:
    """Return whether a worker reads from its connections, within `ANSWERS_WITHIN` seconds.

    The kernel accepts connections also for a process that is stopped or stuck. So this closes one direction of a
    connection, on which no byte was sent, and waits until the worker closes the other. Monarch takes no notice of
    it otherwise. ``images/healthy`` does the same.
    """
    try:
        await asyncio.wait_for(_ask(parse_worker_address(address)), ANSWERS_WITHIN)
    except (OSError, asyncio.TimeoutError):
        return False
    return True


async def _ask(worker: WorkerAddress) -> None:
    reader, writer = await asyncio.open_connection(worker.host, worker.port)
    try:
        writer.write_eof()
        while await reader.read(4096):
            pass
    finally:
        writer.close()


logger = logging.getLogger(__name__)

LOOK_EVERY = 2.0  # seconds between two searches once all workers are found

LOOK_SOON = 0.5


class WorkerWatch:
    """Keeps the list of workers up to date, and publishes it in the file ``path``.

    With ``public``, processes of other user ids can read the file.
    """

    def __init__(self, hosts: WorkerHosts, path: str, public: bool = False) -> None:
        self.hosts = hosts
        self.path = path
        self._mode = 0o644 if public else 0o600
        self._complete = asyncio.Event()  # set when every host has had a worker
        self._error: WorkerUnreachable | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._unpublished = False  # whether the list has changed since it was published
        self.on_change: Callable[[WorkerList], Coroutine[Any, Any, None]] = _nothing

    def start(self) -> None:
        if not self.hosts.changing:
            if not self._complete.is_set():
                self.hosts.look()
                write_json(self.path, self.hosts.listed(), self._mode)  # before the gateway serves
                self._complete.set()
                tasks.run_to_end("publish workers", lambda: self.on_change(self.hosts.listed()))
        elif self._task is None:
            self._task = tasks.keep_running("look for workers", self._look_on)

    def take_over(self) -> None:
        """Continue with the list of an earlier gateway, whose sessions know its hosts by number."""
        listed = WorkerList.read(self.path)
        if listed is not None:
            self.hosts.take_over(listed)

    def close(self) -> None:
        """Stop looking, and end the waits of `there` with an error."""
        self._closing = True
        self._error = WorkerUnreachable("the gateway ends")
        self._complete.set()
        if self._task is not None:
            self._task.cancel()

    @property
    def missing(self) -> str:
        """Which hosts have had no worker yet, and what to do about it; empty if every host has had one."""
        if self.hosts.complete:
            return ""
        if self._error is not None:
            return str(self._error)
        try:
            self.hosts.check_complete()
        except WorkerUnreachable as error:
            return str(error)
        return ""

    async def there(self, patience: float | None = None) -> WorkerList:
        """Wait until every host has a worker; for at most ``patience`` seconds, then raise `WorkerUnreachable`."""
        try:
            await asyncio.wait_for(self._complete.wait(), patience)
        except asyncio.TimeoutError:
            if self._error is not None:
                raise self._error from None
            self.hosts.check_complete()
        if self._closing:
            raise WorkerUnreachable("the gateway ends")
        return self.hosts.listed()

    async def _publish(self) -> None:
        listed = self.hosts.listed()
        await asyncio.to_thread(write_json, self.path, listed, self._mode)
        await self.on_change(listed)
        self._complete.set()

    async def _look_on(self) -> None:
        while True:
            changed = False
            try:
                changed = await asyncio.to_thread(self.hosts.look)
                self._error = None
            except WorkerUnreachable as error:
                if str(error) != str(self._error):
                    logger.warning("%s", error)
                self._error = error
            self._unpublished |= changed
            if self.hosts.complete and (self._unpublished or not self._complete.is_set()):
                logger.info("the workers: %s", ", ".join(self.hosts.addresses))
                await self._publish()  # after an error, as of a full disk, this task is run again
                self._unpublished = False
            await asyncio.sleep(LOOK_EVERY if self._complete.is_set() else LOOK_SOON)


async def _nothing(_: WorkerList) -> None:
    pass
