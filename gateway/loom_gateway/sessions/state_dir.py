"""The gateway's state folder, through which its drivers and the next gateway find each other again."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from loom.process.held_folder import hold
from loom_gateway.sessions.driver_files import DriverFiles


def default_path(port: int) -> str:
    """Return the default state folder of the gateway on a port."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = os.path.join(runtime, "loom") if runtime else f"{tempfile.gettempdir()}/loom-{os.geteuid()}"
    return os.path.join(base, f"gateway-{port}")


class StateFolder:
    """A folder that only this user can open, held by one gateway at a time."""

    def __init__(self, path: str, lock: int | None) -> None:
        self.path = path
        self.weaver = os.path.join(path, "weaver")  # the weaver's own folder
        self._lock = lock

    @property
    def temporary(self) -> bool:
        return self._lock is None

    @classmethod
    def make_temporary(cls) -> StateFolder:
        """Create a new folder, for a gateway whose drivers end with it."""
        return cls(tempfile.mkdtemp(prefix="loom-gateway-"), None)

    @classmethod
    def open(cls, path: str) -> StateFolder:
        """Open a folder, creating it if necessary, and `hold` it until this process ends."""
        path = os.path.abspath(path)
        socket = os.path.basename(cls(path, None).new_driver().socket)
        lock = hold(Path(path), "gateway", socket, " with --state-dir")
        for unfinished in Path(path).glob(".*"):  # left by a process that was killed while it wrote
            unfinished.unlink()
        return cls(path, lock)

    def new_driver(self) -> DriverFiles:
        """Return unused names for the files of a new driver."""
        return DriverFiles(os.path.join(self.path, f"driver-{secrets.token_hex(6)}"))

    def drivers(self) -> list[DriverFiles]:
        """Return the files of every driver that a gateway has left here."""
        names = {
            entry.name.partition(".")[0] for entry in os.scandir(self.path) if entry.name.startswith("driver-")
        }
        return [DriverFiles(os.path.join(self.path, name)) for name in sorted(names)]

    def remove(self) -> None:
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)
