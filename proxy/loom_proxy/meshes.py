"""Proxies of the meshes in the cluster, with Monarch's names and signatures.

Making a proxy never waits: the laptop gives the new mesh an id and sends the operation, and whatever is made of
the mesh names that id. If the operation fails, what depends on it fails with the same cause.
"""

from __future__ import annotations

import difflib
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from loom.errors import (
    EndpointNameTaken,
    EndpointNotFound,
    NoSuchMesh,
    NotOneActor,
    UnpicklableError,
    WrongArguments,
)
from loom.signatures import CallSignature, constructor, endpoints
from loom.wire.codec import Made
from loom.wire.messages import Kind
from loom_proxy.connection import Connection
from loom_proxy.futures import FutureProxy
from loom_proxy.shape import MeshTrait, Shape
from loom_proxy.values import ValueMeshProxy

__all__ = ["ActorMeshProxy", "EndpointProxy", "HostMeshProxy", "MeshProxy", "ProcMeshProxy", "WholeMesh"]

P = TypeVar("P", bound="MeshProxy")


class WholeMesh:
    """A whole mesh of the session; its proxy and the proxies of its slices share it."""

    def __init__(self, connection: Connection, ident: int, name: str, shape: Shape) -> None:
        self.connection = connection
        self.ident = ident
        self.name = name
        self.shape = shape
        self._views = {shape: ident}
        self._lock = threading.Lock()
        connection.wholes[ident] = self

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

    def __repr__(self) -> str:
        part = "" if self.__shape == self._whole.shape else f" of {self._whole.shape.extent}"
        return f"<{type(self).__name__} {self._whole.name!r} {self.extent}{part}>"


class HostMeshProxy(MeshProxy):
    """The worker hosts. As ``monarch.actor.HostMesh``."""

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], None] | Callable[[], Awaitable[None]] | None = None,
        name: str | None = None,
    ) -> ProcMeshProxy:
        """Start processes on every host of this mesh.

        Args:
            per_host: dimensions of the processes on each host, such as ``{"gpus": 8}``; one process without it.
            bootstrap: called in each new process before anything else.
            name: name of the proc mesh, ``anon`` without one.

        Raises:
            ValueError: a dimension has the name of one of the hosts', or a size is not positive.
        """
        per_host = dict(per_host or {})
        for label, size in per_host.items():
            if label in self._shape.labels:
                raise ValueError(f"per_host dimension {label!r} is a dimension of the hosts already")
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"per_host={per_host}: {label} must be a number of processes, at least 1")
        name = name or "anon"
        connection = self._whole.connection
        parts = connection.encoder.dumps(bootstrap, "the bootstrap function")
        ident = connection.send(Kind.SPAWN_PROCS, (self._ident, name, per_host), parts)
        shape = Shape.row_major({**self.sizes, **per_host})
        procs = ProcMeshProxy(WholeMesh(connection, ident, name, shape))
        connection.meshes[name] = procs
        return procs


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
            EndpointNameTaken: an endpoint has the name of an attribute of every actor mesh.
            WrongArguments: ``Class`` is no class, or its constructor does not take the arguments.
            UnpicklableError: the class or an argument cannot be pickled; the text names the attribute.
            PythonVersionMismatch: the class would have to travel by value to another version of Python.
        """
        if not isinstance(Class, type):
            raise WrongArguments(f"spawn({name!r}, …) takes an actor class, not {Class!r:.80}")
        signatures = endpoints(Class)
        taken = sorted(label for label in signatures if hasattr(ActorMeshProxy, label))
        if taken:
            raise EndpointNameTaken(
                f"{Class.__name__}.{taken[0]} cannot be an endpoint: every actor mesh has an attribute of that name"
            )
        constructor(Class).check(args, kwargs)
        connection = self._whole.connection
        connection.check_open()
        parts = connection.encoder.dumps((Class, args, kwargs), f"{Class.__name__} (class, args, kwargs)")
        ident = connection.send(Kind.SPAWN_ACTORS, (self._ident, name), parts)
        # The actors are counted from this mesh, whichever part of the processes it is.
        whole = WholeMesh(connection, ident, name, self._shape)
        actors = ActorMeshProxy(whole, class_name=Class.__name__, signatures=signatures, cls=Class)
        connection.meshes[name] = actors
        return actors

    def stop(self, reason: str = "stopped by client") -> FutureProxy[None]:
        """Stop the processes of this mesh and the actors in them; done when they have stopped."""
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

    def _new_with_shape(self, shape: Shape) -> ActorMeshProxy:
        return ActorMeshProxy(
            self._whole, shape, class_name=self._class_name, signatures=self._signatures, cls=self._class
        )

    def __getattr__(self, name: str) -> EndpointProxy:
        if name.startswith("__") or "_signatures" not in self.__dict__:
            raise AttributeError(name)
        signature = self._signatures.get(name)
        if signature is None:
            raise self._no_endpoint(name)
        endpoint = EndpointProxy(self, name, signature)
        self.__dict__[name] = endpoint  # found without __getattr__ from now on
        return endpoint

    def _no_endpoint(self, name: str) -> EndpointNotFound:
        if self._class is not None and hasattr(self._class, name):
            return EndpointNotFound(
                f"{self._class_name}.{name} is not an endpoint: decorate it with @loom.endpoint"
            )
        near = difflib.get_close_matches(name, self._signatures, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(sorted(self._signatures)) or "none"
        return EndpointNotFound(f"{self._class_name} has no endpoint {name!r}{hint} Its endpoints: {known}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._signatures})

    def stop(self, reason: str = "stopped by client") -> FutureProxy[None]:
        """Stop the actors of this mesh; their processes live on. Done when they have stopped."""
        return self._whole.connection.ask(Kind.STOP, (self._ident, reason))

    def __repr__(self) -> str:
        part = "" if self._shape == self._whole.shape else f" of {self._whole.shape.extent}"
        return f"<ActorMeshProxy {self._whole.name!r} of {self._class_name} {self.extent}{part}>"


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
        self._body: tuple[int, str] | None = None

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, str], Any]:
        connection = self._connection
        connection.check_open()
        self._signature.check(args, kwargs)
        parts = connection.encoder.dumps((args, kwargs), f"{self._signature.name} (args, kwargs)")
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise WrongArguments(
            f"{self._signature.name} is an endpoint: say how to call it, with .call(…), .call_one(…), .choose(…), "
            f".stream(…) or .broadcast(…)"
        )

    def __repr__(self) -> str:
        return f"<EndpointProxy {self._signature} on {self._mesh.extent}>"
