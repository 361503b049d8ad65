"""This process's watch over processes that it has not started: the driver tells which are gone."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from loom.errors import ProtocolMismatch
from loom.process.threads import keep_going
from loom.wire.bodies import ProcessesGone, Watch
from loom.wire.framing import FrameSplitter
from loom.wire.messages import Kind
from loom_gateway.driver.lifeline.introduction import Introduction
from loom_gateway.driver.lifeline.line import MAX_FRAME, MOST_WATCHED, LifelineAddress, greeting, read_greeting
from loom_gateway.driver.lifeline.silence import ATTEMPT, RETRY, break_after

logger = logging.getLogger(__name__)


class DriverWatch:
    """One connection to the driver, from when a proc mesh is watched, and another whenever that breaks.

    Args:
        lose: called with a proc mesh's id and a rank for each process that is gone, perhaps more than once. On the
            watch's thread.
    """

    def __init__(self, address: LifelineAddress, lose: Callable[[int, int], object]) -> None:
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
        """Stay connected. The agent of this process's lifeline ends the process when the driver is gone."""
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
