"""An ASGI middleware that notes when a request arrived, before the application has a turn, and in which trace."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from loom.tracing import clock
from loom.tracing.spans import event, recorder, span
from loom.tracing.trace_ids import TRACE_HEADER, checked_trace, trace

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

RECEIVED = "loom.received"
"""The key in a request's ASGI scope with the time at which it arrived, in seconds of `loom.tracing.now`."""

_HEADER = TRACE_HEADER.encode()


class FirstByte:
    """Serves each HTTP request in the trace of its header ``x-trace-id``, if that has one.

    The server calls a middleware when it has read the request's headers, before its body; time in the accept queue
    and, on a busy event loop, until that loop comes to it, has passed by then.

    Args:
        app: the application.
        paths: for requests to these paths there is an event.
        name: the event's name; its fields are ``path`` and ``t``.
    """

    def __init__(self, app: App, paths: Collection[str] = (), name: str = "weights.server.recv") -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or anything else as it is."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope[RECEIVED] = received = clock.now()
        id = next((_trace_of(value) for name, value in scope["headers"] if name == _HEADER), None)
        if id is None:
            if scope["path"] in self._paths:
                event(self._name, path=scope["path"], t=received)
            return await self._app(scope, receive, send)
        with trace(id):
            if scope["path"] in self._paths:
                event(self._name, path=scope["path"], t=received)
            if not recorder.sinks:
                return await self._app(scope, receive, send)
            with span("http", method=scope["method"], path=scope["path"]):
                await self._app(scope, receive, send)


def _trace_of(value: bytes) -> str | None:
    return checked_trace(value.decode("latin-1"))
