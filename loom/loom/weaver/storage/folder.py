"""The weaver's folder: its store, its socket, and the address that threadlets know it by."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from pathlib import Path

from loom.control.address import WeaverAddress
from loom.errors import Conflict, UnsafeStateFolder

__all__ = ["WeaverFolder"]

_LONGEST_SOCKET_PATH = 107


class WeaverFolder:
    """A folder that only this user can open, held by one weaver at a time."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.store = path / "weaver.sqlite"
        self.socket = path / "weaver.sock"
        self._link = path / "link.json"
        self._lock = lock

    @classmethod
    def open(cls, path: str | Path) -> WeaverFolder:
        """Open a folder, which is made unless it is there, and hold it until this process ends.

        Raises:
            UnsafeStateFolder: it is not this user's own, others can open it, or it cannot be made.
            StateFolderInUse: another weaver holds it.
        """
        path = Path(path).absolute()
        if len(os.fsencode(path / "weaver.sock")) > _LONGEST_SOCKET_PATH:
            raise UnsafeStateFolder(f"the path of the weaver's folder {path} is too long for a socket in it")
        try:
            path.mkdir(0o700, parents=True, exist_ok=True)
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise UnsafeStateFolder(
                    f"the weaver's folder {path} has to be this user's own, and nobody else's to open: chmod 700 it"
                )
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnsafeStateFolder(f"cannot keep the weaver's state in {path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise Conflict(
                f"another weaver uses the folder {path}: end it, or choose another", code="state_folder_in_use"
            ) from None
        return cls(path, lock)

    def is_there(self) -> bool:
        """Whether it is still the folder that was opened: it may be removed, or another be made in its place."""
        try:
            found = os.stat(self.path / "lock")
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._lock))

    def remembered(self) -> WeaverAddress | None:
        """The address of the weaver before; None where there was none."""
        try:
            found = json.loads(self._link.read_text())
            return WeaverAddress(str(found["host"]), int(found["port"]), str(found["key"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def remember(self, address: WeaverAddress) -> None:
        """Keep the address for the weaver after this one."""
        fresh = self._link.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(address._asdict(), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._link)

    @staticmethod
    def new_key() -> str:
        """A key with 256 bits of randomness."""
        return secrets.token_urlsafe(32)
