"""Middleware for vLLM's server: a token for every route, and the times of orders to load weights.

vLLM imports this file by its name in an environment of its own, so it needs only Python's standard library::

    PYTHONPATH=FOLDER_OF_THIS_FILE vllm serve MODEL --middleware loom_vllm.WeightTimes

``WeightTimes`` prints ``[weights] server.recv``, ``rpc.start`` and ``rpc.done`` for each order to load weights, by
this host's monotonic clock, and answers it with the header ``x-rpc-ms``. The requests of one order, from ``/pause``
to ``/resume`` with the same ``x-trace-id``, have these lines once. ``TokenForAll`` wants the token in
``LOOM_VLLM_TOKEN`` for every route but ``/health``. vLLM's own ``--api-key`` leaves ``/collective_rpc`` open, which
runs any method in the workers.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import time
from typing import Any

LOADS = ("/update_weights", "/start_weight_update", "/finish_weight_update")
RPC = "/collective_rpc"
PAUSE, RESUME = "/pause", "/resume"
WITHIN = (  # requests of an order that load nothing
    "/update_weight_version",
    "/reset_prefix_cache",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
)
METHODS = ("reload_weights", "update_weights", "load_weights")
OPEN = ("/health",)
MOST = 1 << 20  # bytes of an order that are looked at

_TRACE = re.compile(rb"[0-9A-Za-z_-]{1,64}")


class TokenForAll:
    """Refuses requests without the token."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = b"Bearer " + os.environ["LOOM_VLLM_TOKEN"].encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in OPEN
        if guarded and not hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected):
            body = json.dumps({"error": {"message": "this server wants its token", "code": 401}}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)


class WeightTimes:
    """Prints when orders to load weights came, began and ended."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._order: Order | None = None  # between its /pause and its /resume

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        came, operation = time.monotonic(), None
        if path in (*LOADS, RPC):
            body, receive = await _read(receive)
            operation = _operation(path, body)
        if operation is None and path not in (PAUSE, RESUME, *WITHIN):
            await self._app(scope, receive, send)
            return
        given = _TRACE.fullmatch(dict(scope["headers"]).get(b"x-trace-id", b""))
        order = self._order_of(path, operation, given[0].decode() if given else "-", came)
        began = time.monotonic()

        async def send_timed(message: Any) -> None:
            if message["type"] == "http.response.start":
                rpc_ms = (time.monotonic() - began) * 1000
                if order is not None:
                    self._answered(order, path, rpc_ms)
                message = {**message, "headers": [*message["headers"], (b"x-rpc-ms", f"{rpc_ms:.3f}".encode())]}
            await send(message)

        await self._app(scope, receive, send_timed)

    def _order_of(self, path: str, operation: str | None, trace: str, came: float) -> Order | None:
        """Return the order that a request belongs to, which begins with its first one; None if it is of none."""
        if path == PAUSE:
            self._order = None if trace == "-" else Order(trace, path, PAUSE[1:], came)
            return self._order
        if self._order is not None and self._order.trace == trace:
            self._order.operation = operation or self._order.operation
            return self._order
        return None if operation is None else Order(trace, path, operation, came)

    def _answered(self, order: Order, path: str, rpc_ms: float) -> None:
        order.rpc_ms += rpc_ms
        if path == RESUME or order.path != PAUSE:
            order.say_done()
        if path == RESUME:
            self._order = None


class Order:
    """An order that has begun, and its time in the engine so far."""

    def __init__(self, trace: str, path: str, operation: str, came: float) -> None:
        self.trace = trace
        self.path = path
        self.operation = operation
        self.rpc_ms = 0.0
        _say(trace, f"server.recv path={path} t={came:.3f}")
        _say(trace, f"rpc.start op={operation} t={time.monotonic():.3f}")

    def say_done(self) -> None:
        """Print that it has ended."""
        _say(self.trace, f"rpc.done op={self.operation} t={time.monotonic():.3f} rpc_ms={self.rpc_ms:.1f}")


def _operation(path: str, body: bytes) -> str | None:
    """Return the name of an order to load weights, or None for another request."""
    if path != RPC:
        return path[1:]
    try:
        method = json.loads(body)["method"]
    except (ValueError, KeyError, TypeError):
        return None
    return method if method in METHODS else None


async def _read(receive: Any) -> tuple[bytes, Any]:
    """Return a request's body, and a function that gives it to the application once more."""
    messages: list[Any] = []
    body = b""
    while not messages or (messages[-1].get("more_body") and len(body) < MOST):
        messages.append(await receive())
        body += messages[-1].get("body", b"")

    async def again() -> Any:
        return messages.pop(0) if messages else await receive()

    return body, again


def _say(trace: str, text: str) -> None:
    print(f"[weights][{trace}] {text}", flush=True)  # noqa: T201 - the server's log
