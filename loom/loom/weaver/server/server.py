"""The weaver's server: threadlets connect over TCP, the gateway and the drivers over a unix socket."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable

from loom.process import tasks
from loom.weaver.server.callers import RequestConnection
from loom.weaver.server.threadlets import Peers, ThreadletLink
from loom.weaver.server.user_weaver import COMMIT_EVERY
from loom.weaver.server.users import Users

_log = logging.getLogger(__name__)


class Server:
    """A server of the users' weavers on two listening sockets.

    The server ends by itself after ``linger`` seconds without a gateway, a driver or a threadlet.
    """

    def __init__(self, users: Users, linger: float = math.inf) -> None:
        self.users = users
        self.peers = Peers()
        self._linger = linger
        self._last_peer_at = users.clock()
        self._listeners: list[asyncio.AbstractServer] = []

    async def start(self, tcp: socket.socket, unix: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        users, peers = self.users, self.peers
        self._listeners = [
            await loop.create_server(lambda: ThreadletLink(users, peers), sock=tcp, backlog=4096),
            await loop.create_unix_server(lambda: RequestConnection(users, peers), sock=unix),
        ]
        users.tick(users.clock())
        users.tasks.add(tasks.keep_running("tick", self._run_ticks))

    async def stop(self) -> None:
        """Commit what has come in, and close everything."""
        for listener in self._listeners:
            listener.close()
        self.users.close()
        self.users.tasks.cancel()
        self.peers.close()
        self.users.ended.set()

    async def _run_ticks(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_EVERY)
            now = self.users.clock()
            self.users.tick(now)
            if self.peers:
                self._last_peer_at = now
            elif now > self._last_peer_at + self._linger:
                _log.info("nobody has been here for %g s", self._linger)
                self.users.ended.set()


def monotonic_clock() -> Callable[[], float]:
    """Return a clock of seconds since the epoch that changes of the system's time do not affect."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()
