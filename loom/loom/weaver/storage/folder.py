"""The weaver's folder: the stores of its users, its secret, its socket, and where threadlets find it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from loom.errors import UnsafeStateFolder
from loom.process.state_file import hold, is_gone, replace_file, write_json
from loom.token_file import ADMIN
from loom.weaver.keys import Keys, read_secret

_log = logging.getLogger(__name__)

_LONGEST_NAME = 150
"""Characters of a user's folder that come from the user's name; a longer name is told apart by its hash."""


class Remembered(NamedTuple):
    """The address of the weaver before this one, and the key of an older Loom, which all threadlets shared."""

    host: str
    port: int
    key: str | None = None


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
        self.socket = self.path / "weaver.sock"
        self._users = self.path / "users"
        self._link = self.path / "link.json"
        before = self.remembered()
        self.keys = Keys(read_secret(self.path), before.key if before else None)

    def is_there(self) -> bool:
        """Return whether the opened folder still exists, and no other folder has taken its place."""
        try:
            found = os.stat(self.path / "lock")
        except OSError:
            return not is_gone(self.path / "lock")  # a disk that does not answer is not gone
        return os.path.samestat(found, os.fstat(self._lock))

    def users(self) -> Iterator[str]:
        """Yield the users that have a store."""
        yield ADMIN
        for folder in sorted(self._users.iterdir()) if self._users.is_dir() else ():
            try:
                yield (folder / "user").read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                _log.warning("the store in %s is left alone: %s", folder, error)

    def store(self, user: str) -> Path:
        """Return the path of a user's store, in a folder that exists from now on, or raise `UnsafeStateFolder`."""
        if user == ADMIN:
            return self.path / "weaver.sqlite"
        folder = self._users / _folder_name(user)
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            replace_file(folder / "user", user)
        except OSError as error:
            raise UnsafeStateFolder(f"cannot keep the weaver's state in {folder}: {error}") from error
        return folder / "weaver.sqlite"

    def remembered(self) -> Remembered | None:
        """Return where the previous weaver listened, or None if there was none."""
        try:
            found = json.loads(self._link.read_text())
            key = found.get("key")
            return Remembered(str(found["host"]), int(found["port"]), None if key is None else str(key))
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def remember(self, listens: Remembered) -> None:
        write_json(self._link, listens._asdict())


def _folder_name(user: str) -> str:
    """Return the name of a user's folder, which no other user has."""
    name = quote(user, safe="").replace(".", "%2E")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(user.encode()).hexdigest()}"
