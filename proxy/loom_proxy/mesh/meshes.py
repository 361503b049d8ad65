"""Proxies of the meshes in the cluster, with Monarch's names and signatures.

Making a proxy never waits: the laptop gives the new mesh an id and sends the operation, and whatever is made of
the mesh names that id. If the operation fails, what depends on it fails with the same cause.
"""

from __future__ import annotations

import difflib
import logging
import math
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from loom.bootstrap import BootstrapCommand
from loom.control.commands import Acknowledgement, check_config
from loom.errors import (
    EndpointNameTaken,
    EndpointNotFound,
    HostsNotOwned,
    MeshStopped,
    NoSuchMesh,
    NotAnEndpoint,
    NotOneActor,
    NotOneProcess,
    NotSupported,
    UnpicklableError,
    WrongArguments,
)
from loom.shape import MeshTrait, Point, Shape
from loom.signatures import CallSignature, check_actor, constructor, endpoints
from loom.wire.codec import Made
from loom.wire.messages import Kind
from loom_proxy.futures.future import FutureProxy
from loom_proxy.logs import set_logging_option
from loom_proxy.mesh.values import ValueMeshProxy
from loom_proxy.session.connection import Connection

__all__ = ["ActorMeshProxy", "EndpointProxy", "HostMeshProxy", "MeshProxy", "ProcMeshProxy", "WholeMesh"]

P = TypeVar("P", bound="MeshProxy")


GIVES_WAY = frozenset({"reconfigure"})
"""Names of Loom's own, which a Monarch program may use for endpoints: those are what the mesh has then."""


class WholeMesh:
    """A whole mesh of the session; its proxy and the proxies of its slices share it."""

    def __init__(
        self, connection: Connection, ident: int, name: str, shape: Shape, procs: int | None = None
    ) -> None:
        self.connection = connection
        self.ident = ident
        self.name = name
        self.shape = shape
        self.hosts: HostMeshProxy | None = None
        """Of a proc mesh that was spawned from here, the hosts that it is on."""
        self.stopped = False
        """Whether the whole mesh was stopped from here."""
        self.procs = ident if procs is None else procs
        """Id of the proc mesh that an actor mesh is in; its own for others."""
        self._views = {shape: ident}
        self._lock = threading.Lock()
        connection.wholes[ident] = self
        connection.states.add(ident, name, shape, procs)

    def ident_of(self, shape: Shape) -> int:
        """The id of a part of the mesh, told to the driver the first time it is needed."""
        ident = self._views.get(shape)
        if ident is None:
            with self._lock:
                ident = self._views.get(shape)
                if ident is None:
                    body = (self.ident, shape.labels, shape.offset, shape.sizes, shape.strides)
                    ident = self.connection.send(Kind.VIEW, body)
                    self._views[shape] = ident
                    self.connection.states.add_part(ident, self.ident, shape)
        return ident


def proxy_of(connection: Connection, made: Made) -> Any:
    """The proxy of a mesh, or of a value mesh, that came in a result."""
    labels, offset, sizes, strides = made.shape
    shape = Shape(tuple(labels), offset, tuple(sizes), tuple(strides))
    if made.kind == "values":
        return ValueMeshProxy(shape, made.values or [])
    whole = connection.wholes.get(made.root)
    if whole is None:
        whole = WholeMesh(connection, made.mesh, made.name, shape)
        if made.mesh < 0:
            weakref.finalize(whole, connection.forget, made.mesh)
    if made.kind == "hosts":
        return HostMeshProxy(whole, shape)
    if made.kind == "procs":
        return ProcMeshProxy(whole, shape)
    signatures = {
        label: CallSignature(f"{made.class_name}.{label}", parameters)
        for label, parameters in (made.endpoints or {}).items()
    }
    return ActorMeshProxy(whole, shape, class_name=made.class_name, signatures=signatures)


class MeshProxy(MeshTrait):
    """What host, proc and actor meshes have in common."""

    # The names start with underscores because an actor's endpoints may have any other name.

    def __init__(self, whole: WholeMesh, shape: Shape | None = None) -> None:
        self._whole = whole
        self.__shape = shape if shape is not None else whole.shape

    @property
    def _shape(self) -> Shape:
        return self.__shape

    @property
    def _ident(self) -> int:
        return self._whole.ident_of(self.__shape)

    def _new_with_shape(self: P, shape: Shape) -> P:
        return type(self)(self._whole, shape)

    def __loom_reference__(self, session: object) -> int:
        connection = self._whole.connection
        if session is not connection:
            raise NoSuchMesh(
                f"{self!r} belongs to session {connection.welcome.session!r} and can be passed inside that one only"
            )
        connection.check_open()
        return self._ident

    def __reduce__(self) -> Any:
        raise UnpicklableError(
            f"{type(self).__name__} {self._whole.name!r} means something only in its own session: pass it to an "
            f"endpoint, a constructor or job.run, where it arrives as the real mesh"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshProxy):
            return NotImplemented
        return self._whole is other._whole and self.__shape == other.__shape

    def __hash__(self) -> int:
        return hash((id(self._whole), self.__shape))

    @property
    def initialized(self) -> FutureProxy[bool]:
        """Done, with True, once the mesh has been created in the cluster."""
        return self._whole.connection.ask(Kind.INITIALIZED, (self._ident,))

    def _repr_html_(self) -> str:
        from loom_proxy.display.notebook import mesh_html

        return mesh_html(self)

    def __repr__(self) -> str:
        part = "" if self.__shape == self._whole.shape else f" of {self._whole.shape.extent}"
        return f"<{type(self).__name__} {self._whole.name!r} {self.extent}{part}>"


class HostMeshProxy(MeshProxy):
    """The worker hosts. As ``monarch.actor.HostMesh``."""

    _marks: ClassVar[tuple[dict[str, str], ...]] = ()
    """Environments for what is spawned here, beside the driver's own. Drivers of older versions know of none."""

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
            proc_bind: for each process of a host, what it is bound to: ``cpunodebind``, ``membind``,
                ``physcpubind`` or ``cpus``, as for ``numactl`` and ``taskset``.
            bootstrap_command: what starts the processes, see `loom.default_bootstrap_cmd`; or a function that
                gives it for a process, called in the cluster with a Monarch ``Point``.

        Raises:
            ValueError: a dimension has the name of one of the hosts', a size is not positive, or ``proc_bind`` is
                not as long as there are processes on a host.
            WrongArguments: ``bootstrap_command`` is neither a command nor a function.
        """
        per_host = dict(per_host or {})
        for label, size in per_host.items():
            if label in self._shape.labels:
                raise ValueError(f"per_host dimension {label!r} is a dimension of the hosts already")
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"per_host={per_host}: {label} must be a number of processes, at least 1")
        a_host = math.prod(per_host.values())
        if proc_bind is not None and len(proc_bind) != a_host:
            raise ValueError(f"proc_bind has {len(proc_bind)} entries, but there are {a_host} processes on a host")
        if bootstrap_command is not None and not callable(bootstrap_command):
            raise WrongArguments(
                f"bootstrap_command is a command or a function that gives one, not {bootstrap_command!r:.80}"
            )
        name = name or "anon"
        connection = self._whole.connection
        connection.check_open()
        options = (bootstrap, proc_bind, bootstrap_command, *self._marks)
        parts = connection.encoder.dumps(options, "spawn_procs (bootstrap, proc_bind, bootstrap_command)")
        ident = connection.send(Kind.SPAWN_PROCS, (self._ident, name, per_host), parts)
        shape = Shape.row_major({**self.sizes, **per_host})
        whole = WholeMesh(connection, ident, name, shape)
        whole.hosts = self
        procs = ProcMeshProxy(whole)
        connection.meshes[name] = procs
        return procs

    def as_injectable(self) -> HostMeshProxy:
        """The same hosts; failures may be injected on purpose into the processes that are spawned there, and hosts.

        Into their threadlets, that is: see `loom.chaos`. What was spawned otherwise is refused.
        """
        return InjectableHostMeshProxy(self._whole, self._shape)

    def with_python_executable(self, python_executable: str) -> HostMeshProxy:
        """The same hosts, whose processes run another Python.

        Args:
            python_executable: path to it on the hosts.
        """
        connection = self._whole.connection
        ident = connection.send(Kind.WITH_PYTHON, (self._ident, str(python_executable)))
        return type(self)(WholeMesh(connection, ident, self._whole.name, self._shape))

    def stop(self) -> FutureProxy[None]:
        """Stop every process of the session on these hosts; done when they have stopped. The hosts stay usable.

        Raises:
            HostsNotOwned: these are not all hosts; Monarch refuses this too.
        """
        if len(self) != len(self._whole.shape):
            raise HostsNotOwned(f"{self!r} is a part of the hosts: stop its proc meshes one by one")
        return self._whole.connection.ask(Kind.STOP_HOSTS, ())

    def shutdown(self) -> FutureProxy[None]:
        """Refused: the hosts belong to the gateway.

        Raises:
            HostsNotOwned: always. `stop` ends the session's processes, `Job.close` the session.
        """
        raise HostsNotOwned(
            "the hosts belong to the gateway, and other sessions may use them: end this session's processes with "
            "stop(), the session with Job.close(), or the workers where they were started"
        )

    async def __aenter__(self) -> HostMeshProxy:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        await self.stop()


class InjectableHostMeshProxy(HostMeshProxy):
    """Hosts whose processes are marked as injectable; made by `HostMeshProxy.as_injectable`."""

    _marks = ({"LOOM_INJECTABLE": "1"},)


class ProcMeshProxy(MeshProxy):
    """Processes on the hosts. As ``monarch.actor.ProcMesh``."""

    def spawn(self, name: str, Class: type, *args: Any, **kwargs: Any) -> Any:
        """Start an actor of a class in every process of this mesh.

        Args:
            name: name of the actor mesh, also its key in `Job.meshes`.
            Class: a subclass of `loom.Actor`.
            *args, **kwargs: for its constructor. Actor and proc meshes arrive as real Monarch meshes.

        Returns:
            ActorMeshProxy: with the class's endpoints.

        Raises:
            NotAnActor: ``Class`` is no `Actor`, or mixes ``def`` and ``async def`` (a `ValueError`).
            EndpointNameTaken: an endpoint has the name of an attribute of every actor mesh.
            WrongArguments: ``Class`` is no class, or its constructor does not take the arguments.
            UnpicklableError: the class or an argument cannot be pickled; the text names the attribute.
            PythonVersionMismatch: the class would have to travel by value to another version of Python.
        """
        if not isinstance(Class, type):
            raise WrongArguments(f"spawn({name!r}, …) takes an actor class, not {Class!r:.80}")
        check_actor(Class)
        signatures = endpoints(Class)
        taken = sorted(label for label in signatures if hasattr(ActorMeshProxy, label) and label not in GIVES_WAY)
        if taken:
            raise EndpointNameTaken(
                f"{Class.__name__}.{taken[0]} cannot be an endpoint: every actor mesh has an attribute of that name"
            )
        constructor(Class).check(args, kwargs)
        connection = self._whole.connection
        connection.check_open()
        what = f"{Class.__name__} (class, args, kwargs)"
        parts = connection.encoder.dumps((Class, args, kwargs), what, self._whole.procs)
        ident = connection.send(Kind.SPAWN_ACTORS, (self._ident, name), parts)
        # The actors are counted from this mesh, whichever part of the processes it is.
        whole = WholeMesh(connection, ident, name, self._shape, self._whole.ident)
        actors = ActorMeshProxy(whole, class_name=Class.__name__, signatures=signatures, cls=Class)
        connection.meshes[name] = actors
        return actors

    @property
    def host_mesh(self) -> HostMeshProxy:
        """The host of a single process.

        Raises:
            NotOneProcess: the mesh has several processes (a `NotImplementedError`, as Monarch's).
        """
        if len(self) != 1:
            raise NotOneProcess(f"host_mesh is that of a single process, but {self!r} has {len(self)}: slice() one")
        hosts = self._whole.hosts
        if hosts is not None:
            index = self._shape.offset // (len(self._whole.shape) // len(hosts))
            point = Point(index, hosts.extent)
            return hosts.slice(**point)
        connection = self._whole.connection
        ident = connection.send(Kind.HOST_OF, (self._ident,))
        return HostMeshProxy(WholeMesh(connection, ident, "hosts", Shape.row_major({})))

    async def __aenter__(self) -> ProcMeshProxy:
        if self._whole.stopped:
            raise MeshStopped(f"{self!r} has been stopped")
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
        """Say what is shown here of what the processes of this mesh print. Done when it holds; may be awaited.

        Arguments and their defaults are Monarch's. Until it is called, a mesh streams with a window of half a
        second, whereas a mesh of Monarch's on attached workers does not stream: what actors print in a program of
        Monarch's own hosts is seen too. `Job.on_log` gets what is shown; ``loom logs`` has all lines of all meshes.

        Args:
            stream_to_client: whether lines come here.
            aggregate_window_sec: seconds over which identical lines are shown as one, ``[4 similar log lines]``;
                None or 0 shows each at once. Monarch also takes lines for one that are merely alike.
            level: level of the root logger in each process, 0 to 255.

        Raises:
            InvalidLogOption: a window without streaming, a level or a window out of range, or a part of a mesh.
        """
        return set_logging_option(self, stream_to_client, aggregate_window_sec, level)

    def stop(self, reason: str = "stopped by client") -> FutureProxy[None]:
        """Stop the processes of this mesh and the actors in them; done when they have stopped."""
        if self._shape == self._whole.shape:
            self._whole.stopped = True
        self._whole.connection.states.stopped(self._ident)
        return self._whole.connection.ask(Kind.STOP, (self._ident, reason))


class ActorMeshProxy(MeshProxy):
    """Actors of one class, one a process; its attributes are their endpoints. As ``monarch.actor.ActorMesh``."""

    def __init__(
        self,
        whole: WholeMesh,
        shape: Shape | None = None,
        *,
        class_name: str,
        signatures: Mapping[str, CallSignature],
        cls: type | None = None,
    ) -> None:
        super().__init__(whole, shape)
        self._class_name = class_name
        self._signatures = signatures
        self._class = cls
        for name in GIVES_WAY & signatures.keys():
            self.__dict__[name] = EndpointProxy(self, name, signatures[name])

    def _new_with_shape(self, shape: Shape) -> ActorMeshProxy:
        return ActorMeshProxy(
            self._whole, shape, class_name=self._class_name, signatures=self._signatures, cls=self._class
        )

    def __getattr__(self, name: str) -> EndpointProxy | NotAnEndpointProxy:
        if name.startswith("__") or "_signatures" not in self.__dict__:
            raise AttributeError(name)
        signature = self._signatures.get(name)
        if signature is None:
            if self._class is not None and hasattr(self._class, name):
                return NotAnEndpointProxy(self, name)
            raise self._no_endpoint(name)
        endpoint = EndpointProxy(self, name, signature)
        self.__dict__[name] = endpoint  # found without __getattr__ from now on
        return endpoint

    def _no_endpoint(self, name: str) -> EndpointNotFound:
        near = difflib.get_close_matches(name, self._signatures, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(sorted(self._signatures)) or "none"
        return EndpointNotFound(f"{self._class_name} has no endpoint {name!r}{hint} Its endpoints: {known}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._signatures})

    @property
    def initialized(self) -> FutureProxy[Any]:
        """Done once the actors have been created in the cluster."""
        future: FutureProxy[Any] = self._whole.connection.ask(Kind.INITIALIZED, (self._ident,))
        future._convert = lambda _: None  # Monarch's True is for hosts and processes only
        return future

    def stop(self, reason: str = "stopped by client") -> FutureProxy[None]:
        """Stop the actors of this mesh; their processes live on. Done when they have stopped."""
        self._whole.connection.states.stopped(self._ident)
        return self._whole.connection.ask(Kind.STOP, (self._ident, reason))

    def reconfigure(self, /, **config: Any) -> FutureProxy[ValueMeshProxy[Acknowledgement]]:
        """Give the training in these actors new values of its configuration, at its next step boundary.

        The same command as `loom_proxy.weaver.client.WeaverProxy.update_config`, to the replicas that live in these
        actors' processes. An actor with an endpoint of this name keeps it.

        Args:
            config: keys for which the training has handlers (`loom.Threadlet.handler`), and their values: numbers,
                texts, booleans, None, and lists and dicts of them.

        Returns:
            A future of what became of it in each process: the step, old and new values, or why it was refused.

        Raises:
            WrongArguments: there is no key, or a value is of another kind.
        """
        check_config(config)
        shape = self._shape
        future: FutureProxy[Any] = self._whole.connection.ask(Kind.RECONFIGURE, (self._ident, config))
        future._convert = lambda answers: ValueMeshProxy(shape, [Acknowledgement.from_body(one) for one in answers])
        return future

    def __repr__(self) -> str:
        part = "" if self._shape == self._whole.shape else f" of {self._whole.shape.extent}"
        return f"<ActorMeshProxy {self._whole.name!r} of {self._class_name} {self.extent}{part}>"


class NotAnEndpointProxy:
    """A method, or another attribute, of the actors of a mesh that is no endpoint; `loom.as_endpoint` takes it."""

    def __init__(self, mesh: ActorMeshProxy, name: str) -> None:
        self._mesh = mesh
        self._name = name

    def _refusal(self) -> NotAnEndpoint:
        name = f"{self._mesh._class_name}.{self._name}"
        return NotAnEndpoint(
            f"{name} is not an endpoint: decorate it with @loom.endpoint, or call it with "
            f"loom.as_endpoint(mesh.{self._name}).call(…)"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refusal()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._refusal()

    def __repr__(self) -> str:
        return f"<{self._mesh._class_name}.{self._name}, not an endpoint>"


class EndpointProxy:
    """An endpoint of the actors of a mesh. Its methods are Monarch's adverbs.

    All raise `WrongArguments` or `UnpicklableError` before anything is sent.
    """

    def __init__(self, mesh: ActorMeshProxy, name: str, signature: CallSignature) -> None:
        self._mesh = mesh
        self._connection = mesh._whole.connection
        self._key = mesh._whole.ident
        self._name = name
        self._signature = signature
        self._single = len(mesh) == 1
        self._procs = mesh._whole.procs
        self._body: tuple[int, str] | None = None

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, str], Any]:
        connection = self._connection
        connection.check_open()
        self._signature.check(args, kwargs)
        parts = connection.encoder.dumps((args, kwargs), f"{self._signature.name} (args, kwargs)", self._procs)
        if self._body is None:
            self._body = (self._mesh._ident, self._name)
        return self._body, parts

    def call(self, *args: Any, **kwargs: Any) -> FutureProxy[ValueMeshProxy[Any]]:
        """Call every actor; the result is a `ValueMeshProxy` of all results."""
        body, parts = self._prepare(args, kwargs)
        future = self._connection.ask(Kind.CALL, body, parts, self._key)
        shape = self._mesh._shape
        future._convert = lambda values: ValueMeshProxy(shape, values)
        return future

    def call_one(self, *args: Any, **kwargs: Any) -> FutureProxy[Any]:
        """Call the only actor of the mesh.

        Raises:
            NotOneActor: the mesh has several; select one with `slice`, or use `call` or `choose`.
        """
        if not self._single:
            raise NotOneActor(
                f"call_one needs exactly one actor, but this mesh has {len(self._mesh)} ({self._mesh.extent}): "
                f"select one with slice(), or use call() or choose()"
            )
        body, parts = self._prepare(args, kwargs)
        return self._connection.ask(Kind.CALL_ONE, body, parts, self._key)

    def choose(self, *args: Any, **kwargs: Any) -> FutureProxy[Any]:
        """Call one actor of the mesh, picked at random for each call."""
        body, parts = self._prepare(args, kwargs)
        return self._connection.ask(Kind.CHOOSE, body, parts, self._key)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[FutureProxy[Any]]:
        """Call every actor; the futures are done in the order in which the results come."""
        body, parts = self._prepare(args, kwargs)
        return iter(self._connection.ask_many(len(self._mesh), Kind.STREAM, body, parts, self._key))

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Send to every actor and wait for nothing. An actor that raises dies, as with Monarch."""
        body, parts = self._prepare(args, kwargs)
        self._connection.send(Kind.BROADCAST, body, parts, self._key)

    def rref(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: it gives a tensor of Monarch's tensor engine, which is not on this side.

        Raises:
            NotSupported: always. Use `call`, or `loom.send` with a port.
        """
        raise NotSupported(
            f"{self._signature.name}.rref() needs Monarch's tensor engine and an active device mesh, which Loom "
            f"does not have: use call(…), or loom.send(…) with a port"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise WrongArguments(
            f"{self._signature.name} is an endpoint: say how to call it, with .call(…), .call_one(…), .choose(…), "
            f".stream(…) or .broadcast(…)"
        )

    def _repr_html_(self) -> str:
        from loom_proxy.display.notebook import endpoint_html

        return endpoint_html(self)

    def __repr__(self) -> str:
        return f"<EndpointProxy {self._signature} on {self._mesh.extent}>"
