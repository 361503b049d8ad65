"""The HTTP interface of a pod's keeper, for `LoomPod` and the keepers of the job's other pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, ClassVar

from fastapi import FastAPI, HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from loom.errors import LoomError
from loom.process.listen import bracketed
from loom_gateway.pod.peers import (
    CONFIGURE,
    NONCE_HEADER,
    PROOF_HEADER,
    proof_of_answer,
    proof_of_request,
    same,
)
from loom_gateway.pod.settings import PodSettings
from loom_gateway.pod.supervisor import PodSupervisor

REQUEST_TIMEOUT = 10.0
"""Seconds from the connection to the end of a request's head."""

CONNECTIONS = 256
"""Connections at once, beyond which the oldest one without a request is closed."""

MAX_BODY = 64 << 10
"""Bytes of a request's body at most."""


def create_app(keeper: PodSupervisor, end: Callable[[], None], own_key: str) -> ASGIApp:
    """Return the keeper's HTTP application.

    Args:
        end: ends the keeper soon, with its worker and its gateway.
        own_key: the key for new settings.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/pod")
    async def pod() -> dict[str, Any]:
        return keeper.state()

    @app.get("/pods")
    async def pods() -> dict[str, Any]:
        return {"pods": await keeper.states()}

    @app.post(CONFIGURE)
    async def configure(settings: dict[str, Any]) -> dict[str, Any]:
        # A job that is applied again may have another token.
        try:
            await keeper.configure(PodSettings.from_json(settings))
        except LoomError as error:
            raise HTTPException(422, str(error)) from error
        return keeper.state()

    @app.post("/restart_worker")
    async def restart_worker() -> dict[str, Any]:
        await keeper.worker.restart()
        return keeper.state()

    @app.post("/shutdown")
    async def shutdown() -> dict[str, Any]:
        end()
        return keeper.state()

    return KeyFirst(app, keeper, own_key)


class KeeperProtocol(H11Protocol):
    """uvicorn's HTTP, with bounds for connections whose request has not come: in number, and in seconds."""

    _open: ClassVar[dict[KeeperProtocol, None]] = {}  # the oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(REQUEST_TIMEOUT, self._time_out)
        self._open[self] = None
        if len(self._open) > CONNECTIONS:
            oldest = next((one for one in self._open if one.waits), None)
            if oldest is not None:
                oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)
        self._deadline.cancel()
        super().connection_lost(exc)

    @property
    def waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _time_out(self) -> None:
        if self.waits:
            self.transport.abort()
        else:
            self._deadline = self.loop.call_later(REQUEST_TIMEOUT, self._time_out)


class KeyFirst:
    """Lets in who proves to know the key, before a byte of a body is read, and proves it in each answer."""

    def __init__(self, app: ASGIApp, keeper: PodSupervisor, own_key: str) -> None:
        self._app = app
        self._keeper = keeper
        self._own_key = own_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        path, nonce = scope["path"], headers.get(NONCE_HEADER.encode(), "")
        key = self._own_key if path == CONFIGURE else self._keeper.settings.token_sha256
        host = headers.get(b"host", "")
        proof = proof_of_request(key, nonce, scope["method"], path, host)
        # The host is part of the proof: what another pod was sent is worth nothing here.
        if host not in self._hosts(path) or not same(headers.get(PROOF_HEADER.encode(), ""), proof):
            await _refuse(send, 403, "this pod is another job's, or the job has another token")
            return
        if not headers.get(b"content-length", "0").isdecimal() or b"transfer-encoding" in headers:
            await _refuse(send, 411, "a body needs a length")
            return
        if int(headers.get(b"content-length", "0")) > MAX_BODY:
            await _refuse(send, 413, f"a body has {MAX_BODY} bytes at most")
            return
        began: list[Message] = []

        async def send_proven(message: Message) -> None:
            # The answers are whole: their body comes in one message.
            if message["type"] == "http.response.start":
                began.append(message)
                return
            start = began.pop()
            proven = proof_of_answer(key, nonce, message.get("body", b"")).encode()
            await send({**start, "headers": [*start["headers"], (PROOF_HEADER.encode(), proven)]})
            await send(message)

        await self._app(scope, receive, send_proven)

    def _hosts(self, path: str) -> list[str]:
        """Return the forms of ``Host`` under which this keeper is asked; for new settings only from its pod."""
        port = self._keeper.settings.keeper_port
        addresses = ["127.0.0.1", "::1"] if path == CONFIGURE else ["127.0.0.1", "::1", self._keeper.address]
        return [f"{bracketed(address)}:{port}" for address in addresses]


async def _refuse(send: Send, status: int, why: str) -> None:
    body = json.dumps({"detail": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
