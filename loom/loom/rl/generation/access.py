"""Who may use a generator's HTTP: middleware that asks for the token, and that notes when a request came."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from typing import TYPE_CHECKING, Any

from loom import tracing
from loom.rl.generation.openai import ApiError
from loom.rl.generation.urls import RELOAD, TRACE_HEADER, UPDATE
from loom.tracing.trace_ids import checked_trace

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = ("/health",)
"""Paths that ask for no token."""

CONNECTION = "loom.connection"
"""The key of a request's connection in its scope."""


class RequestArrival:
    """Notes when a request came, under its trace id, before anything is done for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        came = tracing.now()
        headers = dict(scope["headers"])
        given = headers.get(TRACE_HEADER.encode(), b"").decode("latin-1")

        with tracing.trace(checked_trace(given)) as trace:

            async def send_traced(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], (TRACE_HEADER.encode(), trace.encode())]}
                await send(message)

            if scope["path"] in (UPDATE, RELOAD):
                tracing.event("weights.server.recv", path=scope["path"], t=came)
            await self._app(scope, receive, send_traced)


class TokenFirst:
    """Lets in who shows the token, before a byte of a body is read."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN:
            if not self._shown(dict(scope["headers"]).get(b"authorization", b"")):
                await _refuse(send, ApiError(401, "this generator wants its token: 'Authorization: Bearer TOKEN'"))
                return
            if (connection := scope.get(CONNECTION)) is not None:
                connection.good = True
        await self._app(scope, receive, send)

    def _shown(self, header: bytes) -> bool:
        kind, _, value = header.partition(b" ")
        if kind.lower() == b"basic":
            try:
                value = base64.b64decode(value.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != b"bearer":
            return False
        return hmac.compare_digest(value.strip(), self._token)


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
        (b"connection", b"close"),  # the body has not been read
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
