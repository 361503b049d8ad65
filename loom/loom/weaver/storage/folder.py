"""The weaver's folder: its store, its socket, and its address for threadlets."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from loom.control.address import WeaverAddress
from loom.process.held_folder import hold


class WeaverFolder:
    """A folder that only this user can open, held by this process until it ends, and created if it is missing.

    With ``passable``, processes of other user ids can reach the socket, but can neither list nor read anything.
    """

    def __init__(self, path: str | Path, passable: bool = False) -> None:
        self.path = Path(path).absolute()
        self.passable = passable
        self._lock = hold(self.path, "weaver", "weaver.sock", passable=passable)
        for file in self.path.glob("weaver.sqlite*"):
            file.chmod(0o600)  # an earlier version left it to the folder
        self.store = self.path / "weaver.sqlite"
        self.socket = self.path / "weaver.sock"
        self._link = self.path / "link.json"

    def is_there(self) -> bool:
        """Return whether the opened folder still exists, and no other folder has taken its place."""
        try:
            found = os.stat(self.path / "lock")
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._lock))

    def remembered(self) -> WeaverAddress | None:
        """Return the address of the previous weaver, or None if there was none."""
        try:
            found = json.loads(self._link.read_text())
            return WeaverAddress(str(found["host"]), int(found["port"]), str(found["key"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def remember(self, address: WeaverAddress) -> None:
        fresh = self._link.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(address._asdict(), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._link)

    @staticmethod
    def new_key() -> str:
        """Return a key with 256 bits of randomness."""
        return secrets.token_urlsafe(32)
