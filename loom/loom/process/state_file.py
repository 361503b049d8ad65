"""Files and folders of a process's state.

A reader of a file finds the old content or the new one, whole, also after a power cut. One process at a time holds
a folder, which only its user can open.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from loom.errors import Conflict, UnsafeStateFolder

_log = logging.getLogger("loom.process")

_OPEN_VOLUME = 0o777  # the mode of a new emptyDir of Kubernetes
LONGEST_SOCKET_PATH = 107  # bytes, on Linux; elsewhere a few less


def hold(path: Path, holder: str, socket: str, advice: str = "", passable: bool = False) -> int:
    """Create a folder if it is missing, and hold it until this process ends; return the descriptor of its lock.

    ``holder`` is the kind of process that holds it, ``socket`` the longest name of a socket in it, and ``advice``
    says how to choose another folder. With ``passable``, other user ids can open what they know the name of.
    """
    if len(os.fsencode(path / socket)) > LONGEST_SOCKET_PATH:
        longest = LONGEST_SOCKET_PATH - len(socket) - 1
        raise UnsafeStateFolder(
            f"the path of the state folder {path} is too long for a socket in it: choose one of at most {longest} "
            f"bytes{advice}"
        )
    try:
        path.parent.mkdir(0o711 if passable else 0o700, parents=True, exist_ok=True)
        path.mkdir(0o700, exist_ok=True)
        _check_is_ours(path, advice)
        _check_parents(path.absolute().parent, advice, passable)
        if passable:
            path.chmod(0o711)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UnsafeStateFolder(f"cannot keep state in {path}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise Conflict(
            f"another {holder}{f' (pid {pid})' if pid else ''} uses the state folder {path}: end it, or choose "
            f"another{advice}",
            code="state_folder_in_use",
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _check_is_ours(path: Path, advice: str) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeStateFolder(
            f"the state folder {path} is not a folder, or a link to one: name the folder itself"
        )
    if found.st_uid != os.geteuid():
        raise UnsafeStateFolder(
            f"the state folder {path} belongs to user {found.st_uid}, not to this one ({os.geteuid()}), and its "
            f"sockets may lead anywhere: choose another{advice}"
        )
    if found.st_mode & 0o7777 == _OPEN_VOLUME and not any(path.iterdir()):
        path.chmod(0o700)  # a new volume of a container, in which nobody has put anything yet
    elif found.st_mode & 0o066:
        raise UnsafeStateFolder(
            f"others can open the state folder {path} (mode {stat.S_IMODE(found.st_mode):o}): `chmod 700 {path}` "
            f"or choose another{advice}"
        )


def _check_parents(parent: Path, advice: str, passable: bool) -> None:
    """Check that no other user can put another folder in the place of one in ``parent``."""
    for place in (parent.resolve(), *parent.resolve().parents):
        found = place.stat()
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in (0, os.geteuid()):
            raise UnsafeStateFolder(
                f"the state folder is in {place}, which belongs to user {found.st_uid}, who can put another in its "
                f"place: choose one elsewhere{advice}"
            )
        # By convention a user has a group of the same number, in which nobody else is.
        own_group = found.st_gid == os.getegid() == os.geteuid()
        others = mode & (0o002 if own_group else 0o022)
        if others and not mode & stat.S_ISVTX:
            text = (
                f"others can put another folder in the place of the state folder, because they can write to "
                f"{place} (mode {mode:o}): `chmod +t {place}`, or choose another folder{advice}"
            )
            # A container's volume is often open to all, and all processes in the container are of one user.
            if passable or not place.is_mount():
                raise UnsafeStateFolder(text)
            _log.warning("%s", text)
        if passable and not mode & 0o001:
            raise UnsafeStateFolder(
                f"drivers with user ids of their own cannot reach the state folder, because {place} is closed to "
                f"them (mode {mode:o}): choose one elsewhere{advice}, such as /var/lib/loom"
            )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file that several processes replace. Its folder is made if it is missing.

    A missing folder raises `OSError` if it cannot be made; so does a lock that cannot be opened.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The lock is a separate file: the file is replaced, and a lock on a replaced file excludes no process.
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(lock, "wb"):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_json(path: str | os.PathLike[str], value: object, mode: int = 0o600) -> None:
    """Replace a file by the JSON of a value, which may contain dataclasses."""
    replace_file(path, json.dumps(value, default=asdict), mode)


def replace_file(path: str | os.PathLike[str], content: str | bytes, mode: int = 0o600) -> None:
    """Replace a file, or make it. By default only this user can read it."""
    folder, name = os.path.split(os.path.abspath(path))
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
    try:
        os.fchmod(descriptor, mode)
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_folder(folder)


def is_gone(path: str | os.PathLike[str]) -> bool:
    """Return whether there is no such file. A file hidden by an I/O error is not gone."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Sync the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folders(*, shared: bool = True) -> Iterator[Path]:
    """Yield the folders that may be this machine's cache, the best first: ``LOOM_CACHE``, or the user's.

    Args:
        shared: whether one in the home is among them, which other machines may share.
    """
    chosen = os.environ.get("LOOM_CACHE")
    if chosen:
        yield Path(chosen).absolute()
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if shared and os.path.isabs(home):
        yield Path(home) / "loom"
    yield Path(tempfile.gettempdir()) / f"loom-cache-{os.geteuid()}"
