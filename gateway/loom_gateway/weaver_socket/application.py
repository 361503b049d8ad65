"""The WebSocket ``/ws/v1/weaver``: a snapshot of the weaver's state, then its changes, and commands to it, as JSON.

::

    {"type": "snapshot", "status": {…}, "replicas": […], "devices": […]}
    {"type": "event", "event": {"id", "time", "kind", "replica", …}}
    {"type": "delta", "replicas": {id: {"state", "step", "metrics", …}}, "devices": {uuid: {"utilization", …}}}
    {"type": "away", "reason": "…"}

It is about the caller's replicas and devices; an admin may name another user with ``?user=NAME``.
A snapshot comes first, and again after the weaver was away. An event whose id has come before is the same event
with an addition, such as a stack. A reader that is too slow is disconnected, and may reconnect.

A client with ``?form=torchloom`` gets the same in torchLoom's form: see
`loom_gateway.weaver_socket.torchloom_form`.

A page, which offers the subprotocol ``loom.page`` or has ``?page=1`` in its address, gets more, but of replicas'
reports only what it subscribes to: see `loom_gateway.weaver_socket.page_feed`, `loom.weaver.server.pushes` and
`loom_gateway.weaver_socket.gateway_feed`. The messages of clients are in `loom_gateway.weaver_socket.commands`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from loom.errors import LoomError, WrongArguments
from loom.token_file import SCOPES
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom.wire.plain import exact_json
from loom_gateway.access.control import AccessControl
from loom_gateway.access.credentials import PAGE_PROTOCOL
from loom_gateway.access.sessions import Principal
from loom_gateway.relay.endpoint import CLOSE_REFUSED, DISCONNECT_TIMEOUT
from loom_gateway.rest.weaver_changes import WeaverChanges, whose
from loom_gateway.weaver_socket.commands import SocketCommands
from loom_gateway.weaver_socket.gateway_feed import GatewayFeed, PageReader
from loom_gateway.weaver_socket.subscribers import FeedReader, Since
from loom_gateway.weaver_socket.torchloom_form import FormReader
from loom_gateway.weaver_socket.watches import WeaverWatches

MAX_FRAME = 1 << 20
"""Bytes of a message from a client at which the connection is closed before the message is read."""

MAX_VIEW_FRAME = 64 << 10
"""The same for a client that only looks: it sends pings and subscriptions."""


FORMS = ("loom", "torchloom")
"""The forms of pushes that a client may ask for."""


class WeaverSocket:
    """The ASGI application of the path ``/ws/v1/weaver``."""

    def __init__(
        self, weaver: WeaverClient, access: AccessControl, changes: WeaverChanges, gateway: GatewayFeed
    ) -> None:
        self._weaver = weaver
        self._access = access
        self._changes = changes
        self._gateway = gateway
        self._watches = WeaverWatches(weaver)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        principal: Principal = scope["loom.principal"]
        scope["loom.socket"].limit_messages(MAX_VIEW_FRAME if principal.token.scope == SCOPES[0] else MAX_FRAME)
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        offered = PAGE_PROTOCOL in scope.get("subprotocols", ())
        await send({"type": "websocket.accept", **({"subprotocol": PAGE_PROTOCOL} if offered else {})})
        is_page = offered or query.get("page") == ["1"]
        since = Since.read(query.get("since", [None])[0])
        form = query.get("form", [None])[0]
        reader = self._gateway.reader(principal, since) if is_page else _reader(form)
        disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ends: list[asyncio.Future[Any]] = [disconnected, reader.failed, asyncio.ensure_future(reader.send_to(send))]
        commands: SocketCommands | None = None

        async def disconnect(error: LoomError) -> None:
            if not disconnected.done():
                disconnected.set_exception(error)

        async def send_answer(message: Mapping[str, object]) -> None:
            await send({"type": "websocket.send", "text": exact_json(message)})

        try:
            self._access.require(principal, "view", "to watch replicas")
            if form not in (None, *FORMS):
                raise WrongArguments(f"form is one of {', '.join(FORMS)}, not {form!r:.80}")
            named = query.get("user", [None])[0]
            of = await whose(principal, named, None, "view", self._access, self._weaver)
            if of["user"] == EVERYONE:
                raise WrongArguments("a watch is of one user: name that user")
            if isinstance(reader, PageReader):
                await self._gateway.look_at_sessions(principal)
            subscribe = reader.subscribe if isinstance(reader, PageReader) else None
            commands = SocketCommands(
                self._changes, self._weaver, self._access, principal, of, scope["path"], send_answer, subscribe
            )
            left = asyncio.ensure_future(_answer_until_disconnected(receive, commands))
            ends.append(left)
            with contextlib.ExitStack() as held:
                held.enter_context(self._access.budgets.watchers.held(principal.user))
                held.enter_context(self._access.connected(principal, disconnect))
                held.enter_context(self._watches.reading(principal.user, of["user"], reader))
                if isinstance(reader, PageReader):
                    held.enter_context(self._gateway.reading(reader))
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not left.done() or left.exception() is not None:
                for end in ends:
                    if end.done():
                        end.result()
        except LoomError as error:
            await _end(commands, ends)
            await _disconnect(error, scope, send)
        finally:
            await _end(commands, ends)


def _reader(form: str | None) -> FeedReader:
    return FormReader() if form == "torchloom" else FeedReader()


async def _answer_until_disconnected(receive: Receive, commands: SocketCommands) -> None:
    while (message := await receive())["type"] != "websocket.disconnect":
        await commands.answer(message.get("text"))


async def _end(commands: SocketCommands | None, ends: list[asyncio.Future[Any]]) -> None:
    """Send nothing more."""
    for end in ends:
        end.cancel()
    await asyncio.gather(*ends, return_exceptions=True)
    if commands is not None:
        await commands.close()


async def _disconnect(error: LoomError, scope: Scope, send: Send) -> None:
    goodbye = {"type": "websocket.close", "code": CLOSE_REFUSED, "reason": error.code}
    try:
        with contextlib.suppress(RuntimeError):  # the connection closed meanwhile
            await asyncio.wait_for(send(goodbye), DISCONNECT_TIMEOUT)
    except asyncio.TimeoutError:  # the reader does not even receive the reason
        scope["loom.socket"].abort()
