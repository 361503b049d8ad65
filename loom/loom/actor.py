"""The names for writing an actor class: `Actor`, `endpoint`, `current_rank`, `context`, `this_proc` and others.

If torchmonarch is installed, these are Monarch's own. Elsewhere (a laptop with Loom's base dependencies) they are
stand-ins with the same names and signatures, enough for defining a class and sending it: a class that travels by
value refers to them as ``loom.actor.…``, and so finds Monarch's in the cluster.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = [
    "Actor",
    "Context",
    "MeshFailure",
    "ProcId",
    "Uid",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "get_meter",
    "get_or_spawn_controller",
    "has_monarch",
    "in_actor",
    "monarch_actor",
    "monarch_bootstrap_command",
    "monarch_extent",
    "monarch_point",
    "monarch_shape",
    "monarch_slice",
    "monarch_value_mesh",
    "returns_future",
    "span",
    "this_host",
    "this_proc",
    "traced",
]

has_monarch: bool = importlib.util.find_spec("monarch") is not None
"""True if torchmonarch is installed here, so that the names of this module are Monarch's own."""

if has_monarch and not TYPE_CHECKING:
    from monarch.actor import (
        Actor,
        Context,
        MeshFailure,
        ProcId,
        Uid,
        concurrent_endpoint,
        context,
        current_actor_name,
        current_rank,
        current_size,
        endpoint,
        get_meter,
        get_or_spawn_controller,
        returns_future,
        span,
        this_host,
        this_proc,
        traced,
    )

    from loom.errors import catch_monarchs

    catch_monarchs()
else:

    def _only_in_the_cluster(what: str) -> NoReturn:
        raise RuntimeError(f"{what} is known inside an actor in the cluster, not on this machine")

    class Actor(metaclass=ABCMeta):  # noqa: B024 - a class may be registered with Monarch's, too
        """The base class of every actor; a stand-in for ``monarch.actor.Actor`` without torchmonarch."""

    class EndpointProperty:
        """A method of an actor under `endpoint` or `concurrent_endpoint`; in the cluster it becomes Monarch's."""

        def __init__(self, decorator: str, method: Callable[..., Any], options: dict[str, object]) -> None:
            self._decorator = decorator
            self._method = method
            self._explicit_response_port = options["explicit_response_port"]
            self._options = options

        def __reduce__(self) -> tuple[Any, ...]:
            return _decorated, (self._decorator, self._method, self._options)

    def endpoint(
        method: Any = None,
        *,
        propagate: Any = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
    ) -> Any:
        """Mark a method of an `Actor` as callable through a mesh, as ``monarch.actor.endpoint`` does."""
        options = {
            "propagate": propagate,
            "explicit_response_port": explicit_response_port,
            "instrument": instrument,
        }
        if method is None:
            return functools.partial(endpoint, **options)
        return EndpointProperty("endpoint", method, options)

    def concurrent_endpoint(
        method: Any = None,
        *,
        propagate: Any = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
    ) -> Any:
        """Mark an async method of an `Actor` as an endpoint that does not block the actor's next message.

        The function works like ``monarch.actor.concurrent_endpoint``.

        Raises:
            ValueError: the method is not async, or is marked by `endpoint` already.
        """
        options = {
            "propagate": propagate,
            "explicit_response_port": explicit_response_port,
            "instrument": instrument,
        }
        if method is None:
            return functools.partial(concurrent_endpoint, **options)
        if isinstance(method, EndpointProperty):
            raise ValueError(
                "concurrent_endpoint does not wrap @endpoint; pass endpoint options to @concurrent_endpoint"
            )
        if not inspect.iscoroutinefunction(method):
            raise ValueError("concurrent_endpoint can only wrap async endpoints")
        return EndpointProperty("concurrent_endpoint", method, options)

    def current_rank() -> Any:
        """Return the rank of the running actor, as a Point. Only inside an actor, in the cluster."""
        _only_in_the_cluster("current_rank()")

    def current_size() -> dict[str, int]:
        """Return the size of each dimension of the called mesh. Only inside an actor, in the cluster."""
        _only_in_the_cluster("current_size()")

    def current_actor_name() -> str:
        """Return the id of the running actor. Only inside an actor, in the cluster."""
        _only_in_the_cluster("current_actor_name()")

    def context() -> Any:
        """Return the running actor and the message that it handles. Only inside an actor, in the cluster."""
        _only_in_the_cluster("context()")

    def this_host() -> Any:
        """Return the host of the running actor, as a host mesh of one. Only inside an actor, in the cluster."""
        _only_in_the_cluster("this_host()")

    def this_proc() -> Any:
        """Return the process of the running actor, as a proc mesh of one. Only inside an actor, in the cluster."""
        _only_in_the_cluster("this_proc()")

    def get_or_spawn_controller(name: str, Class: type, *args: Any, **kwargs: Any) -> Any:
        """Return the session's actor of a name; spawn it if there is none. Only inside an actor or `Job.run`."""
        _only_in_the_cluster("get_or_spawn_controller()")

    def get_meter() -> Any:
        """Return Monarch's meter of OpenTelemetry. Only inside an actor, in the cluster."""
        _only_in_the_cluster("get_meter()")

    def span(name: str) -> Any:
        """Time a block of code for Monarch's traces; do nothing on this machine."""
        return contextlib.nullcontext()

    class _Decorated:
        """A function under one of Monarch's decorators, which is applied when it is unpickled in the cluster."""

        def __init__(self, decorator: str, function: Callable[..., Any], **options: Any) -> None:
            functools.update_wrapper(self, function)
            self._decorator = decorator
            self._function = function
            self._options = options

        def __reduce__(self) -> tuple[Any, ...]:
            return _decorated, (self._decorator, self._function, self._options)

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            return self if instance is None else functools.partial(self, instance)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if self._decorator != "traced":
                _only_in_the_cluster(f"what a {self._decorator} function returns")
            return self._function(*args, **kwargs)

    def traced(fn: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
        """Trace the calls of a function with Monarch; do nothing on this machine."""
        if fn is None:
            return functools.partial(traced, name=name)
        return _Decorated("traced", fn, name=name)

    def returns_future(function: Callable[..., Any]) -> Any:
        """Mark a coroutine function as returning a Monarch future, which exists only in the cluster."""
        return _Decorated("returns_future", function)

    class _ClusterOnly:
        """A class of Monarch's whose objects exist only in the cluster; usable in annotations."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            _only_in_the_cluster(type(self).__name__)

    class Context(_ClusterOnly):
        """The result of `context`; a stand-in for ``monarch.actor.Context``."""

    class MeshFailure(_ClusterOnly):
        """The argument of ``__supervise__``; a stand-in for ``monarch.actor.MeshFailure``."""

    class ProcId(_ClusterOnly):
        """The identity of a process; a stand-in for ``monarch.actor.ProcId``."""

    class Uid(_ClusterOnly):
        """The identity of an actor or a process; a stand-in for ``monarch.actor.Uid``."""


def in_actor() -> bool:
    """Return whether an actor calls this. Unlike `context`, the function starts no root client."""
    if not has_monarch:
        return False
    from monarch._src.actor.actor_mesh import _context

    return _context.get() is not None


def monarch_bootstrap_command(command: Any) -> Any:
    """Return Monarch's command for a `loom.BootstrapCommand`, with this process's defaults. Only in the cluster."""
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
    from monarch.actor import default_bootstrap_cmd

    default = default_bootstrap_cmd()
    program = default.program if command.program is None else command.program
    args = default.args if command.args is None else command.args
    env = {**default.env, **command.env}
    return BootstrapCommand(program, command.arg0, args, env, command.inherit_env)


def monarch_actor() -> Any:
    """Return the module ``monarch.actor``. Only in the cluster."""
    return importlib.import_module("monarch.actor")


def monarch_extent(labels: Sequence[str], sizes: Sequence[int]) -> Any:
    """Return a Monarch extent. Only in the cluster."""
    from monarch.actor import Extent

    return Extent(list(labels), list(sizes))


def monarch_point(rank: int, labels: Sequence[str], sizes: Sequence[int]) -> Any:
    """Return a Monarch point. Only in the cluster."""
    from monarch.actor import Point

    return Point(rank, monarch_extent(labels, sizes))


def monarch_value_mesh(shape: tuple[Sequence[str], int, Sequence[int], Sequence[int]], values: list[Any]) -> Any:
    """Return a Monarch value mesh. Its shape is (labels, offset, sizes, strides). Only in the cluster."""
    from monarch.actor import ValueMesh

    return ValueMesh(monarch_shape(*shape), values)


def monarch_shape(labels: Sequence[str], offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Any:
    """Return a Monarch shape. Only in the cluster."""
    from monarch._src.actor.shape import Shape

    return Shape(list(labels), monarch_slice(offset, sizes, strides))


def monarch_slice(offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Any:
    """Return a Monarch slice of ranks. Only in the cluster."""
    from monarch._src.actor.shape import NDSlice

    return NDSlice(offset=offset, sizes=list(sizes), strides=list(strides))


def _decorated(decorator: str, function: Callable[..., Any], options: dict[str, object]) -> Any:
    """Unpickle a function that a stand-in of one of Monarch's decorators pickled."""
    return globals()[decorator](function, **options)
