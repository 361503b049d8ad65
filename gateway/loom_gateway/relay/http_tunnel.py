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
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from loom.errors import ConnectionLost, ProtocolMismatch, TooLarge
from loom.wire.length_prefix import CONTENT_TYPE, ENDED_HEADER, LENGTH, MAX_BATCH, TUNNELS, split_batch
from loom.wire.messages import Buffer
from loom_gateway.access.budgets import Budget, Budgets
from loom_gateway.access.sessions import Principal
from loom_gateway.relay.endpoint import MAX_HELLO
from loom_gateway.relay.links import MESSAGES, DriverLink, RelayTurns
from loom_gateway.session_hosts.other_gateways import OtherGateways, TunnelRequest

logger = logging.getLogger(__name__)

POLL = 25.0  # the longest time in seconds to hold back an answer: ingresses cut requests that take 30 or 60 s
IDLE = 60.0  # seconds without a poll after which a client counts as gone

BATCH = 2 << 20
"""Bytes of a batch, unless one frame is larger. Reading from the driver pauses when as many bytes wait."""

_UNCACHED = {"Cache-Control": "no-store, no-transform"}


class Tunnel:
    """One client's tunnel. The relay uses it like a WebSocket: `receive`, `send` and `relay_to`.

    Args:
        idle: seconds without a poll after which it closes itself.
        on_close: called when it is closed.
        user: whose tunnel it is.
        answers: the budget of what waits for the user's polls. Nothing is read from the driver while it is full.
        turns: the turns in which the frames of a batch are passed on.
    """

    def __init__(
        self,
        idle: float,
        on_close: Callable[[], object],
        user: str = "",
        answers: Budget | None = None,
        turns: RelayTurns | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.gone = self._loop.create_future()
        self._events: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
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
        self._user = user
        self._answers = answers or Budgets.of().answers
        self._turns = turns or RelayTurns()
        self._passing = asyncio.Lock()  # held while a batch is passed on
        self._counted = 0  # bytes of the budget: of `_frames` and `_batch`
        self._waits_for_room = False  # whether the budget is full
        self._closed = False
        self._closing = self._loop.call_later(idle, self.close)  # fires after `idle` seconds

    async def receive(self) -> MutableMapping[str, Any]:
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
        self._count()
        self._has_answer.set()
        self._read_if_taken()

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
            # Something on the way has answered in the gateway's place: the client connects anew, and resumes.
            raise ConnectionLost(f"batch {number} came where batch {self._taken + 1} had to come")
        frames = split_batch(data)
        if number == self._taken + 1:
            await _wait_for(self._room)
        async with self._passing:
            if number == self._taken + 1 and self._room.is_set():  # a repeated request may have delivered it
                self._taken = number
                try:
                    await self._pass_on(frames, len(data))
                except ProtocolMismatch:
                    self.end()  # the driver may have got a part
                    raise
        return self._taken

    async def _pass_on(self, frames: Iterator[memoryview], size: int) -> None:
        if self._link is not None:
            for number, frame in enumerate(frames, 1):
                self._link.write(frame)
                if number % MESSAGES == 0:
                    await self._turns.turn(self._user)
        elif not self._ended and size:
            if size > MAX_HELLO:
                raise TooLarge(f"before it is welcomed, a client sends {MAX_HELLO} bytes at most, not {size}")
            self._room.clear()  # until the driver has welcomed the client
            for frame in frames:
                self._events.put_nowait({"type": "websocket.receive", "bytes": bytes(frame)})

    def _count(self) -> None:
        """Count for the user what waits for polls."""
        size = self._waiting_bytes + len(self._batch)
        if size > self._counted:
            self._answers.add(self._user, size - self._counted)
        else:
            self._answers.give_back(self._user, self._counted - size)
        self._counted = size

    def _read_if_taken(self) -> None:
        """Read from the driver while the client takes what comes, and the user's tunnels have room for it."""
        if self._link is None:
            return
        full = bool(self._counted) and self._answers.is_full(self._user)
        if full and not self._waits_for_room:
            self._waits_for_room = True
            self._answers.when_room(self._user, self._has_room)
        if full or self._waiting_bytes >= BATCH:
            self._link.pause_reading()
        else:
            self._link.resume_reading()

    def _has_room(self) -> None:
        self._waits_for_room = False
        self._read_if_taken()

    async def poll(self, number: int) -> tuple[bytes, bool]:
        """Return a batch by number, and whether it is the last. It is empty after `POLL` seconds without frames."""
        if number not in (self._number, self._number + 1):
            raise ConnectionLost(f"batch {number} was asked for; the last one is {self._number}")
        with self._attended():
            if number == self._number + 1:
                self._batch = b""
                self._count()
                await _wait_for(self._has_answer)
            if number == self._number + 1 and self._frames:  # no concurrent poll has made it meanwhile
                self._number = number
                self._batch = self._next_batch()
                self._count()
                self._read_if_taken()
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
        self._batch, self._waiting_bytes = b"", 0
        self._count()
        self._on_close()


class Tunnels:
    """The tunnels of a gateway, and their routes.

    Args:
        others: the gateways that have the other tunnels whose requests come here.
    """

    def __init__(
        self,
        relay: ASGIApp,
        idle: float = IDLE,
        budgets: Budgets | None = None,
        others: OtherGateways | None = None,
    ) -> None:
        self._others = others
        if others is not None:
            others.answer = self._answer
        self._relay = relay
        self._idle = idle
        self._budgets = budgets or Budgets.of()
        self._turns = RelayTurns()
        self._tunnels: dict[str, tuple[str, Tunnel]] = {}  # with the id of the client's token
        self._tasks: set[asyncio.Task[None]] = set()
        self.routes = [
            Route(TUNNELS, self._open, methods=["POST"]),
            Route(TUNNELS + "/{tunnel}", partial(self._asked, "close"), methods=["DELETE"]),
            Route(TUNNELS + "/{tunnel}/up", partial(self._asked, "up"), methods=["POST"]),
            Route(TUNNELS + "/{tunnel}/down", partial(self._asked, "down"), methods=["GET"]),
        ]

    def close(self) -> None:
        """End every tunnel. A poll that is under way is answered with the frames that have arrived."""
        for _, tunnel in list(self._tunnels.values()):
            tunnel.end()

    async def _open(self, request: Request) -> Response:
        owner = _token_id(request)
        user = request.scope["loom.principal"].user
        self._budgets.tunnels.take(user)
        name = secrets.token_urlsafe(24) if self._others is None else self._others.new_name()
        tunnel = Tunnel(self._idle, partial(self._gone, name, user), user, self._budgets.answers, self._turns)
        self._tunnels[name] = owner, tunnel
        task = asyncio.ensure_future(self._serve(request, tunnel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return JSONResponse({"tunnel": name, "poll_seconds": POLL}, 201, _UNCACHED)

    def _gone(self, name: str, user: str) -> None:
        if self._tunnels.pop(name, None) is not None:
            self._budgets.tunnels.give_back(user)

    async def _serve(self, request: Request, tunnel: Tunnel) -> None:
        scope = {**request.scope, "type": "websocket", "loom.socket": tunnel}
        try:
            await self._relay(scope, tunnel.receive, tunnel.send)
        except Exception:
            logger.exception("an HTTP tunnel broke")
        finally:
            tunnel.end()

    async def _asked(self, kind: str, request: Request) -> Response:
        name, token = request.path_params["tunnel"], _token_id(request)
        place = None if self._others is None else self._others.place_of(name)
        if place is None:
            self._find(name, token)  # before its body is read
        asked = TunnelRequest(kind, name, token, 0 if kind == "close" else _number(request))
        try:
            data = await _body(request)
        except ClientDisconnect:
            return Response()  # the client is gone, so nothing receives this
        if self._others is None or place is None:
            return await self._answer(asked, data)
        return await self._others.ask(place, asked, data)

    async def _answer(self, asked: TunnelRequest, data: bytes) -> Response:
        tunnel = self._find(asked.tunnel, asked.token)
        if asked.kind == "up":
            return JSONResponse({"taken": await tunnel.take(asked.number, data)}, headers=_UNCACHED)
        if asked.kind == "down":
            data, ended = await tunnel.poll(asked.number)
            headers = _UNCACHED | ({ENDED_HEADER: "1"} if ended else {})
            return Response(data, headers=headers, media_type=CONTENT_TYPE)
        tunnel.close()
        return Response(status_code=204, headers=_UNCACHED)

    def _find(self, name: str, token: str) -> Tunnel:
        owner, tunnel = self._tunnels.get(name, (None, None))
        # Another token gets the answer for an unknown tunnel, so that it learns nothing.
        if tunnel is None or owner != token:
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
