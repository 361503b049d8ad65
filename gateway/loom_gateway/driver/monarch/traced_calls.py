"""The trace id of a call on its way from this process to an actor, and the actor's span of the call.

Monarch's messages have no room for it, so it travels with the pickled arguments: when the actor unpickles them, in
the context in which the endpoint then runs, the id becomes the current one. A call without a trace is sent as ever,
and Monarch's handling of messages is only changed in a process that gets a call with one, or that is observed.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable
from typing import Any

from monarch._src.actor import actor_mesh
from monarch._src.actor.actor_mesh import _Actor

from loom.tracing.spans import recorder, span
from loom.tracing.trace_ids import begin_trace, current_trace

_PROTO = 2  # bytes before the first opcode of a pickle: the protocol's number
_ARRIVE = f"c{__name__}\narrive\n".encode()


def pickled_in(trace: str, pickled: bytes) -> bytes:
    """Return a pickle that begins a trace before it makes its value. The id has at most 255 characters of ASCII."""
    id = trace.encode("ascii")
    # The function, its argument, a tuple of that, the call; and its result is dropped.
    begin = _ARRIVE + b"\x8c" + bytes([len(id)]) + id + b"\x85R0"
    return pickled[:_PROTO] + begin + pickled[_PROTO:]


def arrive(trace: str, arguments: object = None) -> object:
    """Begin the trace that a call has brought, and return the arguments of the call."""
    heed_traces()
    begin_trace(trace)
    return arguments


class _InTrace:
    """The arguments of a call, which begin its trace when they are unpickled."""

    def __init__(self, trace: str, arguments: object) -> None:
        self._made_of = (trace, arguments)

    def __reduce__(self) -> Any:
        return arrive, self._made_of


_patched: set[str] = set()


def trace_calls() -> None:
    """Have each call of this process take its trace along."""
    if "calls" not in _patched:
        _patched.add("calls")
        actor_mesh._create_endpoint_message = _with_trace(actor_mesh._create_endpoint_message)
    if recorder.sinks:
        heed_traces()


def heed_traces() -> None:
    """Have each message to an actor of this process begin without the trace of the last one, and be a span."""
    if "messages" not in _patched:
        _patched.add("messages")
        _Actor._prepare = _without_the_last(_Actor._prepare)
        _Actor.handle = _timed(_Actor.handle)
        _Actor.handle_sync = _timed_sync(_Actor.handle_sync)


def _with_trace(plain: types.FunctionType) -> Callable[..., Any]:
    pickle = plain.__globals__["pickle"]

    def pickle_in_trace(arguments: Any, **options: Any) -> Any:
        trace = current_trace()
        return pickle(arguments if trace is None else _InTrace(trace, arguments), **options)

    # The same function, but for the name `pickle` in it: everything else that pickles here does so as ever.
    tracing = types.FunctionType(
        plain.__code__, {**plain.__globals__, "pickle": pickle_in_trace}, plain.__name__, plain.__defaults__
    )

    def _create_endpoint_message(*args: Any, **kwargs: Any) -> Any:
        return (plain if current_trace() is None else tracing)(*args, **kwargs)

    return _create_endpoint_message


def _without_the_last(plain: Callable[..., Any]) -> Callable[..., Any]:
    def _prepare(self: Any, *args: Any) -> Any:
        begin_trace(None)  # a thread handles the messages of a sync actor one after the other
        return plain(self, *args)

    return _prepare


def _timed_sync(plain: Callable[..., None]) -> Callable[..., None]:
    def handle_sync(self: Any, ctx: Any, method: Any, *args: Any) -> None:
        if not recorder.sinks:
            return plain(self, ctx, method, *args)
        timed = _begin(ctx, method)
        try:
            plain(self, ctx, method, *args)
        finally:
            _end(timed)

    return handle_sync


def _timed(plain: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    def handle(self: Any, ctx: Any, method: Any, *args: Any) -> Awaitable[None]:
        handled = plain(self, ctx, method, *args)
        return _await_timed(handled, ctx, method) if recorder.sinks else handled

    return handle


async def _await_timed(handled: Awaitable[None], ctx: Any, method: Any) -> None:
    timed = _begin(ctx, method)
    try:
        await handled
    finally:
        _end(timed)


def _begin(ctx: Any, method: Any) -> span:
    return span("actor", endpoint=method.name, actor=str(ctx.actor_instance.name)).__enter__()


def _end(timed: span) -> None:
    timed.trace = current_trace()  # which the message has brought
    if timed.trace is None and not recorder.listeners:
        timed.drop()
    timed.__exit__(None, None, None)
