"""`RankAgent`: the actor that runs commands in the process of a rank and connects to ports of its host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from loom.actor import Actor, endpoint
from loom_gateway.driver.ranks.command import Command, Spec
from loom_gateway.driver.ranks.connection import LocalConnection


class RankAgent(Actor):
    """Works beside the process's other actors, in a thread of its own, as its endpoints are plain functions.

    None of them waits for a program or for the network. The driver chooses the handles of what goes on.
    """

    def __init__(self, port: Any) -> None:
        self._port = port
        self._running: dict[str, Command | LocalConnection] = {}
        self._starting = threading.Lock()  # held until what starts is in `_running`: it may end sooner

    @endpoint
    def run(self, handle: str, spec: Spec) -> str:
        """Start a command; return why it cannot be started, or nothing."""
        return self._begin(handle, lambda: Command(handle, self._port, spec, self._ended))

    @endpoint
    def connect(self, handle: str, number: int) -> str:
        """Connect to a port of this host; return why that is impossible, or nothing."""
        return self._begin(handle, lambda: LocalConnection(handle, self._port, number, self._ended))

    @endpoint
    def write(self, handle: str, data: bytes | None) -> None:
        """Write input to a command or connection; None closes the input."""
        if (running := self._running.get(handle)) is not None:
            running.conduit.write(data)

    @endpoint
    def grant(self, handle: str, size: int) -> None:
        """Let so many more bytes of output come."""
        if (running := self._running.get(handle)) is not None:
            running.conduit.grant(size)

    @endpoint
    def signal(self, handle: str, number: int) -> None:
        if (running := self._running.get(handle)) is not None:
            running.signal(number)

    @endpoint
    def resize(self, handle: str, rows: int, columns: int) -> None:
        if (running := self._running.get(handle)) is not None:
            running.resize(rows, columns)

    @endpoint
    def end(self, handle: str) -> None:
        """End a command, with what it has started, or a connection."""
        if (running := self._running.get(handle)) is not None:
            running.end()

    def _begin(self, handle: str, start: Callable[[], Command | LocalConnection]) -> str:
        try:
            with self._starting:
                self._running[handle] = start()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _ended(self, handle: str) -> None:
        with self._starting:
            self._running.pop(handle, None)
