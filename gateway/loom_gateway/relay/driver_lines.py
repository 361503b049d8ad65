"""`DriverLines`, which lead from a gateway's clients to the drivers on its machine."""

from __future__ import annotations

import asyncio
import logging
import socket

from loom.errors import LoomError, ProtocolMismatch, SessionRestarted
from loom.process import tasks
from loom.wire.bodies import OpenSession
from loom.wire.handshake import Hello
from loom.wire.stream import unnumbered_frame
from loom_gateway.relay.links import DriverLink
from loom_gateway.sessions.driver_process import DriverProcess, NotOurDriver
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.session import SessionState, UserSession

logger = logging.getLogger(__name__)

EXIT_TIMEOUT = 5.0  # seconds that a driver's exit code has to arrive after its socket has closed


class DriverLines:
    """Connects clients to the drivers of a manager's sessions, and finds out why a driver has gone."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager

    async def greet(self, session: UserSession, hello: Hello, hello_frame: bytes, guest: str | None) -> DriverLink:
        """Connect to a session's driver, and wait for its answer to a hello.

        If the driver has died and left functions, a hello that resumes no stream is one for the next driver, too.

        Args:
            guest: the user, if the session is another user's.

        Raises:
            LoomError: there is no driver to connect to, and none comes.
        """
        while True:
            await self._manager.settled(session)
            if (link := await self._greet(session, hello, hello_frame, guest)) is not None:
                return link

    async def loss(self, session: UserSession, link: DriverLink) -> LoomError | None:
        """Return why a driver has closed a connection without a word.

        None: it has given up this connection for a later one of the same client.
        """
        return session.lost(link.driver) if await _await_exit(session, link.driver) else None

    def left(self, session: UserSession, gone: bool) -> None:
        """End a session that never opened, unless its client asks for it on another connection.

        Args:
            gone: whether the client that has left now did so by itself.
        """
        if session.state is SessionState.STARTING and not session.greeted:
            why = "its client left before it was open" if gone else "it could not be opened"
            tasks.run("end a session", self._manager.end(session, why))

    async def _greet(
        self, session: UserSession, hello: Hello, hello_frame: bytes, guest: str | None
    ) -> DriverLink | None:
        try:
            link = await self._connect(session, hello_frame, guest)
        except SessionRestarted:
            if hello.stream:
                raise
            return None
        try:
            link.answer = await link.next()
            anew = link.answer is None and link.error is None and not hello.stream
            if not (anew and await _await_exit(session, link.driver) and link.driver.leaves_functions):
                return link
        except BaseException:
            link.close()
            raise
        link.close()
        return None

    async def _connect(self, session: UserSession, hello_frame: bytes, guest: str | None) -> DriverLink:
        """Connect to a session's driver, and pass on the client's hello and, of a guest, the user."""
        if guest is not None and not session.driver.record.knows_users:
            raise ProtocolMismatch(
                f"session {session.name!r} is of an older Loom, whose driver would let a guest end it: ask "
                f"{session.user!r} to open a new one"
            )
        loop = asyncio.get_running_loop()
        sock, driver = socket.socket(socket.AF_UNIX), session.driver
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, driver.files.socket)
            # A driver with a user id of its own could lead its socket's name to another driver.
            driver.check_peer(sock)
            _, link = await loop.create_unix_connection(lambda: DriverLink(session.traffic), sock=sock)
            link.driver = driver
        except (OSError, NotOurDriver) as error:
            sock.close()
            if not await _await_exit(session, driver):
                await self._manager.end_unreachable(session, str(error))
            raise session.lost(driver) from None
        except BaseException:
            sock.close()
            raise
        opening = OpenSession(
            session.name, session.user, self._manager.weaver_key(session.user, session.name), guest
        )
        knows_users = driver.record.knows_users
        link.write(b"".join(unnumbered_frame(opening.message() if knows_users else opening.message_for_older())))
        link.write(hello_frame)
        return link


async def _await_exit(session: UserSession, driver: DriverProcess) -> bool:
    """Wait for a driver's exit code after its socket has closed. Return whether the driver has ended."""
    try:
        await asyncio.wait_for(driver.exited.wait(), EXIT_TIMEOUT)
    except asyncio.TimeoutError:
        logger.warning("session %s: the driver closed its socket but lives", session.name)
        return False
    return True
