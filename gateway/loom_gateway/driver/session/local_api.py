"""The session, as functions that run in the driver know it: see `loom.beside`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from loom.errors import WeaverUnavailable
from loom_gateway.driver.monarch.liveness import ReplicaPlace, bootstrap_on
from loom_gateway.driver.monarch.mesh_table import HOST_MESH, Entry

if TYPE_CHECKING:
    from loom_gateway.driver.session.operations import Operations

__all__ = ["Beside"]

logger = logging.getLogger(__name__)

FIRST_ID = 1 << 40
"""Ids of meshes that are made here: far above those that clients count."""


class Beside:
    """A `loom.beside.Session`."""

    def __init__(self, session: Operations) -> None:
        self._session = session
        self._ids = itertools.count(FIRST_ID)
        self._told: dict[int, Callable[[int], object]] = {}
        self.name = session.weaver.session

    def hosts(self) -> list[int]:
        """Numbers of the worker hosts that are there."""
        known = self._session.meshes.entry(HOST_MESH).ranks
        return [host for host in known if host not in self._session.lost_hosts]

    def spawn_procs(
        self, name: str, host: int, per_host: Mapping[str, int], gone: Callable[[int], object]
    ) -> SpawnedHere:
        """Start processes on a host; see `loom.beside.Session`."""
        session = self._session
        session.hosts.check([host])
        ident = next(self._ids)
        self._told[ident] = gone
        replica = ReplicaPlace(session.weaver.session, name)
        bootstrap = bootstrap_on(session.lifeline, ident, None, session.syncs.on_path(), replica)
        on = session.meshes.mesh(HOST_MESH).slice(hosts=slice(host, host + 1))
        on = session.hosts.mesh_on((host,), on)
        mesh = on.spawn_procs(per_host=dict(per_host), bootstrap=bootstrap, name=name)
        ranks = tuple(range(len(mesh)))
        entry = Entry("procs", name, mesh, ident, procs=ident, ranks=ranks, hosts=(host,) * len(ranks))
        session.meshes.add(ident, entry)
        if host in session.lost_hosts:  # meanwhile
            session.loop.call_soon_threadsafe(session.processes_gone_with, ident, entry, host)
        return SpawnedHere(session, entry)

    def gone(self, procs: int, rank: int) -> None:
        """Tell who spawned a process that it is gone. On the event loop."""
        told = self._told.get(procs)
        if told is not None:
            told(rank)

    def weaver_address(self) -> str:
        """What threadlets find the weaver by."""
        return asyncio.run_coroutine_threadsafe(self._session.weaver.address(), self._session.loop).result()

    def ask_weaver(self, operation: str, arguments: Mapping[str, Any], timeout: float = 2.0) -> Any:
        """Ask the weaver."""
        asking = self._session.weaver.ask(operation, dict(arguments))
        answer = asyncio.run_coroutine_threadsafe(asyncio.wait_for(asking, timeout), self._session.loop)
        try:
            return answer.result()
        except (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError):
            raise WeaverUnavailable(f"the weaver did not answer within {timeout:g} s") from None


class SpawnedHere:
    """A `loom.beside.SpawnedProcs`."""

    def __init__(self, session: Operations, entry: Entry) -> None:
        self._session = session
        self._entry = entry
        self.name = entry.name
        self.mesh = entry.mesh

    def stop(self, reason: str) -> None:
        """Have the processes end."""
        if not self._entry.stopped:
            self._entry.stopped = True
            asyncio.run_coroutine_threadsafe(self._stop(reason), self._session.loop)

    async def _stop(self, reason: str) -> None:
        try:
            await self.mesh.stop(reason).as_asyncio()
        except Exception as error:  # noqa: BLE001 - dead ranks cannot be stopped
            logger.info("stopping proc mesh %s: %s", self.name, str(error)[:500])
