"""The access middleware of the gateway's application, in plain ASGI: a refused request costs nothing of FastAPI."""

from __future__ import annotations

import math
from functools import partial

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loom.errors import AuthenticationError, LoomError, RateLimited, ScopeError
from loom_gateway.access.bodies import BoundedAnswer, RequestBody
from loom_gateway.access.connections import admit, when_read
from loom_gateway.access.control import AccessControl
from loom_gateway.access.origins import READS, AllowedHosts
from loom_gateway.access.route_scopes import FOR_EVERY_SCOPE, continues_tunnel, drives, is_open, is_tunnel
from loom_gateway.access.sessions import Principal

MAX_UNKNOWN = 32 << 10
"""Bytes of a request's body without a token: one to sign in has a token, of 16 KiB at most."""

DONE = "loom.done"
"""The key in a request's scope under which an application leaves the event and details for the audit."""


class AccessMiddleware:
    """Admits requests, with a `Principal` as ``loom.principal`` in their scope, or refuses them."""

    def __init__(self, app: ASGIApp, access: AccessControl, hosts: AllowedHosts | None = None) -> None:
        self._app = app
        self._access = access
        self._hosts = hosts or AllowedHosts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            self._hosts.check(scope["headers"])
        except LoomError as error:
            self._access.audit.refused(error, None, (scope.get("client") or [""])[0])
            await _refuse(error, scope, receive, send)
            return
        if is_open(scope["path"]):
            await self._app(scope, _bounded(receive), send)
            return
        path = scope["path"]
        reads = scope["type"] == "websocket" or scope["method"] in READS or is_tunnel(path)
        small = reads or (scope["method"] == "POST" and path in FOR_EVERY_SCOPE)
        try:
            principal = scope["loom.principal"] = await self._access.enter(scope, counts=not continues_tunnel(path))
            await admit(scope, principal.user)
            if scope["type"] == "http":
                self._access.require(principal, "view" if small else "operate", f"{scope['method']} over REST")
            if drives(path) and principal.sign_in is not None:
                raise ScopeError("a page drives no session: a program does, with a token")
        except LoomError as error:
            await _refuse(error, scope, receive, send)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            await self._serve(scope, receive, send, principal, reads)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, principal: Principal, reads: bool) -> None:
        """Serve a request whose bodies are within their bounds."""
        budgets = self._access.budgets
        answer = BoundedAnswer(
            scope, send, principal.user, budgets.answers, error_response, partial(when_read, scope)
        )
        count = partial(self._access.count_request, principal)
        body = RequestBody(scope, receive, answer.send, principal.user, budgets.bodies, error_response, count)
        try:
            body.begin()
            await self._serve_bounded(scope, body.receive, body.send, principal, reads)
        except LoomError as error:
            await _refuse(error, scope, receive, answer.send)
        finally:
            body.end()
            answer.end()

    async def _serve_bounded(
        self, scope: Scope, receive: Receive, send: Send, principal: Principal, reads: bool
    ) -> None:
        if reads:
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        try:
            asked = {"method": scope["method"], "path": path[:200]}
            await self._access.audit.ask(principal.token, principal.peer, **asked)
        except LoomError as error:
            await _refuse(error, scope, receive, send)
            return

        async def note_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":  # noted before the client gets the answer
                command = {"method": scope["method"], "path": scope["path"][:200], "status": message["status"]}
                event, details = scope.get(DONE, ("commanded", {}))
                await self._access.audit.write(event, principal.token, principal.peer, **command, **details)
            await send(message)

        await self._app(scope, receive, note_and_send)


def _bounded(receive: Receive) -> Receive:
    """Return what receives a request of somebody who has shown no token yet, as if a larger one were cut off."""
    taken = 0

    async def receive_some() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        return {"type": "http.disconnect"} if taken > MAX_UNKNOWN else message

    return receive_some


async def _refuse(error: LoomError, scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(error)
    if scope["type"] == "websocket":
        scope["loom.socket"].refuse(error.http_status, response.headers, bytes(response.body).decode())
    else:
        if any(name == b"upgrade" for name, _ in scope["headers"]):  # it was refused before a WebSocket was made
            response.headers["connection"] = "close"
        await response(scope, receive, send)


def error_response(error: LoomError) -> JSONResponse:
    """Return an error in the form that all of the gateway's HTTP has."""
    headers = {}
    if isinstance(error, RateLimited):
        headers["retry-after"] = str(math.ceil(error.retry_after))
    elif isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": {"code": error.code, "message": str(error)}}, error.http_status, headers)
