"""The WebSocket endpoint: authenticates, finds or starts the session's driver, and relays frames.

After the first frame, nothing is decoded: a WebSocket message is a frame, and on the unix socket the same bytes
follow their length. The endpoint is a plain ASGI application and not a FastAPI route, because it is on the path of
every call.

A gateway that was told to stop refuses new sessions, notifies clients, and lets sessions finish (`DrainState`).
Kubernetes sends SIGTERM to a pod, and SIGKILL some time later. In between, a gateway with ``--drain`` serves its
living sessions, and ``/readyz`` tells the Service to send no new ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

from starlette.types import Receive, Scope, Send

from loom.errors import ConnectionLost, GatewayDraining, LoomError, ProtocolMismatch
from loom.wire.bodies import Notice
from loom.wire.frames import decode_frame, pack_texts
from loom.wire.handshake import Hello, Welcome, check_protocol, refusal
from loom.wire.messages import Kind
from loom.wire.stream import unnumbered_frame
from loom_gateway.access.control import AccessControl, scope_of
from loom_gateway.access.sessions import Principal
from loom_gateway.relay.driver_lines import DriverLines
from loom_gateway.relay.links import ClientSocket, DriverLink
from loom_gateway.sessions.directory import SessionDirectory
from loom_gateway.sessions.session import UserSession

SendFrame: TypeAlias = Callable[..., None]  # sends a client a frame, given in pieces


class DrainState:
    """The state of draining, and the clients to notify."""

    def __init__(self, manager: SessionDirectory) -> None:
        self._manager = manager
        self._clients: set[SendFrame] = set()
        self._until: float | None = None  # None until draining begins

    @property
    def begun(self) -> bool:
        return self._until is not None

    @property
    def _left(self) -> float:
        """The seconds until the gateway ends."""
        assert self._until is not None
        return max(0.0, self._until - time.monotonic())

    def begin(self, seconds: float) -> None:
        """Refuse new sessions, and notify every client that the gateway ends. A second call does nothing."""
        if self._until is not None:
            return
        self._until = time.monotonic() + seconds
        logger.info("told to stop: %d sessions, %g s", len(self._manager.sessions()), seconds)
        for send_frame in list(self._clients):
            self._notify(send_frame)

    async def over(self) -> None:
        """Wait until no session is left, or until the seconds given to `begin` are over."""
        while sessions := self._manager.awaited():
            try:
                await asyncio.wait_for(sessions[0].over.wait(), self._left)
            except asyncio.TimeoutError:
                return

    def check_open(self) -> None:
        """Raise `GatewayDraining` if no new session may begin."""
        if self._until is not None:
            raise GatewayDraining(
                f"the gateway was told to stop, ends in {self._left:.0f} s and takes no new sessions: connect "
                f"again when the next one runs"
            )

    @contextmanager
    def notified(self, send_frame: SendFrame) -> Iterator[None]:
        """Notify a connected client when the gateway is told to stop."""
        self._clients.add(send_frame)
        if self._until is not None:
            self._notify(send_frame)
        try:
            yield
        finally:
            self._clients.discard(send_frame)

    def _notify(self, send_frame: SendFrame) -> None:
        details = {"seconds": self._left, "sessions_end": self._manager.end_sessions}
        # Unnumbered, because it does not come from the driver and need not be repeated to a client that comes back.
        send_frame(*unnumbered_frame(Notice("gateway_draining").message(parts=[pack_texts(details)])))


logger = logging.getLogger(__name__)

HELLO_TIMEOUT = 10.0  # seconds that a client has to send its hello
DISCONNECT_TIMEOUT = 5.0  # seconds that a client has to receive the reason for its disconnection

MAX_HELLO = 64 << 10
"""Bytes of a handshake's frame, of either side: until it is over, nothing larger is kept or decoded."""

CLOSE_NORMAL = 1000
CLOSE_REFUSED = 4000
CLOSE_SUPERSEDED = 4001


class Relay:
    """The ASGI application of the path ``/ws/v1``. ``lines`` lead to the sessions' drivers."""

    def __init__(
        self,
        manager: SessionDirectory,
        lines: DriverLines,
        access: AccessControl,
        draining: DrainState,
    ) -> None:
        self._manager = manager
        self._access = access
        self._draining = draining
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        await send({"type": "websocket.accept"})
        principal: Principal = scope["loom.principal"]
        socket: ClientSocket = scope["loom.socket"]
        session: UserSession | None = None
        link: DriverLink | None = None
        try:
            with cancelled_by(socket.gone):
                hello_frame = await _first_frame(receive)
                if hello_frame is None:
                    return
                hello = read_hello(hello_frame)
                session = await self._access.check_hello(principal, hello)
                session = session or await self._open(principal, hello.opening)
                session.greeted += 1
                link = await self._lines.greet(session, hello, hello_frame, self._access.guest(principal, session))
                if not await self._is_welcome(session, link, send):
                    return
            await self._relay(session, link, hello, principal, socket, receive, send)
        except LoomError as error:
            await _refuse(send, error)
        except asyncio.CancelledError:
            if not socket.gone.done():
                raise
        finally:
            if link is not None:
                link.close()
            if session is not None:
                session.greeted -= 1
                self._lines.left(session, socket.gone.done())

    async def _open(self, principal: Principal, opening: str) -> UserSession:
        """Return a new session, or the one that an earlier hello has opened whose answer did not arrive."""
        user = principal.user
        opened = self._manager.opened_by(user, opening)
        if opened is not None:
            return opened
        self._draining.check_open()
        with self._access.opening(principal):
            return await self._manager.create(principal.token.id, user, opening)

    async def _is_welcome(self, session: UserSession, link: DriverLink, send: Send) -> bool:
        """Pass on the driver's answer to the hello. Return whether it accepts the client."""
        first = link.answer
        if link.error is not None:
            await _refuse(send, link.error)
        elif first is None:
            await self._report_loss(session, link, send)
        else:
            await send({"type": "websocket.send", "bytes": first})
            answer = decode_frame(first).messages[0]
            if answer.kind == Kind.WELCOME:
                welcome = Welcome.from_body(answer.body)
                link.stream = welcome.stream
                if not welcome.linger:
                    await self._manager.persist(session)
                return True
            await send({"type": "websocket.close", "code": CLOSE_REFUSED})
        return False

    async def _relay(
        self,
        session: UserSession,
        link: DriverLink,
        hello: Hello,
        principal: Principal,
        socket: ClientSocket,
        receive: Receive,
        send: Send,
    ) -> None:
        """Relay frames until either side ends the connection."""
        if hello.mode == "drive" and principal.user == session.user:
            await self._manager.drive(session, principal.token.id)
        # From here on the two call each other, and this task only waits.
        socket.relay_to(link)
        link.relay_to(socket)
        farewell = asyncio.ensure_future(self._report_end(session, link, send))

        async def disconnect(error: LoomError) -> None:
            farewell.cancel()
            link.close()
            try:
                await asyncio.wait_for(_refuse(send, error), DISCONNECT_TIMEOUT)
            except asyncio.TimeoutError:  # the client does not even receive the reason
                socket.abort()

        with ExitStack() as connected:
            connected.callback(farewell.cancel)
            connected.enter_context(self._access.connected(principal, disconnect, session, scope_of(hello)))
            if not hello.lane:  # the second connection of a client is not counted again
                connected.enter_context(self._manager.client(session))
                connected.enter_context(self._access.inside(principal, session, hello))
                if "draining" in hello.capabilities:
                    connected.enter_context(self._draining.notified(socket.send_frame))
            while (await receive())["type"] != "websocket.disconnect":
                pass  # a text message, which Loom's clients never send

    async def _report_end(self, session: UserSession, link: DriverLink, send: Send) -> None:
        """Wait until the driver has closed the connection, and tell the client why."""
        await link.closed
        last = link.last_word
        if link.error is not None:
            await _refuse(send, link.error)
        elif last == Kind.ENDED:
            session.begin_to_end()
            await send({"type": "websocket.close", "code": CLOSE_NORMAL})
        elif last == Kind.REFUSE:
            await send({"type": "websocket.close", "code": CLOSE_REFUSED})
        else:
            await self._report_loss(session, link, send)

    async def _report_loss(self, session: UserSession, link: DriverLink, send: Send) -> None:
        if (error := await self._lines.loss(session, link)) is not None:
            await _refuse(send, error)
        else:
            await send({"type": "websocket.close", "code": CLOSE_SUPERSEDED})


@contextmanager
def cancelled_by(gone: asyncio.Future[None]) -> Iterator[None]:
    """Cancel the current task if a client leaves meanwhile."""
    task = asyncio.current_task()
    assert task is not None

    def cancel(_: object) -> None:
        task.cancel()

    gone.add_done_callback(cancel)
    try:
        yield
    finally:
        gone.remove_done_callback(cancel)


async def _first_frame(receive: Receive) -> bytes | None:
    """Return the client's first frame; None if it has gone."""
    try:
        event = await asyncio.wait_for(receive(), HELLO_TIMEOUT)
    except asyncio.TimeoutError:
        # Its network may have been away: another attempt is worth it.
        raise ConnectionLost(f"the client's hello has not come within {HELLO_TIMEOUT:g} s") from None
    if event["type"] == "websocket.disconnect":
        return None
    frame: bytes | None = event.get("bytes")
    if not frame:
        raise ProtocolMismatch("a client begins with a binary message; this one began with text")
    return frame


def read_hello(frame: bytes) -> Hello:
    """Return the hello in a client's first frame. Raise `ProtocolMismatch` if it is none."""
    if len(frame) > MAX_HELLO:
        raise ProtocolMismatch(f"a hello of {len(frame)} bytes is over the limit of {MAX_HELLO}")
    messages = decode_frame(frame).messages
    if len(messages) != 1 or messages[0].kind != Kind.HELLO:
        raise ProtocolMismatch("a client begins with HELLO; this one began with something else")
    hello = Hello.from_body(messages[0].body)
    check_protocol(hello.protocol, ours="gateway", theirs="client")
    return hello


async def _refuse(send: Send, error: LoomError) -> None:
    """Tell the client why the connection ends, and end it."""
    await send({"type": "websocket.send", "bytes": b"".join(unnumbered_frame(refusal(error)))})
    await send({"type": "websocket.close", "code": CLOSE_REFUSED, "reason": error.code})
