"""A driver's process as the gateway sees it: started by this gateway, or by an earlier one.

The weaver's process is one, too; see `loom_gateway.weaver_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from loom.errors import LoomError, SessionLost, Unavailable
from loom.process import tasks
from loom.process.child import Child
from loom.process.identity import boot_id, start_time
from loom_gateway.sessions.driver_ids import clear_away, environment
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord, LastWords, UnixPeer

logger = logging.getLogger(__name__)

START_TIMEOUT = 60.0  # seconds that a driver has to come up
END_TIMEOUT = 10.0  # seconds that a driver has to stop its meshes and exit before it is killed
CONNECT_TIMEOUT = 2.0  # seconds that a driver's socket has to accept a connection


class DriverProcess(ABC):
    """A driver's process and its files, which are removed when it has ended."""

    def __init__(self, files: DriverFiles, record: DriverRecord) -> None:
        self.files = files
        self.record = record
        self._noting = asyncio.Lock()  # held while the record changes
        self.exited = asyncio.Event()
        self.exit_code: int | None = None
        """Negative: the signal that killed the process. None: the process lives, or the code is unknown."""
        self.output: list[str] = []
        """The last lines of the process's output, once it has ended."""
        self.reason = ""
        """Why the process was told to end; empty if it ended by itself."""
        self.leaves_functions = False
        """Whether it has died, and has left functions for the session's next driver. Its files stay until then."""
        self.unreachable = ""
        """Why no gateway can connect to the process, which lives; empty if one can."""
        self.cleared = True
        """Whether, once it has ended, no process and no file of its user id is left."""
        self._ending: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.record.pid

    async def note(self, change: Callable[[DriverRecord], Mapping[str, Any]]) -> None:
        """Change the record, for the next gateway too. The disk does not hold up the event loop.

        A change that has begun is finished, also if the caller is cancelled.

        Args:
            change: returns the fields to change, given the record.

        Raises:
            Unavailable: it cannot be written.
        """
        noting = asyncio.ensure_future(self._note(change))
        noting.add_done_callback(lambda noted: noted.cancelled() or noted.exception())  # if nobody waits any more
        await asyncio.shield(noting)

    async def _note(self, change: Callable[[DriverRecord], Mapping[str, Any]]) -> None:
        async with self._noting:
            changed = replace(self.record, **change(self.record))
            await asyncio.to_thread(_write, self.files, changed)
            self.record = changed

    def _ended(self, exit_code: int | None) -> None:
        self._ending = tasks.run_to_end("note a driver's end", lambda: self._note_ended(exit_code))

    async def _note_ended(self, exit_code: int | None) -> None:
        words, self.output = await asyncio.to_thread(self._read_end)
        self.exit_code = words.exit_code if exit_code is None else exit_code
        self.reason = words.reason
        if self.record.uid is not None:
            self.cleared = await asyncio.to_thread(clear_away, self.files, self.record.uid)
        self.leaves_functions = bool(self.record.session) and not self.reason and self.files.leaves_functions()
        if not self.leaves_functions:
            await asyncio.to_thread(self.files.remove)
        self.exited.set()

    def _read_end(self) -> tuple[LastWords, list[str]]:
        return self.files.read_last_words(), self.files.last_output()

    def check_peer(self, sock: socket.socket) -> None:
        """Raise `NotOurDriver` if another process than the driver is at the other end of its socket."""
        check_peer(sock, self.record.peer, self.files.socket)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the driver, for the gateway's own questions.

        Raises:
            OSError, NotOurDriver: it has ended, or another process is at the other end.
        """
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, self.files.socket)
            # A driver with a user id of its own could lead its socket's name to another driver.
            self.check_peer(sock)
            return await asyncio.open_unix_connection(sock=sock)
        except BaseException:
            sock.close()
            raise

    @property
    def how_it_ended(self) -> str:
        code = self.exit_code
        if code is None:
            return "ended; its exit code is not known"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def lost(self, message: str) -> SessionLost:
        return SessionLost(message, self.exit_code, "\n".join(self.output))

    async def end(self, reason: str, timeout: float = END_TIMEOUT) -> None:
        """Tell the driver to stop its meshes and exit. Kill it after ``timeout`` seconds."""
        await asyncio.to_thread(self.files.write_last_words, LastWords(reason))
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.exited.wait(), timeout)
        except asyncio.TimeoutError:
            logger.warning("driver %d did not end within %g s and is killed", self.pid, timeout)
            self.signal(signal.SIGKILL)
            await self.exited.wait()

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal, if the process lives."""

    @abstractmethod
    def abandon(self) -> None:
        """Make sure that the process ends when this one ends with its parent. Safe on any thread."""


class OwnDriver(DriverProcess):
    """A child of this process. It takes clients once `come_up` has returned."""

    def __init__(self, files: DriverFiles, child: Child, record: DriverRecord) -> None:
        super().__init__(files, record)
        self._child = child
        self._loop = asyncio.get_running_loop()
        self._child.ended.add_done_callback(self._note_end)

    @classmethod
    async def start(
        cls, name: str, files: DriverFiles, command: Sequence[str], uid: int | None = None
    ) -> OwnDriver:
        """Start a process beside the event loop, and release it when its record is on the disk.

        Raises:
            OSError: the process cannot be started.
            Unavailable: the record cannot be written; the process is ended.
        """
        starting = asyncio.ensure_future(asyncio.to_thread(_start, name, files, command, uid))
        try:
            child, record = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end_started)
            raise
        return cls(files, child, record)

    async def come_up(self, timeout: float = START_TIMEOUT) -> Mapping[str, Any]:
        """Return the process's announcement. Kill it, and raise `SessionLost`, if it comes too late or never."""
        ready = asyncio.shield(asyncio.wrap_future(self._child.ready))
        try:
            return await asyncio.wait_for(ready, timeout)
        except asyncio.TimeoutError:
            await self.end("it did not come up", 0)
            raise self.lost(f"{self._child.name} did not listen within {timeout:g} s") from None
        except LoomError:
            await self.exited.wait()
            last = "\n".join(self.output)
            how = f"{self._child.name} {self.how_it_ended} before it listened"
            raise self.lost(f"{how}; its last output:\n{last}") from None

    def _note_end(self, ended: Future[int]) -> None:
        _kill_group(self.pid)
        self._child.cut()  # at once, and not when the garbage collector finds this object
        # the loop is closed because the gateway has left its drivers behind
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended, ended.result())

    def signal(self, number: int) -> None:
        self._child.signal(number)

    def abandon(self) -> None:
        """Do nothing: the driver ends when its standard input is closed."""


def _start(name: str, files: DriverFiles, command: Sequence[str], uid: int | None) -> tuple[Child, DriverRecord]:
    output = os.open(files.output, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    variables = None if files.folder is None else environment(files.folder)
    try:
        # The child's standard input closes when this process ends; see `driver.lifetime`.
        child = Child(name, command, variables, errors=output, user=uid, folder=files.folder)
    finally:
        os.close(output)
    pid = child.pid
    record = DriverRecord(pid, start_time(pid) or 0, uid=uid, boot=boot_id(), knows_users=True)
    try:
        _write(files, record)
    except BaseException:
        child.end(0)  # no gateway would ever find it, and its user id may be given again
        raise
    child.release()
    return child, record


def _end_started(starting: asyncio.Future[tuple[Child, DriverRecord]]) -> None:
    """End a process that nobody waits for any more."""
    if not starting.cancelled() and starting.exception() is None:
        child, _ = starting.result()
        child.signal(signal.SIGKILL)
        child.cut()


def _write(files: DriverFiles, record: DriverRecord) -> None:
    try:
        files.write_record(record)
    except OSError as error:
        why = error.strerror or error
        raise Unavailable(f"the gateway cannot write its state folder ({why}): nothing was done") from error


class NotOurDriver(Exception):
    """Raised with the reason if a record's driver has ended, or another process has taken its place."""


class AdoptedDriver(DriverProcess):
    """A driver that an earlier gateway started."""

    def __init__(self, files: DriverFiles, record: DriverRecord, pidfd: int) -> None:
        super().__init__(files, record)
        self._pidfd: int | None = pidfd  # None once the process has ended, which may be before `exited`
        self._killed_by: int | None = None  # known only if this gateway has killed it
        asyncio.get_running_loop().add_reader(pidfd, self._gone)

    @classmethod
    def adopt(cls, files: DriverFiles) -> AdoptedDriver:
        """Take over the driver of a record, also if it cannot be reached.

        Raise `NotOurDriver` if it has ended, or another has its place.
        """
        try:
            record = files.read_record()
        except (OSError, ValueError) as error:
            raise NotOurDriver(f"its record cannot be read: {error}") from error
        if record.boot not in ("", boot_id()):
            raise NotOurDriver("the machine was started anew")
        try:
            pidfd = os.pidfd_open(record.pid)
        except (OSError, OverflowError) as error:
            raise NotOurDriver(f"process {record.pid} has ended") from error
        try:
            # The descriptor keeps the process's id from being reused, so the checks below hold from now on.
            if start_time(record.pid) != record.started:
                raise NotOurDriver(f"process {record.pid} is another one than the record's, which has ended")
            return cls._reached(files, record, pidfd)
        except BaseException:
            os.close(pidfd)
            raise

    @classmethod
    def _reached(cls, files: DriverFiles, record: DriverRecord, pidfd: int) -> AdoptedDriver:
        unreachable = ""
        try:
            _check_listener(files.socket, record.peer)
        except NotOurDriver as error:
            if os.fsencode(files.socket) not in _command_line(record.pid):
                raise
            unreachable = str(error)
        driver = cls(files, record, pidfd)
        driver.unreachable = unreachable
        return driver

    def _gone(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        _kill_group(self.pid)
        self._ended(self._killed_by)

    def signal(self, number: int) -> None:
        if self._pidfd is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
            if number == signal.SIGKILL:
                self._killed_by = -number

    def abandon(self) -> None:
        self.signal(signal.SIGTERM)


def _kill_group(driver: int) -> None:
    """Kill the processes that functions in a driver have started, if the driver could not end them itself."""
    with contextlib.suppress(OSError):  # none is left
        os.killpg(driver, signal.SIGKILL)


def _command_line(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _check_listener(path: str, expected: UnixPeer) -> None:
    """Raise `NotOurDriver` unless this process listens on a socket."""
    try:
        found = os.lstat(path)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != expected.uid:
            raise NotOurDriver(f"{path} is not a socket of user id {expected.uid}")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(CONNECT_TIMEOUT)
            sock.connect(path)
            check_peer(sock, expected, path)
    except OSError as error:
        raise NotOurDriver(f"nobody listens on {path} ({error.strerror or error})") from error


def check_peer(sock: socket.socket, expected: UnixPeer, path: str) -> None:
    """Raise `NotOurDriver` unless this process is at the other end of a socket."""
    peer = UnixPeer.of(sock)
    if peer != expected:
        raise NotOurDriver(
            f"process {peer.pid} of user {peer.uid} listens on {path}, not {expected.pid} of {expected.uid}"
        )
