"""The driver-local API: the session for functions that run in the driver; see `loom.driver_api`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from loom.errors import because
from loom_gateway.driver.handlers.sync import Syncs
from loom_gateway.driver.monarch.mesh_table import HOST_MESH, MeshEntry, stop_quietly
from loom_gateway.driver.monarch.process_bootstrap import ReplicaPlace, TorchrunPlace, bootstrap_on
from loom_gateway.driver.runs.output import current_processes, show
from loom_gateway.driver.session.context import SessionContext

FIRST_ID = 1 << 40  # first id of meshes that the driver makes itself, far above the ids that clients count


class LocalSession:
    """The driver's implementation of `loom.driver_api.DriverSession`."""

    def __init__(self, context: SessionContext, syncs: Syncs) -> None:
        self._context = context
        self._syncs = syncs
        self._ids = itertools.count(FIRST_ID)
        self._on_gone: dict[int, Callable[[int], object]] = {}  # until all processes of a proc mesh are gone
        self._running: dict[int, set[int]] = {}  # ranks that are not gone, by the same ids
        self.name = context.weaver.session

    def hosts(self) -> list[int]:
        hosts = self._context.hosts
        return [host for host in range(len(hosts.addresses)) if host not in hosts.lost]

    def host_mesh(self) -> Any:
        return self._context.meshes.mesh(HOST_MESH)

    def meshes(self) -> dict[str, object]:
        whole = self._context.meshes.whole()
        return {entry.name: entry.mesh for _, entry in whole if entry.kind != "hosts" and not entry.stopped}

    def show(self, record: str) -> None:
        show(record)

    def spawn_procs(
        self,
        name: str,
        host: int,
        per_host: Mapping[str, int],
        gone: Callable[[int], object],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> SpawnedHere:
        context = self._context
        context.hosts.check([host])
        ident = next(self._ids)
        size = math.prod(per_host.values())
        self._running[ident] = set(range(size))
        self._on_gone[ident] = gone
        replica = ReplicaPlace(context.weaver.session, name, dict(environment))
        torchrun = TorchrunPlace(size, hosts=1)
        bootstrap = bootstrap_on(context.link_address, ident, None, self._syncs.on_path(ident), replica, torchrun)
        mesh = context.mesh_of_host(host).spawn_procs(per_host=dict(per_host), bootstrap=bootstrap, name=name)
        ranks = tuple(range(len(mesh)))
        entry = MeshEntry("procs", name, mesh, ident, procs=ident, ranks=ranks, hosts=(host,) * len(ranks))
        context.meshes.add(ident, entry)
        if (processes := current_processes()) is not None:
            processes.meshes.append(ident)
        if host in context.hosts.lost:  # the host was lost during the spawn
            context.loop.call_soon_threadsafe(context.failures.processes_gone_with, ident, entry, host)
        return SpawnedHere(context, entry)

    def gone(self, procs: int, rank: int) -> None:
        """Report the end of a process to its spawner. On the event loop."""
        notify = self._on_gone.get(procs)
        if notify is None:
            return
        self._running[procs].discard(rank)
        if not self._running[procs]:
            del self._on_gone[procs], self._running[procs]
        notify(rank)

    def weaver_address(self) -> str:
        return asyncio.run_coroutine_threadsafe(self._context.weaver.address(), self._context.loop).result()

    def ask_weaver(self, operation: str, arguments: Mapping[str, Any], timeout: float = 2.0) -> Any:
        """Ask the weaver, and wait for its answer for ``timeout`` seconds."""
        asking = self._context.weaver.client.ask(operation, timeout, **arguments)
        return asyncio.run_coroutine_threadsafe(asking, self._context.loop).result()

    def begin(self, operation: str, arguments: Mapping[str, Any], timeout: float) -> concurrent.futures.Future[Any]:
        answer = self._context.weaver.answer(operation, arguments, timeout)
        return asyncio.run_coroutine_threadsafe(answer, self._context.loop)


class SpawnedHere:
    """The driver's implementation of `loom.driver_api.SpawnedProcs`."""

    def __init__(self, context: SessionContext, entry: MeshEntry) -> None:
        self._context = context
        self._entry = entry
        self.name = entry.name
        self.mesh = entry.mesh

    def stop(self, reason: str) -> None:
        if not self._entry.stopped:
            self._entry.stopped, self._entry.stop_reason = True, because("its processes were stopped", reason)
            stopping = self._context.retire(self._entry.root, stop_quietly(self.mesh, self.name, reason))
            asyncio.run_coroutine_threadsafe(stopping, self._context.loop)
