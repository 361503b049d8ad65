"""The lifetime of a driver.

A spare driver ends with its gateway. A driver with a session outlives the gateway: it ends on a signal, or when
nothing has kept the session alive for the linger time: no client, no run or call under way, and no replica that
makes steps. It measures that itself, because no gateway may ever come back. Drivers with a session end with their
gateway only if the gateway ends with its own parent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import NoReturn

from loom.errors import UnknownSession
from loom.process.parent_pipe import when_parent_ends
from loom.process.state_file import is_gone
from loom.session_alive import AliveBecause, SessionLife
from loom_gateway.sessions.state_dir import DriverFiles, LastWords

logger = logging.getLogger(__name__)

LOOK_EVERY = 60.0  # seconds between two checks that clients can find the driver

LOOK_FOR_WORK = 1.0  # seconds between two looks whether something goes on in a session without a client

STEPS_APART = 10.0  # seconds after its last step for which a replica counts as going on; reports take a few

IDLE_NOTICE = 600.0
"""Seconds before the end of an idle session at which its clients are warned; at most half of the time it has."""

SHORTEST_TOLD = 1e-3  # seconds of linger time that a client is told if there is none, because 0 means forever


class Lifetime:
    """Ends the driver of one session when it is no longer needed.

    Args:
        linger: seconds after which a session ends that nothing keeps alive.
        exit_with_gateway: whether the driver ends with its gateway even if it has a session.
        remove_folder: whether the folder of the files is removed when the gateway ends.
        most: seconds after which a session ends whatever goes on in it; 0 is never.
        idle: seconds after which a session ends in which nothing happens, also with clients; 0 is never.
    """

    def __init__(
        self,
        files: DriverFiles,
        linger: float,
        exit_with_gateway: bool = False,
        remove_folder: bool = False,
        most: float = 0.0,
        idle: float = 0.0,
    ) -> None:
        self._files = files
        self._linger = linger
        self._most = most
        self._idle = idle
        self._exit_with_gateway = exit_with_gateway
        self._remove_folder = remove_folder
        self._opened = False  # whether the driver has a session
        self._persist = False  # whether the session lingers forever
        self._why = ""  # empty until the session ends
        self._clients: set[object] = set()
        self._timer: asyncio.TimerHandle | None = None  # to the next look, while no client is connected
        self.under_way: Callable[[], Collection[AliveBecause]] = lambda: ()
        """Returns what goes on in the session besides its clients and replicas. Safe on any thread."""
        self.operations: Callable[[], int] = lambda: 0
        """Returns how many operations clients have begun that are more than a look. Safe on any thread."""
        self.warn: Callable[[float], object] = lambda seconds: None
        """Tells the clients in how many seconds the session ends because nothing happens in it."""
        self._begun = 0  # of those operations, at the last look
        self._active = 0.0  # the loop's time at which something happened last
        self._warned = False  # whether the clients were warned since then
        self._quiet_since = 0.0  # the loop's time since when there has been no client and nothing under way
        self._worked = False  # whether something was under way since the last client left
        self._stepped = -float("inf")  # the loop's time of the last step of a replica
        self._ends_at: float | None = None  # the loop's time at which the session has lived for `_most` seconds
        self._loop: asyncio.AbstractEventLoop
        self.end: Callable[[str], object]  # ends the session for a reason; on the event loop
        self._lock = threading.Lock()  # makes opening the session and vanishing exclusive

    def watch_gateway(self, parent_pipe: int) -> None:
        """Watch a pipe on a separate thread: it is closed when the gateway ends."""
        when_parent_ends(self._gateway_ended, parent_pipe)

    def _gateway_ended(self) -> None:
        with self._lock:
            if self._exit_with_gateway or not self._opened:
                self._vanish()
        logger.info("the gateway is gone; the session lives on")

    def _vanish(self) -> NoReturn:
        """End at once and remove the files. The process links end the session's processes."""
        if self._remove_folder:
            shutil.rmtree(os.path.dirname(self._files.base), ignore_errors=True)
        self._files.remove(log=True)
        os._exit(1)

    def start(self, loop: asyncio.AbstractEventLoop, end: Callable[[str], object]) -> None:
        """Start to measure the linger time. After it, ``end`` is called on the loop with the reason."""
        self._loop = loop
        self.end = end

    def opened(self, persist: bool, age: float = 0.0) -> float:
        """Note that the session is open. Return its linger time in seconds, 0 for forever. Safe on any thread.

        Args:
            age: seconds for which it was open with drivers before this one.
        """
        with self._lock:
            first, self._opened = not self._opened, True
        if first:
            self._quiet_since = self._loop.time()  # until its first client comes
        if first and self._most:
            left = max(0.0, self._most - age)
            self._ends_at = self._loop.time() + left
            self._loop.call_soon_threadsafe(self._loop.call_later, left, self._end_of_life)
        if first and self._idle:
            self._active = self._loop.time()
            self._loop.call_soon_threadsafe(self._look_for_activity)
        self._persist = self._persist or persist
        return 0.0 if self._persist else max(self._linger, SHORTEST_TOLD)

    @property
    def left(self) -> float:
        """The seconds that the session can still live at most; 0 for forever. Safe on any thread."""
        return 0.0 if self._ends_at is None else max(self._ends_at - self._loop.time(), SHORTEST_TOLD)

    def _end_of_life(self) -> None:
        self.end(f"it had been open for {self._most:g} s, which is the gateway's --session-max")

    def _look_for_activity(self) -> None:
        """End the session if nothing has happened in it for long; warn its clients before."""
        again = self._loop.call_later(LOOK_FOR_WORK, self._look_for_activity)  # first, as in `_look`
        now, begun = self._loop.time(), self.operations()
        if begun != self._begun or self.under_way() or self._stepped > self._active:
            self._begun, self._active, self._warned = begun, now, False
        left = self._active + self._idle - now
        if left <= 0:
            again.cancel()
            self.end(f"nothing happened in it for {self._idle:g} s, which is the gateway's --session-idle")
        elif left <= min(IDLE_NOTICE, self._idle / 2) and not self._warned:
            self._warned = True
            self.warn(left)

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
            self._quiet_since, self._worked = self._loop.time(), False
            self._timer = self._loop.call_later(min(self._linger, LOOK_FOR_WORK), self._look)

    def _look(self) -> None:
        """End the session if nothing has kept it alive for the linger time; else look again soon."""
        self._timer = self._loop.call_later(LOOK_FOR_WORK, self._look)  # first: a look that fails is not the last
        now = self._loop.time()
        goes_on = bool(self.under_way())
        if goes_on:
            self._quiet_since, self._worked = now, True
        left = self._lingers_until - now
        if goes_on and left <= 0:
            return  # without a linger time
        self._timer.cancel()
        if left > 0:
            self._timer = self._loop.call_later(min(left, LOOK_FOR_WORK), self._look)
            return
        worked = self._worked or self._stepped > self._quiet_since
        self.end(f"no client{', and nothing under way,' if worked else ''} for {self._linger:g} s")

    @property
    def _lingers_until(self) -> float:
        return max(self._quiet_since + self._linger, self._stepped + max(self._linger, STEPS_APART))

    def replicas(self, idle: float | None) -> None:
        """Note for how many seconds no replica of the session has made a step. On the event loop.

        None is not known, because the weaver is away: replicas that went on until then are taken to go on.
        """
        now = self._loop.time()
        if idle is not None:
            self._stepped = max(self._stepped, now - idle)
        elif now < self._stepped + max(self._linger, STEPS_APART):
            self._stepped = now

    def life(self, leaving: int = 0) -> SessionLife:
        """Return until when the session lives once ``leaving`` of its clients are gone. Safe on any thread."""
        now = self._loop.time()
        because = [AliveBecause.CLIENT] if len(self._clients) > leaving else []
        because += self.under_way()
        if now < self._stepped + STEPS_APART:
            because.append(AliveBecause.REPLICA)
        ends = [] if self._ends_at is None else [self._ends_at]
        if self._idle and set(because) <= {AliveBecause.CLIENT}:
            ends.append(self._active + self._idle)
        if self._persist:
            because.append(AliveBecause.PERSIST)
        if not because:
            because.append(AliveBecause.LINGER)
            ends.append(max(now + self._linger if self._clients else 0.0, self._lingers_until))
        until = float(round(time.time() + min(ends) - now)) if ends else None  # the same each time it is asked
        return SessionLife(because, until, self._linger)

    def watch_socket(self) -> None:
        """End the session once no client is there, and none can come: its socket was removed. On the loop."""
        again = self._loop.call_later(LOOK_EVERY, self.watch_socket)  # first: a look that fails is not the last
        if not self._clients and is_gone(self._files.socket):
            again.cancel()
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
        """End because of a signal, with the gateway's reason if the gateway sent it. On the event loop.

        One that comes from elsewhere, as at the end of a machine, is no end of a session whose functions another
        driver can start again.
        """
        reason = self._files.read_last_words().reason
        if not reason and self._files.leaves_functions():
            logger.warning("%s: the next driver of the session is to start its functions again", number.name)
            os._exit(128 + number)
        self.end(reason or f"the driver was told to stop ({number.name})")

    def told_by_gateway(self) -> bool:
        """Return whether the gateway has given a reason for the driver's end."""
        return bool(self._files.read_last_words().reason)

    def over(self) -> None:
        if not self._remove_folder:  # else no gateway reads the note, and the folder may be disappearing
            self._files.write_last_words(LastWords(exit_code=0))
