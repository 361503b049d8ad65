"""The gateway's state folder, through which its drivers and the next gateway find each other again."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from loom.process.state_file import LONGEST_SOCKET_PATH, hold
from loom.token_file import state_folder
from loom_gateway.sessions.driver_files import DriverFiles

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
