"""The access middleware of the gateway's application, in plain ASGI: a refused request costs nothing of FastAPI.

`RequestBody` and `BoundedAnswer` are the two bodies of a request, with size, time and a place in a user's budget.
An application reads the body by `RequestBody.receive`. When the body exceeds a bound, `RequestBody` answers in the
place of the application, which is told that the client has gone, and drops what the application still sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loom.errors import LoomError, RateLimited, ScopeError, TooLarge
from loom.token_file import REPORT
from loom.wire.length_prefix import MAX_BATCH, SLOWEST_BATCH
from loom_gateway.access.budgets import Budget
from loom_gateway.access.connections import admit, when_read
from loom_gateway.access.control import AccessControl
from loom_gateway.access.origins import READS, AllowedHosts
from loom_gateway.access.route_scopes import (
    FOR_EVERY_SCOPE,
    PLANS,
    TRAINER_STATUS,
    continues_tunnel,
    drives,
    is_open,
    is_tunnel,
)
from loom_gateway.access.sessions import Principal
from loom_gateway.rest.errors import error_response

MAX_BODY = 64 << 10
"""Bytes of a request's body, which the event loop reads as JSON: a message on the WebSocket has as many."""

MAX_PLAN_BODY = 128 << 10
"""Bytes of a body with a plan of faults, a text of 64 KiB that JSON escapes."""

MAX_SMALL_BODY = 4 << 10
"""Bytes of the body of a request that a token of every scope may make, or that needs none of its body."""

COUNTED = 16 << 10
"""Bytes of a body that count as a request of their own, since reading them as JSON takes as long."""

BODY_TIMEOUT = 10.0
"""Seconds that a body may take, in addition to those for its bytes."""

SMALL = 64 << 10
"""Bytes of an answer that are not counted: the transport keeps as many for every connection."""

SLOWEST = 32 << 10
"""Bytes a second at which a body has to come, at least, but for the batches of a tunnel: `SLOWEST_BATCH`."""


def largest_body(method: str, path: str) -> int:
    """Return the bytes of the largest body that a route takes."""
    if continues_tunnel(path):
        return MAX_BATCH
    if method in READS or method == "DELETE" or path in FOR_EVERY_SCOPE:
        return MAX_SMALL_BODY
    return MAX_PLAN_BODY if path in PLANS else MAX_BODY


class RequestBody:
    """The body of one request.

    Args:
        count: counts `COUNTED` bytes as a request of the user; raises `RateLimited`.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        user: str,
        budget: Budget,
        count: Callable[[], None],
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._user = user
        self._budget = budget
        self._count = count
        self._counted = COUNTED  # bytes for which the request itself, and requests besides, have been counted
        self._most = largest_body(scope["method"], scope["path"])
        self._slowest = SLOWEST_BATCH if continues_tunnel(scope["path"]) else SLOWEST
        self._declared = _length(scope["headers"])
        self._taken = 0
        """Bytes of the budget: those that were declared, or else those that have come."""
        self._came = 0
        self._over = False  # whether all of it has come
        self._refused = False
        self._answered = False
        self._began = 0.0

    def begin(self) -> None:
        """Take the bytes that are declared. Raise `TooLarge` or `LimitReached`, before a byte is read."""
        if self._declared is not None:
            self._check(self._declared)
            self._take(self._declared)

    def end(self) -> None:
        """Give the budget back."""
        self._budget.give_back(self._user, self._taken)
        self._taken = 0

    async def receive(self) -> Message:
        """Return the next part of the body, for the application."""
        if self._over:
            return await self._receive()  # that the client has gone
        if self._refused:
            return {"type": "http.disconnect"}
        now = asyncio.get_running_loop().time()
        self._began = self._began or now
        try:
            message = await asyncio.wait_for(self._receive(), self._until() - now)
            if message["type"] == "http.request":
                self._came += len(message.get("body", b""))
                self._check(self._came)
                self._take(self._came)
                self._over = not message.get("more_body", False)
            return message
        except asyncio.TimeoutError:
            error: LoomError = RateLimited(
                f"a body has to come at {self._slowest} bytes a second, after {BODY_TIMEOUT:g} s; "
                f"{self._came} have come"
            )
        except LoomError as refused:
            error = refused
        self._refused = True
        if not self._answered:
            await error_response(error)(self._scope, self._receive, self._send)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a part of the application's answer, unless the body was refused."""
        if not self._refused:
            self._answered = True
            await self._send(message)

    def _until(self) -> float:
        return self._began + BODY_TIMEOUT + self._came / self._slowest

    def _check(self, size: int) -> None:
        if size > self._most:
            raise TooLarge(f"a body is over the limit of {self._most} bytes")

    def _take(self, size: int) -> None:
        while size > self._counted and not continues_tunnel(self._scope["path"]):
            self._count()
            self._counted += COUNTED
        if size > self._taken:
            self._budget.take(self._user, size - self._taken)
            self._taken = size


class BoundedAnswer:
    """The answer to one request. If it is large, its bytes count for the user until the client has read them.

    Args:
        when_read: calls a function when the client has read what was sent to it.
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        user: str,
        budget: Budget,
        when_read: Callable[[Callable[[], None]], None],
    ) -> None:
        self._scope = scope
        self._send = send
        self._user = user
        self._budget = budget
        self._when_read = when_read
        self._taken = 0
        self._refused = False

    async def send(self, message: Message) -> None:
        """Send a part of the answer. In the place of one for which there is no room, send the error."""
        if self._refused:
            return
        if message["type"] == "http.response.start":
            size = _length(message.get("headers", ())) or 0
            if size > SMALL:
                try:
                    self._budget.take(self._user, size)
                except LoomError as error:
                    self._refused = True
                    await error_response(error)(self._scope, _nothing_more, self._send)
                    return
                self._taken = size
        await self._send(message)

    def end(self) -> None:
        """Give the budget back as soon as the client has read the answer."""
        taken, self._taken = self._taken, 0
        if taken:
            self._when_read(lambda: self._budget.give_back(self._user, taken))


async def _nothing_more() -> Message:
    return {"type": "http.disconnect"}


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    for name, value in headers:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 19 else 1 << 62
    return None


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
            if principal.token.scope == REPORT:
                self._check_reports(path, principal)
                reads = True  # no entry of the audit for each report
            elif scope["type"] == "http":
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

    def _check_reports(self, path: str, principal: Principal) -> None:
        """Raise `ScopeError` if a token of one replica is shown for something else than its status."""
        if path != TRAINER_STATUS:
            error = ScopeError(f"this token reports the status of the replica {principal.token.replica!r} alone")
            self._access.audit.refused(error, principal.token, principal.peer)
            raise error

    async def _serve(self, scope: Scope, receive: Receive, send: Send, principal: Principal, reads: bool) -> None:
        """Serve a request whose bodies are within their bounds."""
        budgets = self._access.budgets
        answer = BoundedAnswer(scope, send, principal.user, budgets.answers, partial(when_read, scope))
        count = partial(self._access.count_request, principal)
        body = RequestBody(scope, receive, answer.send, principal.user, budgets.bodies, count)
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
