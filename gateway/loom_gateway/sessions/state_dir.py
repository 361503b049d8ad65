"""The gateway's state folder: what its drivers and the gateway after it need to find each other again."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from loom.errors import Conflict, UnsafeStateFolder
from loom_gateway.sessions.driver_files import DriverFiles

__all__ = ["StateFolder", "default_path"]

LONGEST_SOCKET_PATH = 107
"""Bytes of the path of a unix socket, on Linux; elsewhere a few less."""


def default_path(port: int) -> str:
    """Where the gateway on a port keeps its state unless told otherwise."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = os.path.join(runtime, "loom") if runtime else f"{tempfile.gettempdir()}/loom-{os.geteuid()}"
    return os.path.join(base, f"gateway-{port}")


class StateFolder:
    """A folder that only this user can open, held by one gateway at a time."""

    def __init__(self, path: str, lock: int | None) -> None:
        self.path = path
        self.ports: str | None = None if lock is None else os.path.join(path, "ports")
        """The file of `FreshPorts`; None if no gateway will come after this one."""
        self.ended: str | None = None if lock is None else os.path.join(path, "ended.json")
        """The file of `loom_gateway.sessions.history.EndedSessions`; None likewise."""
        self.weaver = os.path.join(path, "weaver")
        """The weaver's folder."""
        self._lock = lock

    @property
    def temporary(self) -> bool:
        """Whether the folder is gone when the gateway is."""
        return self._lock is None

    @classmethod
    def make_temporary(cls) -> StateFolder:
        """A new folder, for a gateway whose drivers end with it."""
        return cls(tempfile.mkdtemp(prefix="loom-gateway-"), None)

    @classmethod
    def open(cls, path: str) -> StateFolder:
        """Open a folder, which is made unless it is there, and hold it until this process ends.

        Raises:
            UnsafeStateFolder: it is not this user's own, others can open it, or it cannot be made.
            StateFolderInUse: another gateway holds it.
        """
        path = os.path.abspath(path)
        if len(os.fsencode(cls(path, None).new_driver().socket)) > LONGEST_SOCKET_PATH:
            raise UnsafeStateFolder(f"the path of the state folder {path} is too long for a socket in it")
        try:
            base = Path(path).parent
            if not base.exists():
                base.mkdir(0o700, parents=True)
            Path(path).mkdir(0o700, exist_ok=True)
            _check_is_ours(path)
            lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UnsafeStateFolder(f"cannot keep state in {path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise Conflict(
                f"another gateway{f' (pid {holder})' if holder else ''} uses the state folder {path}: end it, or "
                f"choose another folder with --state-dir",
                code="state_folder_in_use",
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        for unfinished in Path(path).glob(".*"):  # what somebody was killed in the middle of writing
            unfinished.unlink()
        return cls(path, lock)

    def new_driver(self) -> DriverFiles:
        """Names for the files of a new driver."""
        return DriverFiles(os.path.join(self.path, f"driver-{secrets.token_hex(6)}"))

    def drivers(self) -> list[DriverFiles]:
        """Those of every driver that a gateway has left here."""
        names = {
            entry.name.partition(".")[0] for entry in os.scandir(self.path) if entry.name.startswith("driver-")
        }
        return [DriverFiles(os.path.join(self.path, name)) for name in sorted(names)]

    def remove(self) -> None:
        """Remove a temporary folder."""
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def _check_is_ours(path: str) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeStateFolder(
            f"the state folder {path} is not a folder, or a link to one: name the folder itself"
        )
    if found.st_uid != os.geteuid():
        raise UnsafeStateFolder(
            f"the state folder {path} belongs to user {found.st_uid}, not to this one ({os.geteuid()}), and its "
            f"sockets may lead anywhere: choose another with --state-dir"
        )
    if found.st_mode & 0o077:
        raise UnsafeStateFolder(
            f"others can open the state folder {path} (mode {stat.S_IMODE(found.st_mode):o}), and with it the "
            f"sessions: `chmod 700 {path}` or choose another with --state-dir"
        )
