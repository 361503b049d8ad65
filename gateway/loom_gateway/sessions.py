"""The gateway's sessions: one driver process each, and a warm spare for the next."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from loom.errors import LoomError, SessionLost, UnknownSession
from loom_gateway.fresh_ports import FreshPorts
from loom_gateway.logs import SessionLogs

__all__ = ["DriverProcess", "Session", "SessionManager", "SessionState"]

logger = logging.getLogger(__name__)

START_TIMEOUT = 60.0
"""Seconds that a driver may take to come up."""

END_TIMEOUT = 10.0
"""Seconds that a driver may take to stop its meshes and exit before it is killed."""

OUTPUT_LINES = 50
"""Last lines of a driver's output that are kept for error messages."""


class DriverProcess:
    """A driver's process, its socket, and the last lines that it printed."""

    def __init__(self, process: asyncio.subprocess.Process, socket_path: str) -> None:
        self._process = process
        self.socket_path = socket_path
        self.output: deque[str] = deque(maxlen=OUTPUT_LINES)
        self.listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.exited = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log_path(self) -> str:
        """The file with what the session printed."""
        return _log_path(self.socket_path)

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    @classmethod
    async def start(
        cls, socket_path: str, workers: Sequence[str], port: int, options: Sequence[str] = ()
    ) -> DriverProcess:
        """Start a driver whose Monarch listens on a port. It takes clients once `listening` is done."""
        arguments = [arg for worker in workers for arg in ("--worker", worker)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loom_gateway.driver", "--socket", socket_path,
            "--log-spool", _log_path(socket_path), "--port", str(port), *arguments, *options,
            # The driver ends when this pipe closes, which it does however the gateway ends.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=1 << 20,
        )  # fmt: skip
        return cls(process, socket_path)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await _read_line(self._process.stdout):
                self._take_line(line.decode(errors="replace").rstrip())
        finally:
            code = await self._process.wait()
            if not self.listening.done():
                self.listening.set_exception(self.lost(f"the driver ended before it listened (exit code {code})"))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.socket_path)
            self.exited.set()

    def _take_line(self, line: str) -> None:
        if not self.listening.done() and line.startswith('{"event": "listening"'):
            json.loads(line)
            self.listening.set_result(None)
        else:
            self.output.append(line)
            logger.debug("driver %d: %s", self.pid, line)

    def lost(self, message: str) -> SessionLost:
        """The error that tells a client that this driver has ended."""
        return SessionLost(message, self.exit_code, "\n".join(self.output))

    async def end(self, timeout: float = END_TIMEOUT) -> None:
        """Have the driver stop its meshes and exit; kill it after ``timeout`` seconds."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.exited.wait(), timeout)
        except asyncio.TimeoutError:
            logger.warning("driver %d did not end within %g s and is killed", self.pid, timeout)
            self._signal(signal.SIGKILL)
            await self.exited.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def _log_path(socket_path: str) -> str:
    return socket_path.removesuffix(".sock") + ".log"


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:  # a line over the limit: its beginning was dropped
        return b"<a very long line>\n"


class SessionState(enum.Enum):
    """Where a session is in its life. A session only moves down this list."""

    STARTING = "starting"
    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"


_ORDER = list(SessionState)


@dataclass
class Session:
    """One user's session: a driver and what is known about it."""

    name: str
    driver: DriverProcess
    created_at: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    state: SessionState = SessionState.STARTING
    clients: int = 0
    """Clients that are connected."""
    end_reason: str = ""
    owner: str = "gateway"
    """Id of the token that it was opened with; ``gateway`` for the gateway's own."""
    _linger: asyncio.TimerHandle | None = None
    _frames: Callable[[], int] = lambda: 0
    _earlier_frames: int = 0

    @property
    def client_connected(self) -> bool:
        """Whether any client is connected."""
        return self.clients > 0

    @property
    def operations(self) -> int:
        """Frames that clients have sent."""
        return self._earlier_frames + self._frames()

    def move_to(self, state: SessionState) -> None:
        """Change the state; ignored where the session is already there or further."""
        if _ORDER.index(state) > _ORDER.index(self.state):
            self.state = state

    def ended_error(self) -> LoomError:
        """What to tell a client whose driver has gone."""
        code = self.driver.exit_code
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        last = "\n".join(self.driver.output)
        return self.driver.lost(
            f"the driver of session {self.name!r} {how}; its meshes are stopped. Open a new one with loom.connect."
            + (f" Its last output:\n{last}" if last else "")
        )


class SessionManager:
    """Starts, finds and ends sessions.

    Args:
        workers: addresses of the worker hosts.
        linger: seconds that a session lives on without a client.
        driver_options: more of the command line of each driver.
    """

    def __init__(self, workers: Sequence[str], linger: float = 3600.0, driver_options: Sequence[str] = ()) -> None:
        self._workers = list(workers)
        self._linger = linger
        self._driver_options = list(driver_options)
        self._sessions: dict[str, Session] = {}
        self._folder = tempfile.mkdtemp(prefix="loom-gateway-")
        self._ports = FreshPorts()
        self._spare: asyncio.Task[DriverProcess] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.on_end: Callable[[Session], None] = lambda session: None
        """Called with each session that has ended."""
        self.logs = SessionLogs()
        """What the sessions print, and what the last ones to end have printed."""

    @property
    def spare_ready(self) -> bool:
        """Whether a warm driver waits for the next session."""
        return self._spare is not None and self._spare.done() and self._spare.exception() is None

    @property
    def workers(self) -> list[str]:
        """Addresses of the worker hosts, in the order of the dimension ``hosts``."""
        return list(self._workers)

    def sessions(self) -> list[Session]:
        """The living sessions, oldest first."""
        return list(self._sessions.values())

    def get(self, name: str) -> Session:
        """A living session.

        Raises:
            UnknownSession: naming the sessions that there are.
        """
        session = self._sessions.get(name)
        if session is None or session.state in (SessionState.ENDING, SessionState.ENDED):
            living = ", ".join(repr(other) for other in self._sessions) or "none"
            raise UnknownSession(f"no session named {name!r}; living sessions: {living}. It may have ended.")
        return session

    def prepare_spare(self) -> None:
        """Start warming a driver for the next session, unless one is there."""
        if self._spare is None and not self._closing:
            self._spare = asyncio.ensure_future(self._start_driver())

    async def _start_driver(self) -> DriverProcess:
        path = os.path.join(self._folder, f"driver-{secrets.token_hex(6)}.sock")
        driver = await DriverProcess.start(path, self._workers, self._ports.take(), self._driver_options)
        try:
            await asyncio.wait_for(asyncio.shield(driver.listening), START_TIMEOUT)
        except asyncio.TimeoutError:
            await driver.end(0)
            raise driver.lost(f"a driver did not come up within {START_TIMEOUT:g} s") from None
        return driver

    async def create(self, owner: str = "gateway") -> Session:
        """Give the spare driver to a new session of the token with the id ``owner``, and warm the next spare.

        Raises:
            SessionLost: no driver could be started.
        """
        driver = await self._take_spare()
        session = Session(f"session-{secrets.token_hex(4)}", driver, owner=owner)
        self._sessions[session.name] = session
        self.logs.add(session.name, driver.log_path)
        self._background(self._watch(session))
        return session

    async def _take_spare(self) -> DriverProcess:
        self.prepare_spare()
        spare, self._spare = self._spare, None
        assert spare is not None
        driver = await spare
        if driver.exited.is_set():  # it died while it waited
            driver = await self._start_driver()
        return driver

    async def _watch(self, session: Session) -> None:
        await session.driver.exited.wait()
        session.move_to(SessionState.ENDED)
        self._sessions.pop(session.name, None)
        self.logs.ended(session.name)
        self.on_end(session)
        logger.info(
            "session %s ended: %s (exit code %s)",
            session.name,
            session.end_reason or "its driver ended by itself",
            session.driver.exit_code,
        )

    def connected(self, session: Session, frames: Callable[[], int]) -> None:
        """Note that a client is connected; ``frames`` tells how many frames it has sent."""
        session._earlier_frames += session._frames()
        session._frames = frames
        session.clients += 1
        session.move_to(SessionState.OPEN)
        if session._linger is not None:
            session._linger.cancel()
            session._linger = None
        # Not before the session is open: warming a driver takes a core for a while.
        asyncio.get_running_loop().call_later(0.5, self.prepare_spare)

    def disconnected(self, session: Session) -> None:
        """Note that the client is gone; the session ends after the linger time."""
        session.clients -= 1
        if not session.clients and session.state is SessionState.OPEN:
            reason = f"no client for {self._linger:g} s"
            later: Callable[[], None] = lambda: self._background(self.end(session, reason))  # noqa: E731
            session._linger = asyncio.get_running_loop().call_later(self._linger, later)

    async def end(self, session: Session, reason: str) -> None:
        """End a session: its driver stops its meshes and exits."""
        if session._linger is not None:
            session._linger.cancel()
        session.end_reason = session.end_reason or reason
        session.move_to(SessionState.ENDING)
        await session.driver.end()

    async def close(self) -> None:
        """End every session and the spare; remove the sockets' folder."""
        self._closing = True
        ends = [self.end(session, "the gateway was stopped") for session in self.sessions()]
        if self._spare is not None:
            ends.append(self._end_spare(self._spare))
        await asyncio.gather(*ends)
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder of the drivers' sockets."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_spare(self, spare: asyncio.Task[DriverProcess]) -> None:
        with contextlib.suppress(LoomError):
            driver = await spare
            await driver.end()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
