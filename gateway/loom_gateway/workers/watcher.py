"""`WorkerWatch`, which looks for a gateway's workers and publishes their addresses.

`answers` says whether a worker does, and `WorkerLeases` gives users workers of their own: while a user has
sessions, no other user's processes are on the user's hosts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from loom.errors import WorkerUnreachable
from loom.process import tasks
from loom.process.state_file import write_json
from loom_gateway.workers.sources import WorkerAddress, WorkerHosts, WorkerList, parse_worker_address


@dataclass(frozen=True)
class Lease:
    """The numbers of the hosts that a user has."""

    hosts: tuple[int, ...]

    def part_of(self, workers: WorkerList) -> WorkerList:
        """Return the leased workers, numbered from 0, with the meshes that are among them."""
        numbers = {host: number for number, host in enumerate(self.hosts)}
        meshes = {
            mesh: [numbers[host] for host in hosts if host in numbers]
            for mesh, hosts in workers.meshes.items()
            if numbers.keys() & set(hosts)
        }
        return WorkerList([workers.addresses[host] for host in self.hosts], meshes)


class WorkerLeases:
    """Gives each user with sessions the same number of workers. All sessions of a user share the user's workers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._leases: dict[str, Lease] = {}
        self._sessions: Counter[str] = Counter()  # by user
        self._free = asyncio.Event()  # set whenever a lease ends

    async def acquire(self, user: str, workers: WorkerList, patience: float) -> Lease:
        """Return a user's lease, for one more session. Wait for at most ``patience`` seconds for free workers.

        Raises:
            WorkerUnreachable: too few workers have become free.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + patience
        while (lease := self._find(user, len(workers.addresses))) is None:
            self._free.clear()
            try:
                await asyncio.wait_for(self._free.wait(), until - loop.time())
            except asyncio.TimeoutError:
                raise self._too_few(len(workers.addresses)) from None
        self.adopt(user, lease.hosts)
        return lease

    def adopt(self, user: str, hosts: Sequence[int]) -> None:
        """Note one more session of a user, with these hosts."""
        self._leases[user] = Lease(tuple(hosts))
        self._sessions[user] += 1

    def release(self, user: str) -> None:
        """Note the end of a session. After the last one, others may have the user's workers."""
        self._sessions[user] -= 1
        if self._sessions[user] <= 0:
            del self._sessions[user]
            self._leases.pop(user, None)
            self._free.set()

    def _find(self, user: str, hosts: int) -> Lease | None:
        if user in self._leases:
            return self._leases[user]
        taken = {host for lease in self._leases.values() for host in lease.hosts}
        free = [host for host in range(hosts) if host not in taken]
        return Lease(tuple(free[: self.size])) if len(free) >= self.size else None

    def _too_few(self, hosts: int) -> WorkerUnreachable:
        if hosts < self.size:
            return WorkerUnreachable(
                f"this gateway gives each user {self.size} workers (--workers-per-user) and has {hosts}: "
                f"start it with more workers, or with a smaller number"
            )
        return WorkerUnreachable(
            f"too few workers are free: this gateway gives each user {self.size} of its {hosts} workers "
            f"(--workers-per-user), for as long as the user has sessions. Try again when other users have "
            f"ended theirs"
        )


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
        """The hosts that have had no worker yet, and advice; empty if every host has had one."""
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
