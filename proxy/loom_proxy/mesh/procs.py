"""Proxies of hosts and of the processes on them, which share a module because each makes the other."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from loom.bootstrap import BootstrapCommand
from loom.errors import (
    InvalidLogOption,
    NameTaken,
    NotOneProcess,
    WrongArguments,
    WrongState,
)
from loom.shape import Point, Shape
from loom.signatures import CallSignature, check_actor, constructor, endpoints
from loom.wire.bodies import (
    HostOf,
    ListMeshes,
    SetLogOptions,
    SpawnActors,
    SpawnProcs,
    StopHosts,
    StopMesh,
    WithPython,
)
from loom.wire.codec import Made
from loom.wire.plain import plain, shortened
from loom_proxy.futures.future import FutureProxy
from loom_proxy.mesh.actors import GIVES_WAY, ActorMeshProxy
from loom_proxy.mesh.base import MeshProxy, WholeMesh
from loom_proxy.mesh.values import ValueMeshProxy
from loom_proxy.remote_exec.methods import RankMethods
from loom_proxy.session.calls import Calls

HIGHEST_LEVEL = 255

MOST_PROCESSES = 1 << 20  # processes of the largest mesh

LONGEST_WINDOW = 3600.0  # seconds of the longest window over which identical lines are shown as one


class HostMeshProxy(MeshProxy):
    """The worker hosts; the counterpart of ``monarch.actor.HostMesh``."""

    _NOUN = "host"

    _marks: ClassVar[tuple[dict[str, str], ...]] = ()
    """Extra environments of processes spawned here. Sent only if there are any: older drivers expect none."""

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], None] | Callable[[], Awaitable[None]] | None = None,
        name: str | None = None,
        proc_bind: list[dict[str, str]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Any], Any] | None = None,
    ) -> ProcMeshProxy:
        """Start processes on every host of this mesh.

        Args:
            per_host: dimensions of the processes on each host, such as ``{"gpus": 8}``; one process without it.
            bootstrap: called in each new process before anything else.
            name: name of the proc mesh, ``anon`` without one.
            proc_bind: the CPU and memory binding of each process of a host: ``cpunodebind``, ``membind``,
                ``physcpubind`` or ``cpus``, with the values of ``numactl`` and ``taskset``.
            bootstrap_command: the command that starts the processes, see `loom.default_bootstrap_cmd`; or a
                function that returns it for a process, called in the cluster with a Monarch ``Point``.

        Raises:
            ValueError: a dimension has the name of a dimension of the hosts, a size is not positive, or
                ``proc_bind`` has not one entry for each process of a host.
            WrongArguments: ``bootstrap_command`` is neither a command nor a function.
        """
        per_host = {} if per_host is None else plain(per_host, "per_host")
        if not isinstance(per_host, dict):
            raise WrongArguments(f"per_host: sizes by the names of dimensions, not {shortened(per_host)}")
        for label, size in per_host.items():
            if label in self._shape.labels:
                raise ValueError(
                    f"per_host labels {list(per_host)} overlap with host labels {tuple(self._shape.labels)}"
                )
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"per_host={shortened(per_host)}: {label} must be a number, at least 1")
        a_host = math.prod(per_host.values())
        if a_host * len(self) > MOST_PROCESSES:
            raise ValueError(f"per_host={per_host}: a mesh has {MOST_PROCESSES:,} processes at most")
        if proc_bind is not None and len(proc_bind) != a_host:
            raise ValueError(f"proc_bind length ({len(proc_bind)}) must equal procs_per_host ({a_host})")
        if bootstrap_command is not None and not callable(bootstrap_command):
            raise WrongArguments(
                f"bootstrap_command is a command or a function that gives one, not {bootstrap_command!r:.80}"
            )
        name = plain(name, "name") or "anon"
        caller = self._whole.caller
        caller.check_open()
        if caller.environment is not None:
            from loom.launch.environment import bootstrap_in

            bootstrap = bootstrap_in(caller.environment, bootstrap)
        options = (bootstrap, proc_bind, bootstrap_command, *self._marks)
        parts = caller.encoder.dumps(options, "spawn_procs (bootstrap, proc_bind, bootstrap_command)")
        ident = caller.send(SpawnProcs(self._ident, name, per_host), parts)
        shape = Shape.row_major({**self.sizes, **per_host})
        whole = WholeMesh(caller, ident, name, shape)
        whole.hosts = self
        procs = ProcMeshProxy(whole)
        caller.meshes.add(procs)
        return procs

    def as_injectable(self) -> HostMeshProxy:
        """Return the same hosts, with processes spawned there marked as injectable.

        Only marked processes accept injected faults, which their threadlets inject; see `loom.chaos`.
        """
        return InjectableHostMeshProxy(self._whole, self._shape)

    def with_python_executable(self, python_executable: str) -> HostMeshProxy:
        """Return the same hosts, with processes spawned there running another Python.

        Args:
            python_executable: path of the interpreter on the hosts.
        """
        caller = self._whole.caller
        ident = caller.send(WithPython(self._ident, str(python_executable)))
        return type(self)(WholeMesh(caller, ident, self._whole.name, self._shape))

    def stop(self) -> FutureProxy[None]:
        """Stop every process of the session on these hosts. The hosts stay usable.

        Returns:
            A future that is done when the processes have stopped.

        Raises:
            HostsNotOwned: these are not all hosts; Monarch refuses this, too.
        """
        if len(self) != len(self._whole.shape):
            raise WrongState(
                f"{self!r} is a part of the hosts: stop its proc meshes one by one", code="hosts_not_owned"
            )
        self._whole.caller.note_stopped()
        return self._whole.caller.ask(StopHosts())

    def shutdown(self) -> FutureProxy[None]:
        """Raise an error, since the hosts belong to the gateway.

        Raises:
            HostsNotOwned: always. `stop` ends the session's processes, `Job.close` the session.
        """
        raise WrongState(
            "the hosts belong to the gateway, and other sessions may use them: end this session's processes with "
            "stop(), the session with Job.close(), or the workers where they were started",
            code="hosts_not_owned",
        )

    async def __aenter__(self) -> HostMeshProxy:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        await self.stop()


class InjectableHostMeshProxy(HostMeshProxy):
    """Hosts whose processes are marked as injectable, from `HostMeshProxy.as_injectable`."""

    _marks = ({"LOOM_INJECTABLE": "1"},)


class ProcMeshProxy(RankMethods):
    """Processes on the hosts; the counterpart of ``monarch.actor.ProcMesh``."""

    _NOUN = "process"

    def spawn(self, name: str, Class: type, *args: Any, **kwargs: Any) -> Any:
        """Start an actor of a class in every process of this mesh.

        Args:
            name: name of the actor mesh, also its key in `Job.meshes`.
            Class: a subclass of `loom.Actor`.
            *args, **kwargs: arguments of the constructor. Actor and proc meshes arrive as real Monarch meshes.

        Returns:
            ActorMeshProxy: the actors, with the class's endpoints.

        Raises:
            NotAnActor: ``Class`` is no `Actor`, or mixes ``def`` and ``async def`` (a `ValueError`).
            EndpointNameTaken: an endpoint has the name of an attribute of every actor mesh.
            WrongArguments: ``Class`` is no class, or its constructor does not take the arguments.
            UnpicklableError: the class or an argument cannot be pickled; the text names the attribute.
            PythonVersionMismatch: the class would have to travel by value to another version of Python.
        """
        if not isinstance(Class, type):
            raise WrongArguments(
                f"issubclass() arg 1 must be a class: spawn({name!r}, …) takes an actor class, not {Class!r:.80}"
            )
        check_actor(Class)
        signatures = endpoints(Class)
        taken = sorted(label for label in signatures if hasattr(ActorMeshProxy, label) and label not in GIVES_WAY)
        if taken:
            raise NameTaken(
                f"ActorMesh has an attribute that collides with an endpoint name: attribute={taken[0]}, "
                f"ActorMesh.{taken[0]}={getattr(ActorMeshProxy, taken[0])!r:.80}: "
                f"give {Class.__name__}.{taken[0]} another name",
                code="endpoint_name_taken",
            )
        constructor(Class).check(args, kwargs)
        caller = self._whole.caller
        caller.check_open()
        what = f"{Class.__name__} (class, args, kwargs)"
        parts = caller.encoder.dumps((Class, args, kwargs), what, self._whole.procs)
        name = plain(name, "name")
        ident = caller.send(SpawnActors(self._ident, name), parts)
        # Ranks of the actors count from this mesh, even if it is a part of the processes.
        whole = WholeMesh(caller, ident, name, self._shape, self._whole.ident)
        actors = ActorMeshProxy(whole, class_name=Class.__name__, signatures=signatures, cls=Class)
        caller.meshes.add(actors)
        return actors

    @property
    def host_mesh(self) -> HostMeshProxy:
        """The host of a single process.

        Raises:
            NotOneProcess: the mesh has several processes (a `NotImplementedError`, as Monarch's).
        """
        if len(self) != 1:
            raise NotOneProcess(
                "`ProcMesh.host_mesh` is not yet supported for non-singleton proc meshes. "
                f"{self!r} has {len(self)}: slice() one"
            )
        hosts = self._whole.hosts
        if isinstance(hosts, HostMeshProxy):
            index = self._shape.offset // (len(self._whole.shape) // len(hosts))
            point = Point(index, hosts.extent)
            return hosts.slice(**point)
        caller = self._whole.caller
        ident = caller.send(HostOf(self._ident))
        return HostMeshProxy(WholeMesh(caller, ident, "hosts", Shape.row_major({})))

    async def __aenter__(self) -> ProcMeshProxy:
        if self._whole.stopped:
            raise WrongState(f"`ProcMesh` has already been stopped: {self!r}", code="mesh_stopped")
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        if not self._whole.stopped:
            await self.stop()

    def logging_option(
        self,
        stream_to_client: bool = False,
        aggregate_window_sec: float | None = None,
        level: int = logging.INFO,
    ) -> FutureProxy[None]:
        """Choose which lines that the processes of this mesh print are shown here.

        Arguments and their defaults are Monarch's. Until this is called, a mesh streams with a window of half a
        second, so that prints show as they do in a Monarch program with its own hosts. (Monarch's meshes on
        attached workers do not stream.) `Job.on_log` gets the shown lines; ``loom logs`` has all lines of all
        meshes.

        Args:
            stream_to_client: whether lines are sent to this program.
            aggregate_window_sec: seconds over which identical lines are shown as one, ``[4 similar log lines]``;
                None or 0 shows each at once. Monarch also merges lines that are merely similar.
            level: level of the root logger in each process, 0 to 255.

        Returns:
            A future that is done when the options are in force.

        Raises:
            InvalidLogOption: a window without streaming, a level or a window out of range, or a part of a mesh.
        """
        level, window = plain(level, "level"), plain(aggregate_window_sec, "aggregate_window_sec")
        if not isinstance(level, int) or not 0 <= level <= HIGHEST_LEVEL:
            raise InvalidLogOption(f"Invalid logging level: {level!r}; it is a number from 0 to {HIGHEST_LEVEL}")
        if window is not None:
            if not stream_to_client:
                raise InvalidLogOption("cannot set aggregate window without streaming to client")
            is_number = isinstance(window, (int, float)) and not isinstance(window, bool)
            if not is_number or not 0 <= window <= LONGEST_WINDOW:
                raise InvalidLogOption(
                    f"aggregate_window_sec={window!r}: it is None, or 0 to {LONGEST_WINDOW:g} seconds"
                )
        if self._shape != self._whole.shape:
            raise InvalidLogOption(f"{self!r} is a part of a mesh: logging_option is for the whole of it")
        options = SetLogOptions(self._ident, bool(stream_to_client), window or None, level)
        return self._whole.caller.ask(options)

    def stop(self, reason: str = "stopped by client") -> FutureProxy[None]:
        """Stop the processes of this mesh and the actors in them.

        Returns:
            A future that is done when the processes have stopped.
        """
        reason = plain(reason, "reason")
        if self._shape == self._whole.shape:
            self._whole.stopped = True
            self._whole.caller.note_stopped(self._whole.ident)
        self._whole.caller.states.stopped(self._ident)
        return self._whole.caller.ask(StopMesh(self._ident, reason))


def proxy_of(caller: Calls, made: Made) -> Any:
    """Return the proxy of a mesh, or of a value mesh, that came in a result."""
    labels, offset, sizes, strides = made.shape
    shape = Shape.of(tuple(labels), offset, tuple(sizes), tuple(strides))
    if made.kind == "values":
        return ValueMeshProxy(shape, made.values or [])
    whole = caller.wholes.get(made.root)
    if whole is None:
        whole = WholeMesh(caller, made.mesh, made.name, shape)
        if made.mesh < 0:
            weakref.finalize(whole, caller.forget, made.mesh)
    if made.kind == "hosts":
        return HostMeshProxy(whole, shape)
    if made.kind == "procs":
        return ProcMeshProxy(whole, shape)
    signatures = {
        label: CallSignature(f"{made.class_name}.{label}", parameters)
        for label, parameters in (made.endpoints or {}).items()
    }
    return ActorMeshProxy(whole, shape, class_name=made.class_name, signatures=signatures)


def find_meshes(caller: Calls) -> None:
    """Make proxies of the meshes of the session's earlier clients."""
    listed = caller.ask(ListMeshes()).get()
    for ident, kind, name, shape, class_name, signatures, stopped in listed:
        if not stopped and ident not in caller.meshes:
            made = Made(kind, ident, name, shape, ident, class_name, signatures)
            caller.meshes.add(proxy_of(caller, made))
