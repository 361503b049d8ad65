"""The WebSocket ``/ws/v1/weaver``: a snapshot of the weaver's state and then its changes, as JSON messages.

::

    {"type": "snapshot", "status": {…}, "replicas": […], "devices": […]}
    {"type": "event", "event": {"id", "time", "kind", "replica", …}}
    {"type": "delta", "replicas": {id: {"state", "step", "metrics", …}}, "devices": {uuid: {"utilization", …}}}
    {"type": "away", "reason": "…"}

It is about the caller's replicas and devices; an admin may name another user with ``?user=NAME``.
A snapshot comes first, and again after the weaver was away. An event whose id has come before is the same event
with an addition, such as a stack. A reader that is too slow is disconnected, and may reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from loom.errors import LoomError
from loom.weaver.client import WeaverClient
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.relay.relay import CLOSE_REFUSED, DISCONNECT_TIMEOUT
from loom_gateway.rest.weaver_watches import FeedReader, WeaverWatches
from loom_gateway.rest.whose import whose


class WeaverSocket:
    """The ASGI application of the path ``/ws/v1/weaver``."""

    def __init__(self, weaver: WeaverClient, access: AccessControl) -> None:
        self._weaver = weaver
        self._access = access
        self._watches = WeaverWatches(weaver)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        principal: Principal = scope["loom.principal"]
        await send({"type": "websocket.accept"})
        reader = FeedReader()
        left = asyncio.ensure_future(_until_disconnected(receive))
        sending = asyncio.ensure_future(reader.send_to(send))
        disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ends = [left, disconnected, reader.failed, sending]

        async def disconnect(error: LoomError) -> None:
            if not disconnected.done():
                disconnected.set_exception(error)

        named = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("user", [None])[0]
        try:
            self._access.require(principal, "view", "to watch replicas")
            of = await whose(principal, named, None, "view", self._access, self._weaver)
            with (
                self._access.connected(principal, disconnect),
                self._watches.reading(principal.user, of["user"], reader),
            ):
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not left.done():
                for end in ends:
                    if end.done():
                        end.result()
        except LoomError as error:
            sending.cancel()
            await _disconnect(error, scope, send)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "websocket.disconnect":
        pass  # readers send nothing of interest


async def _disconnect(error: LoomError, scope: Scope, send: Send) -> None:
    goodbye = {"type": "websocket.close", "code": CLOSE_REFUSED, "reason": error.code}
    try:
        with contextlib.suppress(RuntimeError):  # the connection closed meanwhile
            await asyncio.wait_for(send(goodbye), DISCONNECT_TIMEOUT)
    except asyncio.TimeoutError:  # the reader does not even receive the reason
        scope["loom.socket"].abort()
