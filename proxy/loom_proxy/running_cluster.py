"""The cluster that ``loom up`` runs on this machine, for this user's other programs, which then need no address.

Its address and token are in a file beside the contexts, which is locked as long as the cluster runs: the file that
a killed one has left behind is unlocked, and counts as none. Only this user can read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path


def path_beside(contexts: Path) -> Path:
    """Return the path of the file that lies beside a file of contexts."""
    return contexts.with_name("up.json")


@contextlib.contextmanager
def announced(path: Path, url: str, token: str) -> Iterator[bool]:
    """Let other programs find a cluster until the end of the block; yield False if they find another one.

    A file that cannot be written is no reason to end: whoever needs the address sees it on the terminal.
    """
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"url": url, "token": token}).encode(), 0)
        except OSError:
            yield False
            return
        held.callback(path.unlink, missing_ok=True)
        yield True


def find_running(path: Path) -> tuple[str, str] | None:
    """Return the address and the token of the cluster that runs; None if none does."""
    try:
        with path.open() as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found = json.load(file)
                return str(found["url"]), str(found["token"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
