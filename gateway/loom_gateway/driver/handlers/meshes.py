"""The handlers for creating, slicing, stopping and listing meshes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from loom.actor import monarch_bootstrap_command
from loom.bootstrap import BootstrapCommand
from loom.errors import WrongArguments, WrongState, because
from loom.signatures import endpoints
from loom.wire.bodies import (
    AllHosts,
    AwaitInitialized,
    ForgetMeshes,
    HostOf,
    MakeView,
    SpawnActors,
    SpawnProcs,
    StopMesh,
    WithPython,
)
from loom.wire.messages import Kind, Message
from loom_gateway.driver.handlers.sync import Syncs
from loom_gateway.driver.monarch.errors import as_loom_error
from loom_gateway.driver.monarch.mesh_table import HOST_MESH, MeshEntry, stop_quietly
from loom_gateway.driver.monarch.process_bootstrap import ReplicaPlace, TorchrunPlace, bootstrap_on
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler

STOP_PATIENCE = 40.0  # seconds that Monarch has to stop a mesh; it gives actors and processes 10 each to end


class MeshOperations:
    """The handlers for the meshes of one session."""

    def __init__(self, context: SessionContext, syncs: Syncs) -> None:
        self._context = context
        self._syncs = syncs
        self._stops: dict[int, set[asyncio.Future[Any]]] = {}  # that Monarch is to end, by their processes' id
        context.on_retired.append(self._end_stops)
        self.handlers: dict[int, Handler] = {
            Kind.SPAWN_PROCS: self._or_fail("procs", self._spawn_procs),
            Kind.SPAWN_ACTORS: self._or_fail("actors", self._spawn_actors),
            Kind.VIEW: self._view,
            Kind.STOP: self._stop,
            Kind.INITIALIZED: self._initialized,
            Kind.MESHES: self._list_meshes,
            Kind.FORGET: self._forget,
            Kind.WITH_PYTHON: self._with_python,
            Kind.HOST_OF: self._host_of,
            Kind.ALL_HOSTS: self._all_hosts,
            Kind.LIVING_HOSTS: self._living_hosts,
            Kind.STOP_HOSTS: self._stop_hosts,
        }

    def _or_fail(self, kind: str, spawn: Handler) -> Handler:
        """Return a handler whose failure becomes the cause of every later failure on its mesh."""

        def start(message: Message, started: float) -> None:
            try:
                spawn(message, started)
            except Exception as error:
                self._context.meshes.fail(message.id, kind, as_loom_error(error))
                raise

        return start

    def _spawn_procs(self, message: Message, started: float) -> None:
        request = SpawnProcs.from_body(message.body)
        name = request.name
        what = "the bootstrap function or an option of spawn_procs"
        bootstrap, proc_bind, command, *marks = self._context.decoder.loads(message.parts, what)
        replica = ReplicaPlace(self._context.weaver.session, name, *marks)
        on_path = self._syncs.on_path(message.id)
        on = self._context.meshes.entry(request.hosts)
        torchrun = TorchrunPlace(math.prod(dict(request.per_host).values()), len(on.ranks))
        bootstrap = bootstrap_on(self._context.link_address, message.id, bootstrap, on_path, replica, torchrun)
        self._context.hosts.check(on.ranks)
        mesh = self._context.hosts.mesh_on(on.ranks, on.mesh, on.python).spawn_procs(
            per_host=dict(request.per_host),
            bootstrap=bootstrap,
            name=name,
            proc_bind=proc_bind,
            bootstrap_command=None if command is None else _commands(command),
        )
        ranks = tuple(range(len(mesh)))
        host_of = tuple(host for host in on.ranks for _ in range(len(mesh) // len(on.ranks)))
        entry = MeshEntry(
            "procs", name, mesh, message.id, procs=message.id, ranks=ranks, hosts=host_of, python=on.python
        )
        self._context.meshes.add(message.id, entry)
        for host in self._context.hosts.lost.copy():
            self._context.loop.call_soon_threadsafe(
                self._context.failures.processes_gone_with, message.id, entry, host
            )

    def _spawn_actors(self, message: Message, started: float) -> None:
        request = SpawnActors.from_body(message.body)
        name = request.name
        on = self._context.meshes.entry(request.procs)
        cls, args, kwargs = self._context.decoder.loads(message.parts, f"the class or an argument of {name!r}")
        actors = on.mesh.spawn(name, cls, *args, **kwargs)
        entry = MeshEntry("actors", name, actors, message.id, procs=on.procs, ranks=on.ranks, cls=cls)
        self._context.meshes.add(message.id, entry)
        self._context.loop.call_soon_threadsafe(self._context.failures.unreported.watch_spawn, message.id, entry)

    def _view(self, message: Message, started: float) -> None:
        try:
            self._context.meshes.add_view(message.id, MakeView.from_body(message.body))
        except Exception as error:  # noqa: BLE001 - the whole mesh's failure, or Monarch's refusal of the shape
            self._context.meshes.fail(message.id, "view", as_loom_error(error))

    def _initialized(self, message: Message, started: float) -> None:
        request = AwaitInitialized.from_body(message.body)
        future = self._context.meshes.mesh(request.mesh).initialized
        self._context.futures.whenever(
            self._context.replies.expect(message, started, convert=lambda _: True), future
        )

    def _stop(self, message: Message, started: float) -> None:
        request = StopMesh.from_body(message.body)
        mesh = request.mesh
        known = self._context.meshes.known(mesh)
        if known is not None and known.stopped and known.failure is not None:
            self._context.replies.succeed(message.id, started, None)  # it has stopped already
            return
        entry = self._context.meshes.entry(mesh)
        entry.stopped, entry.stop_reason = True, because("its processes were stopped", request.reason)
        self._context.channels.break_off(lambda called: mesh in (called.root, called.procs))
        stopping = entry.mesh.stop(request.reason)
        self._context.replies.answer_with(message, started, self._await_stop(mesh, entry, stopping))

    async def _await_stop(self, mesh: int, entry: MeshEntry, stopping: Any) -> None:
        await self._context.retire(mesh, self._stopped(entry, stopping))

    def _end_stops(self, ident: int) -> None:
        """End the waits for actors whose processes have stopped."""
        for stop in self._stops.pop(ident, ()):
            stop.cancel()

    async def _stopped(self, entry: MeshEntry, stopping: Any) -> None:
        """Wait until a mesh or its processes have stopped.

        Monarch stops no mesh whose host was silent for long, see `root_client`, and may answer nothing about actors
        whose processes are stopped at the same time (torchmonarch 0.7).
        """
        stop = asyncio.ensure_future(stopping.as_asyncio())
        self._stops.setdefault(entry.procs, set()).add(stop)
        await asyncio.wait({stop}, timeout=STOP_PATIENCE)
        self._stops.get(entry.procs, {stop}).discard(stop)
        if stop.done():
            if not stop.cancelled():
                stop.result()
            return
        stop.cancel()
        if entry.kind != "procs":
            raise WrongState(
                f"Monarch has not stopped {entry.name} in {STOP_PATIENCE:g} s, as after a host was without "
                f"network: stop its processes"
            )
        for rank in entry.ranks:
            self._context.failures.process_gone(entry.procs, rank)

    def _list_meshes(self, message: Message, started: float) -> None:
        listed = []
        for ident, entry in self._context.meshes.whole():
            if entry.kind == "hosts" or ident < 0:
                continue
            described = None
            if entry.cls is not None:
                described = {name: sig.parameters for name, sig in endpoints(entry.cls).items()}
            class_name = entry.cls.__name__ if entry.cls is not None else ""
            shape = self._context.meshes.shape(entry)
            listed.append((ident, entry.kind, entry.name, shape, class_name, described, entry.stopped))
        self._context.replies.succeed(message.id, started, listed)

    def _forget(self, message: Message, started: float) -> None:
        for mesh in ForgetMeshes.from_body(message.body).meshes:
            self._context.meshes.forget(mesh)

    def _with_python(self, message: Message, started: float) -> None:
        request = WithPython.from_body(message.body)
        on = self._context.meshes.entry(request.hosts)
        mesh = on.mesh.with_python_executable(request.executable)
        self._add_hosts(message.id, mesh, on.ranks, request.executable)

    def _host_of(self, message: Message, started: float) -> None:
        on = self._context.meshes.entry(HostOf.from_body(message.body).procs)
        whole = self._context.meshes.entry(on.procs) if on.procs >= 0 else None
        hosts = tuple(whole.hosts[rank] for rank in on.ranks) if whole is not None and whole.hosts else (0,)
        self._add_hosts(message.id, on.mesh.host_mesh, hosts, on.python)

    def _all_hosts(self, message: Message, started: float) -> None:
        count, known = AllHosts.from_body(message.body).count, self._context.hosts.addresses
        if not 0 < count <= len(known):
            raise WrongArguments(f"this session has {len(known)} hosts, and not {count}")
        hosts, first = tuple(range(count)), self._context.meshes.mesh(HOST_MESH)
        self._add_hosts(message.id, self._context.hosts.mesh_on(hosts, first), hosts, "")

    def _living_hosts(self, message: Message, started: float) -> None:
        hosts = self._context.hosts.living()
        self._add_hosts(message.id, self._context.hosts.at_addresses(hosts), hosts, "")
        self._context.replies.succeed(message.id, started, hosts)

    def _add_hosts(self, ident: int, mesh: Any, ranks: tuple[int, ...], python: str) -> None:
        self._context.meshes.add(ident, MeshEntry("hosts", "hosts", mesh, ident, ranks=ranks, python=python))

    def _stop_hosts(self, message: Message, started: float) -> None:
        self._context.channels.break_off(lambda called: True)
        self._context.replies.answer_with(message, started, self.stop_all("its processes were stopped"))

    async def stop_all(self, reason: str) -> None:
        """Stop every proc mesh of the session, newest first, for a reason in words."""
        running = [(ident, entry) for ident, entry in self._context.meshes.whole("procs") if not entry.stopped]
        for _, entry in running:
            entry.stopped, entry.stop_reason = True, reason
        stops = [
            self._context.retire(ident, stop_quietly(entry.mesh, entry.name, "the session has ended"))
            for ident, entry in reversed(running)
        ]
        await asyncio.gather(self._syncs.stop(), *stops)


def _commands(command: Any) -> Callable[[Any], Any]:
    """Return Monarch's ``bootstrap_command``: a function that makes the command for the process at a point."""
    if isinstance(command, BootstrapCommand) or not callable(command):
        return command  # type: ignore[no-any-return]

    def at(point: Any) -> Any:
        made = command(point)
        return monarch_bootstrap_command(made) if isinstance(made, BootstrapCommand) else made

    return at
