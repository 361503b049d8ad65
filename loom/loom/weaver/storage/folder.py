"""The weaver's folder: the stores of its users, its secret, its socket, and where threadlets find it.

One weaver at a time has the folder. Its lock says so within one machine. Some volumes of a network keep no locks
between machines: so each weaver that begins also writes its name into the folder, and every commit of another one
fails from then on. What that one has acknowledged was committed before, and is loaded afterwards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from loom.errors import Conflict, UnsafeStateFolder
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
    Without a ``secret`` it is the one in the folder, which is made if it is missing.
    """

    def __init__(self, path: str | Path, passable: bool = False, secret: bytes | None = None) -> None:
        self.path = Path(path).absolute()
        self.passable = passable
        hold(self.path, "weaver", "weaver.sock", passable=passable)
        for file in self.path.glob("weaver.sqlite*"):
            file.chmod(0o600)  # an earlier version left it to the folder
        self.socket = self.path / "weaver.sock"
        self._users = self.path / "users"
        self._link = self.path / "link.json"
        self._holder = self.path / "holder.json"
        self._name = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
        before = self.remembered()
        self.keys = Keys(secret or read_secret(self.path), before.key if before else None)

    def take(self) -> None:
        """Have commits of every other weaver in the folder fail. Stores opened afterwards have all before that."""
        write_json(self._holder, self._name)

    def check(self) -> None:
        """Raise `Conflict` if another weaver has taken the folder; `OSError` if it is gone or cannot be read."""
        found = self._holder.read_bytes()  # opened anew, by which a network's volume shows what others wrote
        if found != json.dumps(self._name).encode():
            raise Conflict(
                f"another weaver has taken the state folder {self.path} ({found.decode(errors='replace'):.200}). "
                f"This one ends: it has acknowledged nothing since then, and lost nothing that it had acknowledged",
                code="state_folder_in_use",
            )

    def is_there(self) -> bool:
        """Return whether the folder still exists, also if its disk does not answer. Raise as `check` does else."""
        try:
            self.check()
        except OSError:
            return not is_gone(self._holder)
        return True

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
