"""The HTTP interface of a pod's keeper, for `LoomPod` and the keepers of the job's other pods.

It is apart from the main module, which first checks that a web server is installed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar

from fastapi import Body, FastAPI, HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from loom.errors import LoomError
from loom.mutual_auth import Purpose
from loom.mutual_auth.over_http import CHALLENGE_HEADER, PROOF_HEADER, Challenges, proof_of_answer
from loom.process.listen import bracketed
from loom_gateway.pod.settings_and_peers import CONFIGURE, KeptPod, KeptPods, PodSettings, body_digest
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
        end: ends the keeper soon, with its processes and its sessions.
        own_key: the key for new settings.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/pod", response_model=None)
    async def pod() -> KeptPod:
        return keeper.state()

    @app.get("/pods", response_model=None)
    async def pods() -> KeptPods:
        return {"pods": await keeper.states()}

    @app.post(CONFIGURE, response_model=None)
    async def configure(settings: Annotated[object, Body()]) -> KeptPod:
        # A job that is applied again may have another token.
        try:
            await keeper.configure(PodSettings.from_json(settings))
        except LoomError as error:
            raise HTTPException(422, str(error)) from error
        return keeper.state()

    @app.post("/restart_worker", response_model=None)
    async def restart_worker() -> KeptPod:
        await keeper.worker.restart()
        return keeper.state()

    @app.post("/shutdown", response_model=None)
    async def shutdown() -> KeptPod:
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
        """True if no request is being answered."""
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
        self._challenges = Challenges(Purpose.POD)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path, host = scope["path"], headers.get("host", "")
        key = self._own_key if path == CONFIGURE else self._keeper.settings.token_sha256
        exchange = self._challenges.check(key, headers, scope["method"], host, path)
        if exchange is None or host not in self._hosts(path):
            why = "this pod is another job's, or the job has another token"
            await _refuse(send, 403, why, {CHALLENGE_HEADER: self._challenges.new()})
            return
        if not headers.get("content-length", "0").isdecimal() or "transfer-encoding" in headers:
            await _refuse(send, 411, "a body needs a length")
            return
        if int(headers.get("content-length", "0")) > MAX_BODY:
            await _refuse(send, 413, f"a body has {MAX_BODY} bytes at most")
            return
        began: list[Message] = []

        async def send_proven(message: Message) -> None:
            # The answers are whole: their body comes in one message.
            if message["type"] == "http.response.start":
                began.append(message)
                return
            start = began.pop()
            proven = proof_of_answer(exchange, start["status"], body_digest(message.get("body", b"")))
            await send({**start, "headers": [*start["headers"], (PROOF_HEADER.encode(), proven.encode())]})
            await send(message)

        await self._app(scope, receive, send_proven)

    def _hosts(self, path: str) -> list[str]:
        """Return the forms of ``Host`` under which this keeper is asked; for new settings only from its pod."""
        port = self._keeper.settings.keeper_port
        addresses = ["127.0.0.1", "::1"] if path == CONFIGURE else ["127.0.0.1", "::1", self._keeper.address]
        return [f"{bracketed(address)}:{port}" for address in addresses]


async def _refuse(send: Send, status: int, why: str, more: Mapping[str, str] = {}) -> None:
    body = json.dumps({"detail": why}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **more}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
