"""The driver's socket: opens the session for the first client, and serves its clients until the session ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable

from loom.errors import DriverUnavailable
from loom.process import tasks
from loom.process.threads import keep_going
from loom.wire.bodies import OpenSession
from loom.wire.handshake import Hello, check_protocol
from loom_gateway.driver.clients.connection import ClientConnection
from loom_gateway.driver.lifetime import Lifetime
from loom_gateway.driver.session.session import DrivenSession
from loom_gateway.sessions.peer import UnixPeer

logger = logging.getLogger(__name__)


class DriverServer:
    """Serves one session to its clients.

    It is created on the driver's event loop, which does everything that is not on the path of a call.

    Args:
        new_session: opens the session that a gateway names. Called on the first client's thread.
        gateway_uid: the user id of the gateway, whose connections alone are accepted.
    """

    def __init__(
        self,
        listener: socket.socket,
        lifetime: Lifetime,
        new_session: Callable[[OpenSession], DrivenSession],
        gateway_uid: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._gateway_uid = gateway_uid
        self._lifetime = lifetime
        self._new_session = new_session
        self._session: DrivenSession | None = None
        self._opening = threading.Lock()  # held while the first client opens the session
        self._ending: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()  # set when the session is over and its meshes have been stopped
        lifetime.start(self._loop, self._end)
        accepting = "accept clients", self._accept
        threading.Thread(target=keep_going, args=accepting, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return  # the listener was closed
                raise  # such as too many open files, which passes
            peer = UnixPeer.of(sock)
            if peer.uid != self._gateway_uid:
                logger.warning("process %d of user id %d is no gateway, and is sent away", peer.pid, peer.uid)
                sock.close()
                continue
            connection = ClientConnection(self._open, self._describe, sock)
            threading.Thread(target=connection.run, name="client", daemon=True).start()

    def _open(self, hello: Hello, opening: OpenSession) -> DrivenSession:
        """Return the session. Attach to the workers first if this is the first client. On a client's thread."""
        check_protocol(hello.protocol, ours="driver", theirs="client")
        self._lifetime.check_goes_on(opening.session)
        with self._opening:
            if self._session is None:
                self._session = self._new_session(opening)
            self._session.weaver.key = opening.weaver_key
            return self._session

    def _describe(self, subject: str) -> bytes:
        """Return a description of the session as JSON. On a connection's thread."""
        session = self._session
        if session is None:
            raise DriverUnavailable("the session is starting")
        return session.describe(subject)

    def _end(self, reason: str) -> None:
        """Stop the session's meshes, tell the clients, and set `ended`. On the event loop."""
        if self._ending is None:
            self._lifetime.ends(reason)
            self._ending = tasks.run("end the session", self._close(reason))

    async def _close(self, reason: str) -> None:
        try:
            if self._session is not None:
                await self._session.close(reason)
        finally:  # whatever goes wrong, the process ends
            self._listener.close()
            self.ended.set()
