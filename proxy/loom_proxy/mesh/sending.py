"""Monarch's ways to send to actors besides the adverbs of an endpoint: `send`, `as_endpoint`, `Accumulator`.

An endpoint of Monarch's, as an actor or a function of `Job.run` has, goes to Monarch's function or class of the
same name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from loom.errors import Invalid, NotAMethod, WrongArguments
from loom.in_cluster import is_monarchs, monarchs
from loom.signatures import CallSignature
from loom_proxy.futures.future import FutureProxy
from loom_proxy.mesh.endpoints import EndpointProxy, NotAnEndpointProxy
from loom_proxy.port import Port

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")

_SELECTIONS = ("all", "choose")

_NO_CONNECTION: Any = object()
"""The connection of a future of no results, which is done at once and waits for nothing."""


def send(
    endpoint: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    port: Port[Any] | None = None,
    selection: Literal["all", "choose"] = "all",
) -> None:
    """Send to actors without waiting; their results and exceptions go to a port.

    The counterpart of ``monarch.actor.send``.

    Args:
        endpoint: an endpoint of an actor mesh, such as ``mesh.add``, or a wrapper of one that has its ``_send``.
        args, kwargs: arguments of the endpoint.
        port: the port for the replies. Without one they are dropped, and an exception kills its actor.
        selection: ``"all"`` actors of the mesh, or ``"choose"`` one of them at random.

    Raises:
        UnknownSelection: the selection is neither.
        WrongArguments: the arguments do not fit the endpoint, or ``port`` is no port.
        NoSuchMesh: the port belongs to another session.
    """
    if is_monarchs(endpoint):
        monarchs().send(endpoint, args, kwargs, port, selection)
        return
    if not hasattr(endpoint, "_send"):
        raise WrongArguments(f"send() takes an endpoint of an actor mesh, not {endpoint!r:.80}")
    if selection not in _SELECTIONS:
        raise Invalid(f"Invalid selection: {selection}; it can be 'all' or 'choose'", code="unknown_selection")
    if port is not None and not _is_port_for(port, endpoint):
        raise WrongArguments(f"send() takes a Port of Channel.open(), not {port!r:.80}")
    endpoint._send(tuple(args), dict(kwargs), None if port is None else port._port_ref, selection)


def _is_port_for(port: Any, endpoint: Any) -> bool:
    return isinstance(port, Port) and not (is_monarchs(port) and isinstance(endpoint, EndpointProxy))


def as_endpoint(not_an_endpoint: Any, *, propagate: Any = None, explicit_response_port: bool = False) -> Any:
    """Treat an actor method that is not an endpoint as one: ``as_endpoint(mesh.method).call(…)``.

    The counterpart of ``monarch.actor.as_endpoint``.

    Args:
        not_an_endpoint: the method, as an attribute of an actor mesh.
        propagate: only for the tensor engine; not used.
        explicit_response_port: the method gets a port as its first argument, and replies through that.

    Raises:
        NotAMethod: the argument is not a method of an actor mesh, or an endpoint already (a `ValueError`).
    """
    if is_monarchs(not_an_endpoint):
        return monarchs().as_endpoint(
            not_an_endpoint, propagate=propagate, explicit_response_port=explicit_response_port
        )
    if not isinstance(not_an_endpoint, NotAnEndpointProxy):
        raise NotAMethod(
            f"expected an method of a spawned actor, which is no endpoint already, and not {not_an_endpoint!r:.80}"
        )
    mesh, name = not_an_endpoint._mesh, not_an_endpoint._name
    cls = not_an_endpoint._class
    method = inspect.getattr_static(cls, name)
    full_name = f"{cls.__name__}.{name}"
    if inspect.isfunction(method):
        signature = CallSignature.of(full_name, method, 2 if explicit_response_port else 1)
    else:  # a static method or a partial: only the actor can tell whether the arguments fit
        signature = CallSignature.of(full_name, lambda *args, **kwargs: None, 0)
    return EndpointProxy(mesh, f"{name}(port)" if explicit_response_port else f"{name}()", signature)


class Accumulator(Generic[P, R, A]):
    """A fold of the results of all actors of a mesh; the counterpart of ``monarch.actor.Accumulator``.

    ``Accumulator(mesh.count, 0, operator.add).accumulate().get()``

    Args:
        endpoint: the endpoint to call, or a wrapper of one that has its ``stream``.
        identity: the value before the first result.
        combine: called with the value so far and a result, in the order in which the results come.
    """

    def __init__(self, endpoint: Any, identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: Any, **kwargs: Any) -> FutureProxy[A]:
        """Call every actor now; return the future of the folded value.

        ``combine`` runs in the thread that first asks for the value. The future fails with the first result that is
        an error, without waiting for later ones.
        """
        if not hasattr(self._endpoint, "stream"):
            raise WrongArguments(f"Accumulator takes an endpoint of an actor mesh, not {self._endpoint!r:.80}")
        if is_monarchs(self._endpoint):
            native = monarchs().Accumulator(self._endpoint, self._identity, self._combine)
            return native.accumulate(*args, **kwargs)  # type: ignore[no-any-return]
        results = list(self._endpoint.stream(*args, **kwargs))
        if results and all(map(is_monarchs, results)):  # a wrapper of one of Monarch's endpoints
            given = SimpleNamespace(stream=lambda: iter(results))
            native = monarchs().Accumulator(given, self._identity, self._combine)
            return native.accumulate()  # type: ignore[no-any-return]
        if any(not isinstance(result, FutureProxy) or is_monarchs(result) for result in results):
            raise WrongArguments(
                f"stream() of {self._endpoint!r:.80} gave {results!r:.80}: these are not Loom's futures"
            )
        folded: FutureProxy[A] = FutureProxy(results[0]._connection if results else _NO_CONNECTION)
        self._follow(results, 0, folded)
        return folded

    def _follow(self, results: Sequence[FutureProxy[R]], position: int, folded: FutureProxy[A]) -> None:
        """Complete ``folded`` when the results from a position on have come, or one of them is an error."""
        while position < len(results):
            result = results[position]
            if result._add(functools.partial(self._follow, results, position, folded)):
                return
            if result.exception() is not None:
                break
            position += 1
        folded._complete(functools.partial(self._fold, results))

    def _fold(self, results: Sequence[FutureProxy[R]]) -> A:
        value = self._identity
        for result in results:
            value = self._combine(value, result.get())
        return value
