"""Both ends of the connections on which processes watch others that they have not started: the driver tells deaths.

Monarch tells an actor that a mesh which it was sent has lost a process, unless the process dies in the moment in
which Monarch asks for its state (see `loom_gateway.driver.monarch.root_client`). So a process whose actors wait for
such a mesh asks the driver, which knows it from the process links.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from loom.errors import ProtocolMismatch
from loom.mutual_auth import Exchange
from loom.process.threads import keep_going
from loom.wire.bodies import ProcessesGone, Watch
from loom.wire.length_prefix import FrameSplitter
from loom.wire.messages import Kind
from loom_gateway.driver.process_link.link import (
    ATTEMPT,
    MAX_FRAME,
    MAX_GREETING,
    MOST_WATCHED,
    RETRY,
    Introduction,
    ProcessLinkAddress,
    answer_of,
    break_after,
    greeting,
    read_greeting,
)

MOST_MESHES = 1000  # proc meshes with lost processes that are remembered, the last ones

_READ = 64 << 10


class Watchers:
    """The dead processes of a driver, and the watchers. On the event loop."""

    def __init__(self) -> None:
        self._gone: dict[int, set[int]] = {}  # ranks by proc mesh, the mesh that lost one last at the end
        self._watched: dict[asyncio.StreamWriter, dict[int, None]] = {}  # proc meshes

    def gone(self, procs: int) -> list[int]:
        """Return the ranks of a proc mesh that are gone."""
        return sorted(self._gone.get(procs, ()))

    def lose(self, procs: int, rank: int, later: bool = True) -> None:
        """Tell those who watch a mesh that a process of it is gone, with ``later`` also those who do so later."""
        if later:
            self._gone[procs] = {*self._gone.pop(procs, ()), rank}
        if len(self._gone) > MOST_MESHES:
            del self._gone[next(iter(self._gone))]
        said = greeting(ProcessesGone("", procs, [rank]).message())
        for writer, watched in self._watched.items():
            if procs in watched:
                writer.write(said)

    async def serve(
        self, asked: Watch, exchange: Exchange, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer a process, which has shown the driver's key, until it goes away.

        Raises:
            ProtocolMismatch: it sends anything else than `Watch`.
        """
        watched = self._watched[writer] = {asked.procs: None}
        splitter = FrameSplitter(MAX_GREETING)
        try:
            writer.write(answer_of(exchange, self._answer(asked)))
            while data := await reader.read(_READ):
                for frame in splitter.feed(data):
                    message = read_greeting(frame)
                    if message.kind != Kind.WATCH:
                        raise ProtocolMismatch(f"a process that watches sends WATCH, not message {message.kind}")
                    another = Watch.from_body(message.body)
                    watched[another.procs] = None
                    if len(watched) > MOST_WATCHED:
                        del watched[next(iter(watched))]
                    writer.write(greeting(self._answer(another).message()))
        finally:
            del self._watched[writer]

    def close(self) -> None:
        """Cut off everyone."""
        for writer in list(self._watched):
            writer.transport.abort()

    def _answer(self, asked: Watch) -> ProcessesGone:
        return ProcessesGone("", asked.procs, self.gone(asked.procs))


logger = logging.getLogger(__name__)


class DriverWatch:
    """One connection to the driver, from when a proc mesh is watched, and another whenever that breaks.

    Args:
        lose: called with a proc mesh's id and a rank for each process that is gone, perhaps more than once. On the
            watch's thread.
    """

    def __init__(self, address: ProcessLinkAddress, lose: Callable[[int, int], object]) -> None:
        self._address = address
        self._lose = lose
        self._asking = threading.Lock()  # held to change what follows
        self._watched: dict[int, None] = {}
        self._driver: socket.socket | None = None  # once the driver has answered

    def watch(self, procs: int) -> None:
        """Be told of the processes of a proc mesh that are gone, now and later. Safe on any thread."""
        with self._asking:
            first = not self._watched
            self._watched[procs] = None
            if len(self._watched) > MOST_WATCHED:
                del self._watched[next(iter(self._watched))]
            if self._driver is not None:
                with contextlib.suppress(OSError):  # the next connection asks for all
                    self._driver.sendall(_asking(procs))
        if first:
            watching = "watch processes", self._keep
            threading.Thread(target=keep_going, args=watching, name="loom-watch", daemon=True).start()

    def _keep(self) -> None:
        """Stay connected. The agent of this process's link ends the process when the driver is gone."""
        while True:
            try:
                with socket.create_connection(self._address[:2], ATTEMPT) as driver:
                    self._serve(driver)
            except (OSError, ProtocolMismatch) as error:
                logger.info("the connection to the driver that tells which processes are gone: %s", error)
            time.sleep(RETRY)

    def _serve(self, driver: socket.socket) -> None:
        """Hear the driver until it closes the connection."""
        first = next(iter(self._watched))
        introduced: Introduction[ProcessesGone] = Introduction(self._address.key, Watch("", "", first))
        while introduced.answer is None:
            driver.sendall(introduced.feed(_some(driver)))
        driver.settimeout(None)
        break_after(driver, self._address.patience / 3)
        self._heed(introduced.answer)
        try:
            with self._asking:
                self._driver = driver
                driver.sendall(b"".join(_asking(procs) for procs in self._watched if procs != first))
            splitter = FrameSplitter(MAX_FRAME)
            data = introduced.rest
            while True:
                for frame in splitter.feed(data):
                    message = read_greeting(frame)
                    if message.kind != Kind.PROCESSES_GONE:
                        raise ProtocolMismatch(f"message {message.kind}, not PROCESSES_GONE")
                    self._heed(ProcessesGone.from_body(message.body))
                data = _some(driver)
        finally:
            with self._asking:
                self._driver = None

    def _heed(self, answer: ProcessesGone) -> None:
        for rank in answer.ranks:
            self._lose(answer.procs, rank)


def _asking(procs: int) -> bytes:
    return greeting(Watch("", "", procs).message())


def _some(driver: socket.socket) -> bytes:
    data = driver.recv(64 << 10)
    if not data:
        raise ConnectionResetError("the driver closed it")
    return data
