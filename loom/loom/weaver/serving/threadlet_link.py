"""The weaver's end of a threadlet's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import psutil

from loom.control.framing import MAX_FRAME, MAX_HELLO, Splitter
from loom.errors import ProtocolMismatch
from loom.weaver.outbox import Peer
from loom.weaver.replicas import Replica
from loom.weaver.serving.connection import Connection
from loom.weaver.serving.processes import find_process
from loom.weaver.weaver import Weaver

HELLO_WITHIN = 10.0
"""Seconds that a threadlet has to send its hello with the key."""


class ThreadletServer(Protocol):
    """The part of the server that a `ThreadletLink` uses."""

    weaver: Weaver
    clock: Callable[[], float]

    def add_link(self, link: ThreadletLink) -> None: ...

    def drop_link(self, link: ThreadletLink, replica: Replica | None, process: psutil.Process | None) -> None: ...

    def plan_commit(self) -> None: ...


class ThreadletLink(Connection, Peer):
    """The connection of a threadlet."""

    def __init__(self, server: ThreadletServer) -> None:
        super().__init__(MAX_HELLO)
        self.server = server
        self.process: psutil.Process | None = None
        """The process at the other end, if it is on this host."""
        self._introduced: Replica | None = None
        """The replica of the hello, which `_introduce` handles once."""
        self._hello_timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.server.add_link(self)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_WITHIN, self.close)

    def data_received(self, data: bytes) -> None:
        server = self.server
        try:
            frames = self.splitter.feed(data)
            if frames:
                server.weaver.receive(self, frames, server.clock())
        except ProtocolMismatch as error:
            server.weaver.refuse(self, error.code, str(error))
            self.splitter = Splitter(0)
            self.transport.pause_reading()
        if self._introduced is None and self.replica is not None:
            self._introduce(self.replica)
        server.plan_commit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hello_timer.cancel()
        self.server.drop_link(self, self.replica, self.process)

    def _introduce(self, replica: Replica) -> None:
        self._introduced = replica
        self.splitter.limit = MAX_FRAME
        self._hello_timer.cancel()
        ours, theirs = self.transport.get_extra_info("sockname"), self.transport.get_extra_info("peername")
        if ours and theirs and ours[0] == theirs[0]:
            self.process = find_process(replica.pid)
