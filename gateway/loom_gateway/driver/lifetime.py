"""When a driver ends by itself.

A spare ends with its gateway. A driver that has a session does not: it lives until it is told to end, or until it
has been without a client for the linger time, which it counts itself, because no gateway may ever come back. Only
where the gateway was told to end with its own parent do drivers end with it.
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

SHORTEST_TOLD = 1e-3
"""Seconds of linger time that a client is told of where there is none: 0 stands for ever."""


class Lifetime:
    """Ends the driver of one session when nobody needs it any more.

    Args:
        files: of this driver.
        linger: seconds without a client after which a session ends.
        exit_with_gateway: whether the driver ends with its gateway even where it has a session.
        remove_folder: whether the folder of the files goes with the gateway.
    """

    def __init__(
        self, files: DriverFiles, linger: float, exit_with_gateway: bool = False, remove_folder: bool = False
    ) -> None:
        self._files = files
        self._linger = linger
        self._exit_with_gateway = exit_with_gateway
        self._remove_folder = remove_folder
        self._opened = False
        self._persist = False
        self._why = ""
        self._clients: set[object] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop
        self._end: Callable[[str], object]
        self._lock = threading.Lock()

    def watch_gateway(self) -> None:
        """Watch standard input, whose other end the gateway holds, on a thread of its own."""
        when_parent_ends(self._gateway_ended)

    def _gateway_ended(self) -> None:
        with self._lock:
            if self._exit_with_gateway or not self._opened:
                self._vanish()
        logger.info("the gateway is gone; the session lives on")

    def _vanish(self) -> NoReturn:
        """End at once and leave nothing behind. The session's processes hold on to this one and end, too."""
        if self._remove_folder:
            shutil.rmtree(os.path.dirname(self._files.base), ignore_errors=True)
        self._files.remove(log=True)
        os._exit(1)

    def start(self, loop: asyncio.AbstractEventLoop, end: Callable[[str], object]) -> None:
        """Begin to count; ``end`` is called on the loop, with the reason, when the session has lingered enough."""
        self._loop = loop
        self._end = end

    def opened(self, persist: bool) -> float:
        """Note that the session is open; return for how many seconds it lingers, 0 for ever. On any thread.

        Args:
            persist: whether it is to linger for ever from now on.
        """
        with self._lock:
            self._opened = True
        self._persist = self._persist or persist
        return 0.0 if self._persist else max(self._linger, SHORTEST_TOLD)

    def client_came(self, client: object) -> None:
        """Note that a client is connected. On any thread."""
        self._loop.call_soon_threadsafe(self._came, client)

    def client_left(self, client: object) -> None:
        """Note that a client, if it was one, is gone. On any thread."""
        self._loop.call_soon_threadsafe(self._left, client)

    def _came(self, client: object) -> None:
        self._clients.add(client)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _left(self, client: object) -> None:
        self._clients.discard(client)
        if self._opened and not self._clients and not self._persist and self._timer is None:
            self._timer = self._loop.call_later(self._linger, self._end, f"no client for {self._linger:g} s")

    def ends(self, reason: str) -> None:
        """Note why the driver ends; what was noted first stays."""
        self._files.say(LastWords(reason))
        self._why = reason

    def check_goes_on(self, session: str) -> None:
        """Raise `UnknownSession` where the session is ending. On any thread."""
        if self._why:
            raise UnknownSession(f"session {session!r} is ending: {self._why}. Open a new one with loom.connect.")

    def told_to_end(self, number: signal.Signals) -> None:
        """End because of a signal: for the reason that the gateway has noted, if it sent it. On the loop."""
        self._end(self._files.read_last_words().reason or f"the driver was told to stop ({number.name})")

    def over(self) -> None:
        """Note that the driver has come to its own end."""
        if not self._remove_folder:  # else nobody will read it, and the folder may be going just now
            self._files.say(LastWords(exit_code=0))
