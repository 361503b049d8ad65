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
from collections import deque
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from loom.errors import LoomError, WatcherTooSlow, WeaverUnavailable
from loom.weaver.client import WeaverClient
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.relay.relay import CLOSE_REFUSED, DISCONNECT_TIMEOUT
from loom_gateway.rest.exact_json import exact_json
from loom_gateway.rest.whose import whose

MAX_WAITING = 8 << 20  # characters that may wait for a reader, in addition to the last snapshot
BETWEEN_WATCHES = 0.2  # the shortest pause in seconds between two watches of the weaver for one reader


class WeaverSocket:
    """The ASGI application of the path ``/ws/v1/weaver``."""

    def __init__(self, weaver: WeaverClient, access: AccessControl) -> None:
        self._weaver = weaver
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        principal: Principal = scope["loom.principal"]
        await send({"type": "websocket.accept"})
        waiting = _Waiting()
        left = asyncio.ensure_future(_until_disconnected(receive))
        sending = asyncio.ensure_future(waiting.send_to(send))
        disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        filling = asyncio.ensure_future(self._fill(waiting, principal, scope))
        ends = [left, disconnected, filling, sending]

        async def disconnect(error: LoomError) -> None:
            if not disconnected.done():
                disconnected.set_exception(error)

        try:
            self._access.require(principal, "view", "to watch replicas")
            with self._access.connected(principal, disconnect):
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

    async def _fill(self, waiting: _Waiting, principal: Principal, scope: Scope) -> None:
        named = parse_qs(scope["query_string"].decode("latin-1")).get("user", [None])[0]
        while True:
            try:
                user = await whose(principal, named, self._access, self._weaver)
                async with self._weaver.watch(user) as watch:
                    while True:
                        kind, body = await watch.next()
                        waiting.add(_message(kind, body), is_snapshot=kind == "snapshot")
            except WeaverUnavailable as error:
                waiting.add({"type": "away", "reason": str(error)})
            await asyncio.sleep(BETWEEN_WATCHES)
            await self._weaver.available()


class _Waiting:
    """Messages that wait for a reader."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque()
        self._size = 0  # characters in `_texts`
        self._limit = MAX_WAITING
        self._some = asyncio.Event()

    def add(self, message: dict[str, Any], is_snapshot: bool = False) -> None:
        text = exact_json(message)
        if is_snapshot:
            self._limit = MAX_WAITING + len(text)
        self._size += len(text)
        if self._size > self._limit:
            raise WatcherTooSlow(f"more than {MAX_WAITING >> 20} MiB waited for this reader: read faster, or less")
        self._texts.append(text)
        self._some.set()

    async def send_to(self, send: Send) -> None:
        """Send the waiting messages, forever."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._texts:
                text = self._texts.popleft()
                await send({"type": "websocket.send", "text": text})
                self._size -= len(text)


def _message(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    if kind == "snapshot":
        return {"type": "snapshot", **body}
    if "event" in body:
        return {"type": "event", "event": body["event"]}
    return {"type": "delta", **body["changes"]}


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
