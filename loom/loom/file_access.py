"""`FileAccess`: reading and writing files for a copy between two machines. Both ends use it.

A file gets its name when it is whole: until then it has a hidden one beside it, ``.NAME.loom-…``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from typing import Any, NamedTuple

from loom.errors import Denied, LoomError, NotFound, WrongState

FILE, FOLDER, LINK, OTHER = "file", "folder", "link", "other"
"""The kinds of `FileEntry`."""


class FileEntry(NamedTuple):
    """A file, a folder, or what else has a name in a folder."""

    name: str
    kind: str
    mode: int
    """The permissions."""
    size: int
    """Bytes of a file."""
    target: str
    """What a symbolic link says."""


class FileProblem(NamedTuple):
    """An `OSError`, as it travels."""

    number: int | None
    text: str
    path: str


class FileAccess:
    """The files of this machine, for one copy. Methods raise `OSError` with the path."""

    def __init__(self) -> None:
        self._unfinished: dict[str, tuple[str, int]] = {}  # hidden path and descriptor, by the path

    def look(self, path: str) -> tuple[str, FileEntry]:
        """Return the absolute path of what a path leads to, through symbolic links, and what it is."""
        found = os.path.abspath(os.path.expanduser(path))
        return found, _entry(os.path.basename(found), os.stat(found), "")

    def list(self, path: str) -> list[FileEntry]:
        """Return what is in a folder, by name, without following symbolic links."""
        found = []
        for name in sorted(os.listdir(path)):
            inside = os.path.join(path, name)
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                status = os.lstat(inside)
                found.append(_entry(name, status, os.readlink(inside) if stat.S_ISLNK(status.st_mode) else ""))
        return found

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return bytes of a file; fewer at its end."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)

    def destination(self, path: str, name: str) -> str:
        """Return the absolute path of a copy: the path, or a name in the folder to which the path leads."""
        found = os.path.abspath(os.path.expanduser(path))
        if os.path.isdir(found):
            return os.path.join(found, name)
        if path.endswith("/"):
            raise _error(errno.ENOENT, found)
        folder = os.path.dirname(found)
        if not os.path.isdir(folder):
            raise _error(errno.ENOTDIR if os.path.exists(folder) else errno.ENOENT, folder)
        return found

    def make_folder(self, path: str) -> None:
        """Make a folder that only its owner can use yet, unless it is there. A link to a folder is none."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise _error(errno.ENOTDIR, path) from None

    def set_mode(self, path: str, mode: int) -> None:
        os.chmod(path, mode)

    def make_link(self, path: str, target: str) -> None:
        """Make a symbolic link, in the place of a file or link that has the name."""
        hidden = _hidden(path)
        os.symlink(target, hidden)
        try:
            os.replace(hidden, path)
        except BaseException:
            os.unlink(hidden)
            raise

    def begin(self, path: str) -> None:
        """Begin a file, under a hidden name."""
        hidden = _hidden(path)
        try:
            descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _error(error.errno, path) from None
        self._unfinished[path] = hidden, descriptor

    def write(self, path: str, offset: int, data: bytes) -> None:
        """Write bytes of a file that was begun."""
        _, descriptor = self._unfinished[path]
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise _error(error.errno, path) from None

    def finish(self, path: str, mode: int) -> None:
        """Give a file that was begun its permissions and its name."""
        hidden, descriptor = self._unfinished[path]
        try:
            os.fchmod(descriptor, mode)
            os.replace(hidden, path)
        except OSError as error:
            raise _error(error.errno, path) from None
        del self._unfinished[path]
        os.close(descriptor)

    def close(self) -> None:
        """Remove the files that were begun and not finished."""
        while self._unfinished:
            hidden, descriptor = self._unfinished.popitem()[1]
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(hidden)


METHODS = frozenset(
    ("look", "list", "read", "destination", "make_folder", "set_mode", "make_link", "begin", "write", "finish")
)
"""The methods of `FileAccess` that another machine may ask for."""


def attempt(work: Callable[[], Any]) -> Any:
    """Return a result, or the `FileProblem` in its place."""
    try:
        return work()
    except OSError as error:
        return FileProblem(error.errno, error.strerror or str(error), os.fspath(error.filename or ""))
    except (ValueError, KeyError) as error:  # a path with a zero byte; a file that was not begun
        return FileProblem(errno.EINVAL, str(error), "")


def checked(answer: Any, where: str) -> Any:
    """Return a result of `attempt`. Raise the error that names the place and the path of a problem.

    Raises:
        NotFound: there is no such file or folder.
        Denied: its permissions do not allow it.
        WrongState: anything else, such as a full disk.
    """
    if not isinstance(answer, FileProblem):
        return answer
    kinds: dict[int | None, type[LoomError]] = {errno.ENOENT: NotFound}
    kinds |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), Denied)
    path = f" {answer.path!r}" if answer.path else ""
    raise kinds.get(answer.number, WrongState)(f"{answer.text}:{path} on {where}")


def _entry(name: str, status: os.stat_result, target: str) -> FileEntry:
    mode = status.st_mode
    kind = FILE if stat.S_ISREG(mode) else FOLDER if stat.S_ISDIR(mode) else LINK if stat.S_ISLNK(mode) else OTHER
    return FileEntry(name, kind, mode & 0o777, status.st_size if kind == FILE else 0, target)


def _hidden(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:200]}.loom-{secrets.token_hex(8)}")


def _error(number: int | None, path: str) -> OSError:
    number = errno.EIO if number is None else number
    return OSError(number, os.strerror(number), path)
