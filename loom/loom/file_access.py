"""`FileAccess`: reading and writing files for a copy between two machines. Both ends use it.

A file gets its name when it is whole: until then it has a hidden one beside it, ``.NAME.loom-…``. Nothing is
written outside of the copy, whatever paths the other machine names: the way down from its folder follows no link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from loom.errors import Denied, LoomError, NotFound, WrongState

FILE, FOLDER, LINK, OTHER = "file", "folder", "link", "other"
"""The kinds of `FileEntry`."""

# Windows, where `loom.connect` works and copies do not, lacks the flags.
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_TO_PASS = getattr(os, "O_PATH", os.O_RDONLY)  # needs no right to read the folder


class FileEntry(NamedTuple):
    """A file, a folder, or what else has a name in a folder."""

    name: str
    kind: str
    mode: int
    """The permissions."""
    size: int
    """Bytes of a file."""
    target: str
    """The target of a symbolic link."""


class FileProblem(NamedTuple):
    """An `OSError`, as it travels."""

    number: int | None
    text: str
    path: str


class _Unfinished(NamedTuple):
    """A file that was begun."""

    hidden: str
    """Its name until it is whole."""
    folder: int
    """The descriptor of its folder."""
    descriptor: int


class FileAccess:
    """The files of this machine, for one copy. Methods raise `OSError` with the path.

    Args:
        umask: the permissions that nothing written gets, whatever the original has.
    """

    def __init__(self, umask: int = 0) -> None:
        self._permitted = 0o777 & ~umask
        self._unfinished: dict[str, _Unfinished] = {}  # by the path
        self._made: set[str] = set()  # the folders that this copy has made
        self._copy = ""  # the absolute path of the copy, outside of which nothing is written
        self._folder = -1  # the descriptor of the folder in which the copy is

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
            if not is_name(name):
                raise _error(errno.EINVAL, name)
            return self._settle(os.path.join(found, name))
        if path.endswith("/"):
            raise _error(errno.ENOENT, found)
        folder = os.path.dirname(found)
        if not os.path.isdir(folder):
            raise _error(errno.ENOTDIR if os.path.exists(folder) else errno.ENOENT, folder)
        return self._settle(found)

    def make_folder(self, path: str) -> None:
        """Make a folder that only its owner can use yet, unless it is there. A link to a folder is none."""
        with self._folder_of(path) as (folder, name):
            try:
                os.mkdir(name, 0o700, dir_fd=folder)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise _error(errno.ENOTDIR, path) from None
            else:
                self._made.add(path)

    def set_mode(self, path: str, mode: int) -> None:
        """Give a folder its permissions, if this copy has made it."""
        if path not in self._made:
            return
        with self._folder_of(path) as (folder, name):
            descriptor = os.open(name, os.O_RDONLY | _FOLDER, dir_fd=folder)
            try:
                os.fchmod(descriptor, mode & self._permitted)
            finally:
                os.close(descriptor)

    def make_link(self, path: str, target: str) -> None:
        """Make a symbolic link, in the place of a file or link that has the name."""
        with self._folder_of(path) as (folder, name):
            hidden = _hidden(name)
            os.symlink(target, hidden, dir_fd=folder)
            try:
                os.replace(hidden, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(hidden, dir_fd=folder)
                raise

    def begin(self, path: str) -> None:
        """Begin a file, under a hidden name."""
        with self._folder_of(path) as (folder, name):
            hidden = _hidden(name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(hidden, flags, 0o600, dir_fd=folder)
            self._unfinished[path] = _Unfinished(hidden, os.dup(folder), descriptor)

    def write(self, path: str, offset: int, data: bytes) -> None:
        """Write bytes of a file that was begun."""
        descriptor = self._unfinished[path].descriptor
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise _error(error.errno, path) from None

    def finish(self, path: str, mode: int) -> None:
        """Give a file that was begun its permissions and its name."""
        hidden, folder, descriptor = self._unfinished[path]
        try:
            os.fchmod(descriptor, mode & self._permitted)
            os.replace(hidden, os.path.basename(path), src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            raise _error(error.errno, path) from None
        del self._unfinished[path]
        os.close(descriptor)
        os.close(folder)

    def close(self) -> None:
        """Remove the files that were begun and not finished."""
        while self._unfinished:
            hidden, folder, descriptor = self._unfinished.popitem()[1]
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(hidden, dir_fd=folder)
            os.close(folder)
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _settle(self, copy: str) -> str:
        """Open the folder of the copy, to which links may lead: the user named it."""
        folder = os.open(os.path.dirname(copy), _TO_PASS | os.O_DIRECTORY | os.O_CLOEXEC)
        if self._folder >= 0:
            os.close(self._folder)
        self._copy, self._folder = copy, folder
        return copy

    @contextlib.contextmanager
    def _folder_of(self, path: str) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the folder of a path in the copy, and the name in it. Errors name the path."""
        if self._folder < 0:
            self._settle(path)
        inside = path[len(self._copy) :]
        names = [os.path.basename(self._copy), *inside.split("/")[1:]]
        if not path.startswith(self._copy) or inside[:1] not in ("", "/") or not all(map(is_name, names)):
            raise _error(errno.EINVAL, path)
        descriptor = os.dup(self._folder)
        try:
            for name in names[:-1]:
                inner = os.open(name, _TO_PASS | _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor, names[-1]
        except OSError as error:
            raise _error(error.errno, path) from None
        finally:
            os.close(descriptor)


def is_name(name: object) -> bool:
    """Return whether something can be the name of a file, and leads nowhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


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


def _hidden(name: str) -> str:
    return f".{name[:50]}.loom-{secrets.token_hex(8)}"


def _error(number: int | None, path: str) -> OSError:
    number = errno.EIO if number is None else number
    return OSError(number, os.strerror(number), path)
