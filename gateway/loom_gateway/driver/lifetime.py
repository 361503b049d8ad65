"""The lifetime of a driver.

A spare driver ends with its gateway. A driver with a session outlives the gateway: it ends on a signal, or after
the linger time without a client. It measures the linger time itself, because no gateway may ever come back. Drivers
with a session end with their gateway only if the gateway ends with its own parent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from loom.errors import UnknownSession
from loom.process.lifeline import when_parent_ends
from loom_gateway.sessions.driver_files import DriverFiles, LastWords

logger = logging.getLogger(__name__)

LOOK_EVERY = 60.0  # seconds between two checks that clients can find the driver

SHORTEST_TOLD = 1e-3  # seconds of linger time that a client is told if there is none, because 0 means forever


class Lifetime:
    """Ends the driver of one session when it is no longer needed.

    Args:
        linger: seconds without a client after which a session ends.
        exit_with_gateway: whether the driver ends with its gateway even if it has a session.
        remove_folder: whether the folder of the files is removed when the gateway ends.
    """

    def __init__(
        self, files: DriverFiles, linger: float, exit_with_gateway: bool = False, remove_folder: bool = False
    ) -> None:
        self._files = files
        self._linger = linger
        self._exit_with_gateway = exit_with_gateway
        self._remove_folder = remove_folder
        self._opened = False  # whether the driver has a session
        self._persist = False  # whether the session lingers forever
        self._why = ""  # empty until the session ends
        self._clients: set[object] = set()
        self._timer: asyncio.TimerHandle | None = None  # runs while no client is connected
        self._loop: asyncio.AbstractEventLoop
        self.end: Callable[[str], object]  # ends the session for a reason; on the event loop
        self._lock = threading.Lock()  # makes opening the session and vanishing exclusive

    def watch_gateway(self) -> None:
        """Watch standard input on a separate thread: it is closed when the gateway ends."""
        when_parent_ends(self._gateway_ended)

    def _gateway_ended(self) -> None:
        with self._lock:
            if self._exit_with_gateway or not self._opened:
                self._vanish()
        logger.info("the gateway is gone; the session lives on")

    def _vanish(self) -> NoReturn:
        """End at once and remove the files. The lifelines end the session's processes."""
        if self._remove_folder:
            shutil.rmtree(os.path.dirname(self._files.base), ignore_errors=True)
        self._files.remove(log=True)
        os._exit(1)

    def start(self, loop: asyncio.AbstractEventLoop, end: Callable[[str], object]) -> None:
        """Start to measure the linger time. After it, ``end`` is called on the loop with the reason."""
        self._loop = loop
        self.end = end

    def opened(self, persist: bool) -> float:
        """Note that the session is open. Return its linger time in seconds, 0 for forever. Safe on any thread."""
        with self._lock:
            self._opened = True
        self._persist = self._persist or persist
        return 0.0 if self._persist else max(self._linger, SHORTEST_TOLD)

    def client_came(self, client: object) -> None:
        """Note that a client is connected. Safe on any thread."""
        self._loop.call_soon_threadsafe(self._came, client)

    def client_left(self, client: object) -> None:
        """Note that a connection is gone, whether it became a client or not. Safe on any thread."""
        self._loop.call_soon_threadsafe(self._left, client)

    def _came(self, client: object) -> None:
        self._clients.add(client)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _left(self, client: object) -> None:
        self._clients.discard(client)
        if self._opened and not self._clients and not self._persist and self._timer is None:
            self._timer = self._loop.call_later(self._linger, self.end, f"no client for {self._linger:g} s")

    def watch_socket(self) -> None:
        """End the session once no client is there, and none can come: its socket was removed. On the loop."""
        if self._clients or os.path.lexists(self._files.socket):
            self._loop.call_later(LOOK_EVERY, self.watch_socket)
        else:
            self.end("its socket was removed, and nobody could reach it any more")

    def ends(self, reason: str) -> None:
        """Note why the driver ends. The first reason stays."""
        self._files.write_last_words(LastWords(reason))
        self._why = reason

    def check_goes_on(self, session: str) -> None:
        """Raise `UnknownSession` if the session is ending. Safe on any thread."""
        if self._why:
            raise UnknownSession(f"session {session!r} is ending: {self._why}. Open a new one with loom.connect.")

    def end_on_signal(self, number: signal.Signals) -> None:
        """End because of a signal, with the gateway's reason if the gateway sent it. On the event loop."""
        self.end(self._files.read_last_words().reason or f"the driver was told to stop ({number.name})")

    def over(self) -> None:
        if not self._remove_folder:  # else no gateway reads the note, and the folder may be disappearing
            self._files.write_last_words(LastWords(exit_code=0))
