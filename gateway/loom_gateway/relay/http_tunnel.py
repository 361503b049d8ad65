"""Sessions over plain HTTP, for networks that break WebSockets: frames go up in POSTs and down in long polls.

- ``POST /api/v1/tunnel`` opens a tunnel.
- ``POST …/{id}/up?n=N`` takes the client's batches of frames, numbered from 1.
- ``GET …/{id}/down?n=N`` answers with the driver's batch N, and acknowledges the batches before it.
- ``DELETE …/{id}`` closes the tunnel.

The numbers make every request repeatable if its answer was lost: no batch is taken twice, and each is kept until
the client asks for the next one.

To the relay, a tunnel is another client: it replaces the WebSocket, event by event. So one place decides about
access, the opening of sessions, and their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from loom.errors import ConnectionLost, LimitReached, ProtocolMismatch, TooLarge
from loom.wire.batches import CONTENT_TYPE, ENDED_HEADER, MAX_BATCH, TUNNELS, split_batch
from loom.wire.lane import LENGTH
from loom.wire.messages import Buffer
from loom_gateway.access.sessions import Principal
from loom_gateway.relay.links import DriverLink

logger = logging.getLogger(__name__)

POLL = 25.0  # the longest time in seconds to hold back an answer: ingresses cut requests that take 30 or 60 s
IDLE = 60.0  # seconds without a poll after which a client counts as gone

MAX_TUNNELS = 1024
"""Tunnels of one token. Each may hold a batch in both directions."""

BATCH = 2 << 20
"""Bytes of a batch, unless one frame is larger. Reading from the driver pauses when as many bytes wait."""

_UNCACHED = {"Cache-Control": "no-store, no-transform"}


class Tunnel:
    """One client's tunnel. The relay uses it like a WebSocket: `receive`, `send` and `relay_to`.

    Args:
        idle: seconds without a poll after which it closes itself.
        on_close: called when it is closed.
    """

    def __init__(self, idle: float, on_close: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self.gone = self._loop.create_future()
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._events.put_nowait({"type": "websocket.connect"})
        self._link: DriverLink | None = None
        self._ended = False
        self._taken = 0  # the number of the last batch that was taken from the client
        self._room = asyncio.Event()  # set while the driver takes frames
        self._room.set()
        self._frames: deque[list[Buffer]] = deque()  # of the next batches
        self._waiting_bytes = 0  # of `_frames`
        self._has_answer = asyncio.Event()  # for a poll
        self._batch = b""  # the last batch, kept for repeated polls
        self._number = 0  # of the last batch for the client
        self._polls = 0  # polls under way
        self._idle = idle
        self._on_close = on_close
        self._closed = False
        self._closing = self._loop.call_later(idle, self.close)  # fires after `idle` seconds

    async def receive(self) -> dict[str, Any]:
        """Return the next event, in ASGI's form for WebSockets: the connection, the hello, the end."""
        return await self._events.get()

    async def send(self, event: Any) -> None:
        kind = event["type"]
        if kind == "websocket.send":
            self.send_frame(event["bytes"])
        elif kind == "websocket.close":
            self.end()

    def relay_to(self, link: DriverLink) -> None:
        self._link = link
        while not self._events.empty():
            event = self._events.get_nowait()
            if event["type"] == "websocket.disconnect":
                self._events.put_nowait(event)  # for the relay's task, which waits for it
                return
            link.write(event["bytes"])
        self._room.set()

    def send_frame(self, *pieces: Buffer) -> None:
        if self._ended:
            return
        frame = [LENGTH.pack(_size(pieces)), *pieces]
        self._frames.append(frame)
        self._waiting_bytes += _size(frame)
        self._has_answer.set()
        if self._link is not None and self._waiting_bytes >= BATCH:
            self._link.pause_reading()

    def pause_receiving(self) -> None:
        if not self._ended:
            self._room.clear()

    def resume_receiving(self) -> None:
        self._room.set()

    def end(self) -> None:
        """Stop taking frames from either side. The client still gets those that have arrived for it."""
        if not self._ended:
            self._ended = True
            self._room.set()
            self._has_answer.set()
            self._events.put_nowait({"type": "websocket.disconnect"})
            self.gone.set_result(None)

    abort = end

    async def take(self, number: int, data: bytes) -> int:
        """Take a batch for the driver once it has room. Return the number of the last batch taken.

        After `POLL` seconds without room, that is not ``number``, and the client sends the batch again.
        """
        if number > self._taken + 1:
            raise ProtocolMismatch(f"batch {number} came where batch {self._taken + 1} had to come")
        frames = split_batch(data)
        if number == self._taken + 1:
            await _wait_for(self._room)
        if number == self._taken + 1 and self._room.is_set():  # a repeated request may have delivered it meanwhile
            self._taken = number
            self._pass_on(frames)
        return self._taken

    def _pass_on(self, frames: list[memoryview]) -> None:
        if self._link is not None:
            for frame in frames:
                self._link.write(frame)
        elif not self._ended and frames:
            self._room.clear()  # until the driver has welcomed the client
            for frame in frames:
                self._events.put_nowait({"type": "websocket.receive", "bytes": bytes(frame)})

    async def poll(self, number: int) -> tuple[bytes, bool]:
        """Return a batch by number, and whether it is the last. It is empty after `POLL` seconds without frames."""
        if number not in (self._number, self._number + 1):
            raise ProtocolMismatch(f"batch {number} was asked for; the last one is {self._number}")
        with self._attended():
            if number == self._number + 1:
                self._batch = b""
                await _wait_for(self._has_answer)
            if number == self._number + 1 and self._frames:  # no concurrent poll has made it meanwhile
                self._number = number
                self._batch = self._next_batch()
            return self._batch if number == self._number else b"", self._ended and not self._frames

    def _next_batch(self) -> bytes:
        buffers = self._frames.popleft()
        size = _size(buffers)
        while self._frames and size + _size(self._frames[0]) <= BATCH:
            size += _size(self._frames[0])
            buffers += self._frames.popleft()
        if not self._frames and not self._ended:
            self._has_answer.clear()
        self._waiting_bytes -= size
        if self._link is not None and self._waiting_bytes < BATCH:
            self._link.resume_reading()
        return b"".join(buffers)

    @contextlib.contextmanager
    def _attended(self) -> Iterator[None]:
        """Suspend the idle timeout while the client polls, and restart it afterwards."""
        self._closing.cancel()
        self._polls += 1
        try:
            yield
        finally:
            self._polls -= 1
            if not self._polls and not self._closed:
                self._closing = self._loop.call_later(self._idle, self.close)

    def close(self) -> None:
        self._closed = True
        self._closing.cancel()
        self.end()
        self._frames.clear()
        self._on_close()


class Tunnels:
    """The tunnels of a gateway, and their routes."""

    def __init__(self, relay: ASGIApp, idle: float = IDLE) -> None:
        self._relay = relay
        self._idle = idle
        self._tunnels: dict[str, tuple[str, Tunnel]] = {}  # with the id of the client's token
        self._tasks: set[asyncio.Task[None]] = set()
        self.routes = [
            Route(TUNNELS, self._open, methods=["POST"]),
            Route(TUNNELS + "/{tunnel}", self._close, methods=["DELETE"]),
            Route(TUNNELS + "/{tunnel}/up", self._up, methods=["POST"]),
            Route(TUNNELS + "/{tunnel}/down", self._down, methods=["GET"]),
        ]

    def close(self) -> None:
        """End every tunnel. A poll that is under way is answered with the frames that have arrived."""
        for _, tunnel in list(self._tunnels.values()):
            tunnel.end()

    async def _open(self, request: Request) -> Response:
        owner = _token_id(request)
        if sum(token == owner for token, _ in self._tunnels.values()) >= MAX_TUNNELS:
            raise LimitReached(
                f"{MAX_TUNNELS} tunnels of this token are open: close some, or wait {self._idle:g} s"
            )
        name = secrets.token_urlsafe(24)
        tunnel = Tunnel(self._idle, partial(self._tunnels.pop, name, None))
        self._tunnels[name] = owner, tunnel
        task = asyncio.ensure_future(self._serve(request, tunnel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return JSONResponse({"tunnel": name, "poll_seconds": POLL}, 201, _UNCACHED)

    async def _serve(self, request: Request, tunnel: Tunnel) -> None:
        scope = {**request.scope, "type": "websocket", "loom.socket": tunnel}
        try:
            await self._relay(scope, tunnel.receive, tunnel.send)
        except Exception:
            logger.exception("an HTTP tunnel broke")
        finally:
            tunnel.end()

    async def _up(self, request: Request) -> Response:
        tunnel = self._find(request)
        try:
            data = await _body(request)
        except ClientDisconnect:
            return Response()  # the client is gone, so nothing receives this
        return JSONResponse({"taken": await tunnel.take(_number(request), data)}, headers=_UNCACHED)

    async def _down(self, request: Request) -> Response:
        data, ended = await self._find(request).poll(_number(request))
        headers = _UNCACHED | ({ENDED_HEADER: "1"} if ended else {})
        return Response(data, headers=headers, media_type=CONTENT_TYPE)

    async def _close(self, request: Request) -> Response:
        self._find(request).close()
        return Response(status_code=204, headers=_UNCACHED)

    def _find(self, request: Request) -> Tunnel:
        owner, tunnel = self._tunnels.get(request.path_params["tunnel"], (None, None))
        # Another token gets the answer for an unknown tunnel, so that it learns nothing.
        if tunnel is None or owner != _token_id(request):
            raise ConnectionLost(
                "this gateway has no such tunnel of this token: it was closed, or had no poll for long"
            )
        return tunnel


def _token_id(request: Request) -> str:
    principal: Principal = request.scope["loom.principal"]
    return principal.token.id


def _number(request: Request) -> int:
    text = request.query_params.get("n", "")
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise ProtocolMismatch(f"n is the number of a batch, from 1; this request has {text!r:.40}")
    return int(text)


async def _body(request: Request) -> bytes:
    """Return a request's body. Raise `TooLarge`, without reading further, once it exceeds `MAX_BATCH` bytes."""
    too_large = TooLarge(f"a body is over the limit of {MAX_BATCH} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BATCH:
        raise too_large
    pieces = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BATCH:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


def _size(buffers: Sequence[Buffer]) -> int:
    return sum(map(len, buffers))


async def _wait_for(event: asyncio.Event) -> None:
    """Wait until an event is set, for at most `POLL` seconds."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), POLL)
