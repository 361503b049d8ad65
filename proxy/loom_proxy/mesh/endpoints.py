"""Proxies of endpoints, whose methods are Monarch's adverbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from loom.errors import Invalid, NotAnEndpoint, NotSupported, WrongArguments
from loom.in_cluster import Counterpart
from loom.signatures import CallSignature
from loom.tracing.trace_ids import trace_here
from loom.wire.bodies import Broadcast, Call, CallOne, Choose, EndpointCall, SendToActors, StreamCall
from loom.wire.messages import Buffer
from loom_proxy.futures.future import FutureProxy
from loom_proxy.mesh.base import MeshProxy
from loom_proxy.mesh.values import ValueMeshProxy
from loom_proxy.notebook.html import endpoint_html

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
    R = TypeVar("R", default=Any)
else:
    from typing import ParamSpec, TypeVar

    P, R = ParamSpec("P"), TypeVar("R")

C = TypeVar("C", bound=EndpointCall)


class NotAnEndpointProxy:
    """A method, or another attribute, of a mesh's actors that is no endpoint; `loom.as_endpoint` takes it."""

    def __init__(self, mesh: MeshProxy, cls: type, name: str) -> None:
        self._mesh = mesh
        self._class = cls
        self._name = name

    def _refusal(self) -> NotAnEndpoint:
        return NotAnEndpoint(
            f"Actor {self._class}.{self._name} is not annotated as an endpoint. To call it as one, add a @endpoint "
            f"decorator to it, or directly wrap it in one as_endpoint(obj.method).call(...): "
            f"loom.as_endpoint(mesh.{self._name}).call(…)"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refusal()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._refusal()

    def __repr__(self) -> str:
        return f"<{self._class.__name__}.{self._name}, not an endpoint>"


class EndpointProxy(Generic[P, R], metaclass=Counterpart):
    """An endpoint of the actors of a mesh. Its methods are Monarch's adverbs.

    Each raises `WrongArguments` or `UnpicklableError` before it sends anything.
    """

    def __init__(self, mesh: MeshProxy, name: str, signature: CallSignature) -> None:
        self._mesh = mesh
        self._caller = mesh._whole.caller
        self._key = mesh._whole.ident  # the order key of calls: slices share it, since they call the same actors
        self._name = name
        self._signature = signature
        self._what = f"{signature.name} (args, kwargs)"  # name of the arguments in errors
        self._single = len(mesh) == 1
        self._procs = mesh._whole.procs
        self._operations: dict[type[EndpointCall], EndpointCall] = {}

    def _operation(self, kind: type[C]) -> C:
        """Return the operation of an adverb, which all calls with that adverb share, except those in a trace."""
        if trace_here() is not None and (trace := self._trace()) is not None:
            return kind(self._mesh._ident, self._name, trace)
        operation = self._operations.get(kind)
        if operation is None:
            operation = self._operations[kind] = kind(self._mesh._ident, self._name)
        return operation  # type: ignore[return-value]

    def _trace(self) -> str | None:
        return trace_here() if self._caller.knows_traces else None

    def _payload(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Buffer]:
        caller = self._caller
        caller.check_open()
        self._signature.check(args, kwargs)
        return caller.encoder.dumps((args, kwargs), self._what, self._procs)

    def call(self, *args: Any, **kwargs: Any) -> FutureProxy[ValueMeshProxy[Any]]:
        """Call every actor; return the future of a `ValueMeshProxy` of all results."""
        parts = self._payload(args, kwargs)
        convert = partial(ValueMeshProxy, self._mesh._shape)
        return self._caller.ask(self._operation(Call), parts, self._key, convert=convert)

    def call_one(self, *args: Any, **kwargs: Any) -> FutureProxy[Any]:
        """Call the only actor of the mesh.

        Raises:
            NotOneActor: the mesh has several; select one with `slice`, or use `call` or `choose`.
        """
        if not self._single:
            raise Invalid(
                f"call_one requires exactly 1 actor, but mesh has {len(self._mesh)} ({self._mesh.extent}): "
                f"select one with slice(), or use call() or choose()",
                code="not_one_actor",
            )
        parts = self._payload(args, kwargs)
        return self._caller.ask(self._operation(CallOne), parts, self._key)

    def choose(self, *args: Any, **kwargs: Any) -> FutureProxy[Any]:
        """Call one actor of the mesh, picked at random for each call."""
        parts = self._payload(args, kwargs)
        return self._caller.ask(self._operation(Choose), parts, self._key)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[FutureProxy[Any]]:
        """Call every actor; return futures that are done in the order in which the results come."""
        parts = self._payload(args, kwargs)
        return iter(self._caller.ask_many(len(self._mesh), self._operation(StreamCall), parts, self._key))

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Send to every actor without waiting. An actor that raises dies, as in Monarch."""
        parts = self._payload(args, kwargs)
        self._caller.send(self._operation(Broadcast), parts, self._key)

    def _send(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        port: Callable[[object], int] | None = None,
        selection: str = "all",
    ) -> None:
        """Send to actors, whose replies go to a port; see `loom.send`. ``port`` returns the port's reference.

        The parameters are those of Monarch's endpoints, which wrappers of endpoints pass on.
        """
        reference = None if port is None else port(self._caller)
        parts = self._payload(args, kwargs)
        operation = SendToActors(self._mesh._ident, self._name, selection, reference, self._trace())
        self._caller.send(operation, parts, self._key)

    def rref(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error, since this needs Monarch's tensor engine, which is not on this side.

        Raises:
            NotSupported: always. Use `call`, or `loom.send` with a port.
        """
        raise NotSupported(
            f"{self._signature.name}.rref() needs Monarch's tensor engine and an active device mesh, which Loom "
            f"does not have: use call(…), or loom.send(…) with a port"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise WrongArguments(
            f"'ActorEndpoint' object is not callable: {self._signature.name} is an endpoint; say how to call it, "
            f"with .call(…), .call_one(…), .choose(…), "
            f".stream(…) or .broadcast(…)"
        )

    def _repr_html_(self) -> str:
        return endpoint_html(str(self._signature), repr(self._mesh))

    def __repr__(self) -> str:
        return f"<EndpointProxy {self._signature} on {self._mesh.extent}>"
