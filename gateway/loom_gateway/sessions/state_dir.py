"""The gateway's state folder, through which its drivers and the next gateway find each other again.

The names of one driver's files in it begin alike. The gateway removes them when the driver has ended, except for
the log.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from loom.process.state_file import LONGEST_SOCKET_PATH, hold, write_json
from loom.token_file import state_folder

_CREDENTIALS = struct.Struct("3i")


class UnixPeer(NamedTuple):
    """Process and user id of a peer: of a listener, those with which it began to listen."""

    pid: int
    uid: int

    @classmethod
    def of(cls, sock: socket.socket) -> UnixPeer:
        """Return the peer of a connected unix socket."""
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return cls(pid, uid)


OWN = "driver"  # the beginning of the names of the files in a driver's own folder
LAST_WORDS_BYTES = 64 << 10
OUTPUT_LINES = 50
OUTPUT_BYTES = 16 << 10  # the limits of a driver's last output in error messages


@dataclass(frozen=True)
class DriverRecord:
    """The description of a driver, or of the weaver, that a gateway leaves for its successor."""

    pid: int
    started: int
    """The process's start by `start_time`. Another process with the same id has a later start."""
    session: str = ""
    """The name of its session; empty for a spare."""
    created: float = 0.0
    """The time at which the session was opened, in seconds since the epoch."""
    persist: bool = False
    """True if the session never ends for lack of a client."""
    owner: str = ""
    """The id of the token that opened the session; empty for a spare."""
    driven_with: Sequence[str] = ()
    """The ids of its user's other tokens that have driven the session, the newest last."""
    user: str = ""
    """The user to whom the session belongs; empty for a spare, and in the record of an older gateway."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """The users with whom the session is shared, each with the scope that they have in it."""
    opening: str = ""
    """The name of the session that its client has made up; see `loom.wire.handshake.Hello`."""
    address: str = ""
    """The address at which threadlets find the weaver."""
    uid: int | None = None
    """The driver's user id, if it has one of its own."""
    hosts: Sequence[int] = ()
    """The numbers of the workers that are leased to the session's user; empty if workers are shared."""
    boot: str = ""
    """The `boot_id` at its start: after another, a process with its id and start is not the driver."""
    moves: int = 0
    """How often the session has moved to another session host."""
    knows_users: bool = False
    """True if the driver knows of users: not one that a gateway of before users has started."""

    @property
    def peer(self) -> UnixPeer:
        """The process at the other end of its socket."""
        return UnixPeer(self.pid, os.geteuid() if self.uid is None else self.uid)


@dataclass(frozen=True)
class LastWords:
    """The reason and exit code that a driver, or its gateway, leaves at the driver's end."""

    reason: str = ""
    """Empty if it is not known."""
    exit_code: int | None = None
    """Known only if the driver has ended by itself."""


class DriverFiles:
    """The files of one driver.

    Args:
        base: the beginning of their paths.
        folder: of the files that a driver with a user id of its own makes and the gateway reads. The others stay
            where only the gateway can change them.
        closed: whether only this user can open the files, or all who can open their folder.
    """

    def __init__(self, base: str, folder: str | None = None, closed: bool = True) -> None:
        self.base = base
        self.folder = folder
        own = base if folder is None else os.path.join(folder, OWN)
        self.mode = 0o600 if closed and folder is None else 0o644
        self.socket = f"{own}.sock"  # on which the driver takes the gateway's connections
        self.record = f"{base}.json"  # of `DriverRecord`
        self.workers = f"{base}.workers"  # the session's workers, if they are leased: a `WorkerList`
        self.output = f"{base}.out"  # the driver's standard output and error
        self.last_words = f"{own}.end"  # of `LastWords`
        self.restart = (
            f"{own}.restart"  # what the session's next driver starts again; see `driver.runs.restart_file`
        )
        self.log = f"{own}.log"  # the session's; see `loom_gateway.driver.output.spool`

    def write_record(self, record: DriverRecord) -> None:
        write_json(self.record, record)

    def read_record(self) -> DriverRecord:
        """Return the record. Raise `OSError` if there is none, `ValueError` if it is damaged."""
        from pydantic import TypeAdapter  # drivers use this module, and do not load pydantic

        return TypeAdapter(DriverRecord).validate_json(Path(self.record).read_bytes(), strict=True)

    def write_last_words(self, words: LastWords) -> None:
        """Write the last words. The first reason stays."""
        reason = self.read_last_words().reason or words.reason
        with contextlib.suppress(OSError):  # the folder is gone, and so is the reader
            write_json(self.last_words, LastWords(reason, words.exit_code), self.mode)

    def read_last_words(self) -> LastWords:
        """Return the last words, or empty ones if there are none."""
        try:
            with open_regular(self.last_words) as file:
                words: Any = json.loads(file.read(LAST_WORDS_BYTES))
            code = words["exit_code"]
            return LastWords(str(words["reason"]), code if type(code) is int else None)
        except (OSError, ValueError, TypeError, KeyError):
            return LastWords()

    def last_output(self) -> list[str]:
        try:
            with open(self.output, "rb") as output:
                output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
                return output.read().decode(errors="replace").splitlines()[-OUTPUT_LINES:]
        except OSError:
            return []

    @property
    def kept(self) -> list[str]:
        """The files that outlive the driver."""
        return [self.log, f"{self.log}.1", self.restart]

    def keep(self) -> None:
        """Move what is `kept` out of the driver's folder, which `driver_ids.sweep` has emptied, and remove it."""
        assert self.folder is not None
        log, restart = f"{self.base}.log", f"{self.base}.restart"
        for path, to in zip(self.kept, (log, f"{log}.1", restart), strict=True):
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, to)
        self.log, self.restart = log, restart
        os.rmdir(self.folder)

    def leaves_functions(self) -> bool:
        """Return whether the driver has left functions for the session's next driver."""
        with contextlib.suppress(OSError):
            return os.lstat(self.restart).st_size > 0
        return False

    def remove(self, log: bool = False) -> None:
        """Remove the files; the log only with ``log=True``."""
        paths = [self.socket, self.record, self.output, self.last_words, self.workers, self.restart]
        for path in paths + ([self.log, f"{self.log}.1"] if log else []):
            with contextlib.suppress(OSError):
                os.unlink(path)


def open_regular(path: str) -> IO[bytes]:
    """Open a file that another user id may have made, to read it. Raise `OSError` for a link, a pipe, …."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    # A second name may be that of a file that its owner can name, and not read.
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is no file of its own", path)
    return open(descriptor, "rb")


SYSTEM = Path("/var/lib/loom")
"""The parent of the state folder of a gateway whose drivers have other user ids: root's home is closed to them."""


def default_path(port: int, separate: bool = False) -> str:
    """Return the default state folder of the gateway on a port.

    A folder in a place of an earlier version is used until no session is left in it.
    """
    name = f"gateway-{port}"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    before = [Path(runtime, "loom", name)] if runtime else []
    before.append(Path(tempfile.gettempdir(), f"loom-{os.geteuid()}", name))
    for folder in before:
        try:
            if folder.stat().st_uid == os.geteuid() and any(folder.glob("driver-*.json")):
                return str(folder)
        except OSError:
            continue
    return str((SYSTEM if separate else state_folder()) / name)


_PREFIX = "loom-gateway-"


class StateFolder:
    """A folder that only this user can open, held by one gateway at a time.

    With ``separate``, drivers have user ids of their own. They can pass through the folder, and cannot list it.
    """

    def __init__(self, path: str, lock: int | None, separate: bool = False) -> None:
        self.path = path
        self.weaver = os.path.join(path, "weaver")  # the weaver's own folder
        self.separate = separate
        self._lock = lock

    @property
    def temporary(self) -> bool:
        return self._lock is None

    @classmethod
    def make_temporary(cls) -> StateFolder:
        """Create a new folder, for a gateway whose drivers end with it.

        It is in the folder for temporary files, unless the path of a socket in it would be too long there.
        """
        made = cls(tempfile.mkdtemp(prefix=_PREFIX), None)
        if len(os.fsencode(made.new_driver().socket)) > LONGEST_SOCKET_PATH:
            made.remove()
            made = cls(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"), None)
        return made

    @classmethod
    def open(cls, path: str, separate: bool = False) -> StateFolder:
        """Open a folder, creating it if necessary, and `hold` it until this process ends."""
        path = os.path.abspath(path)
        socket = os.path.relpath(cls(path, None, separate).new_driver().socket, path)
        lock = hold(Path(path), "gateway", socket, " with --state-dir", passable=separate)
        for unfinished in Path(path).glob(".*"):  # left by a process that was killed while it wrote
            unfinished.unlink()
        return cls(path, lock, separate)

    def new_driver(self) -> DriverFiles:
        """Return unused names for the files of a new driver."""
        base = os.path.join(self.path, f"driver-{secrets.token_hex(6)}")
        return DriverFiles(base, base if self.separate else None)

    def drivers(self) -> list[DriverFiles]:
        """Return the files of every driver that a gateway has left here."""
        names = {
            entry.name.partition(".")[0] for entry in os.scandir(self.path) if entry.name.startswith("driver-")
        }
        bases = [os.path.join(self.path, name) for name in sorted(names)]
        return [DriverFiles(base, base if os.path.isdir(base) else None) for base in bases]

    def remove(self) -> None:
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)
