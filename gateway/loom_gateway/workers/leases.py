"""Workers that belong to one user while the user has sessions: no other user's processes are on the host then."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loom.errors import WorkerUnreachable
from loom_gateway.workers.sources import WorkerList


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
