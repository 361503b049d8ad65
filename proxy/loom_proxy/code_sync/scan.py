"""Reading a project folder: the choice of files to ship, and their digests."""

from __future__ import annotations

import hashlib
import itertools
import os
import posixpath
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from loom.errors import FileChanged, Invalid, NotAFolder, UnreadableFile
from loom.manifest import TreeEntry

_NEVER = frozenset({".git", "__pycache__"})

_SETTLED = 2.0
"""Seconds after which a file's modification time identifies its content: some file systems' clocks are coarse."""

_READ = 1 << 20


class FoundFile(NamedTuple):
    """A file or a link of the folder."""

    path: str  # path relative to the folder, with slashes
    place: str  # absolute path
    size: int  # bytes; 0 for a link
    executable: bool
    target: str  # the target of a link, relative to the link's folder; empty for a file
    seen: tuple[int, int, int, int] = (0, 0, 0, 0)  # a file's device, inode, time of modification (ns) and size


@dataclass
class Found:
    """The contents of a folder that are shipped."""

    files: list[FoundFile] = field(default_factory=list)
    skipped: int = 0  # files and folders that are left out; a folder counts as one
    warnings: list[str] = field(default_factory=list)


class _Rules:
    """The patterns of one ``.gitignore``.

    Args:
        lines: lines of the file.
        below: the file's folder, relative to the synced folder, with a slash behind it.
        above: the path from a file above the synced folder to the synced folder.
    """

    def __init__(self, lines: Sequence[str], below: str = "", above: str = "") -> None:
        self._below = below
        self._above = above
        self._patterns = [
            pattern for pattern in GitIgnoreSpec.from_lines(lines).patterns if pattern.include is not None
        ]
        self._patterns.reverse()

    def verdict(self, path: str, is_folder: bool) -> bool | None:
        """Return whether a file or folder is ignored; None if no pattern matches it."""
        path = self._above + path[len(self._below) :]
        if is_folder:
            path += "/"
        for pattern in self._patterns:
            if _speaks_of(pattern, path):
                return bool(pattern.include)
        return None


def _speaks_of(pattern: object, path: str) -> bool:
    """Return whether a pattern matches a path itself, and not only a folder above it or the contents of a folder.

    pathspec also matches all files below a matching folder. It marks the slash behind that folder. An unmarked
    slash at the end of a pattern, as in ``a/**``, needs a name behind it.
    """
    for match in pattern.regex.finditer(path):  # type: ignore[attr-defined]
        marked = match.groupdict().get("ps_d") is not None
        at_end = match.end("ps_d" if marked else 0) == len(path)
        if at_end if marked else not (at_end and path.endswith("/")):
            return True
    return False


def _rules_in(folder: str, below: str = "", above: str = "") -> list[_Rules]:
    place = os.path.join(folder, ".gitignore")
    try:
        with open(place, encoding="utf-8", errors="surrogateescape") as file:
            return [_Rules(file.read().splitlines(), below, above)]
    except (FileNotFoundError, IsADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(place, error) from error


def _rules_above(folder: str) -> list[_Rules]:
    """Return the rules of the folders above, up to the top of the repository; none if they ignore the folder."""
    above: list[str] = []
    top = folder
    while not os.path.lexists(os.path.join(top, ".git")):
        top, last = os.path.split(top)
        if not last:
            return []  # in no repository
        above.append(top)
    rules: list[_Rules] = []
    for parent in reversed(above):
        below = os.path.relpath(folder, parent).replace(os.sep, "/")
        parts = below.split("/")
        for rule in _rules_in(parent):
            if any(rule.verdict("/".join(parts[: n + 1]), True) for n in range(len(parts))):
                return []
        rules += _rules_in(parent, above=below + "/")
    return rules


def find_files(folder: str, exclude: Sequence[str] = ()) -> Found:
    """Return the files of a folder that are shipped.

    Left out are files that ``.gitignore`` files name (in the folder, and above it in the same repository),
    ``.git``, ``__pycache__``, ``*.pyc``, virtual environments, and everything but files, folders and links.
    The folder is an absolute path without symbolic links.
    """
    if not os.path.isdir(folder):
        raise NotAFolder(f"{folder} is {'a file' if os.path.exists(folder) else 'not there'}: sync takes a folder")
    found = Found()
    _walk(folder, folder, "", _rules_above(folder), _Rules(exclude), found)
    return found


def _walk(root: str, folder: str, below: str, rules: list[_Rules], exclude: _Rules, found: Found) -> None:
    rules = rules + _rules_in(folder, below)
    for item in _listed(folder):
        path = below + item.name
        is_link = item.is_symlink()
        is_folder = not is_link and item.is_dir()
        if _left_out(item, is_folder) or _ignored(path, is_folder, rules, exclude):
            found.skipped += 1
        elif is_folder:
            _walk(root, item.path, path + "/", rules, exclude, found)
        elif is_link:
            found.files.append(_link(root, path, item.path))
        elif item.is_file(follow_symlinks=False):
            found.files.append(_file(path, item))
        else:
            found.skipped += 1
            found.warnings.append(f"{path} is left out: it is neither a file nor a folder")


def _listed(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return sorted(items, key=lambda item: item.name)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _left_out(item: os.DirEntry[str], is_folder: bool) -> bool:
    if item.name in _NEVER or item.name.endswith(".pyc"):
        return True
    return is_folder and os.path.exists(os.path.join(item.path, "pyvenv.cfg"))


def _ignored(path: str, is_folder: bool, rules: list[_Rules], exclude: _Rules) -> bool:
    verdict = exclude.verdict(path, is_folder)
    for rule in reversed(rules):
        if verdict is not None:
            break
        verdict = rule.verdict(path, is_folder)
    return bool(verdict)


def _file(path: str, item: os.DirEntry[str]) -> FoundFile:
    _check_name(path)
    status = item.stat(follow_symlinks=False)
    return FoundFile(path, item.path, status.st_size, bool(status.st_mode & stat.S_IXUSR), "", _seen(status))


def _link(root: str, path: str, place: str) -> FoundFile:
    _check_name(path)
    target = os.readlink(place)
    try:
        os.stat(place)
    except FileNotFoundError:
        pass  # a dangling link may be intended
    except OSError as error:
        raise Invalid(
            f"the link {path} leads in circles, to {target}: remove it or exclude=[{path!r}]", code="unsafe_link"
        ) from error
    resolved = os.path.realpath(place)
    if resolved != root and not resolved.startswith(root + os.sep):
        raise Invalid(
            f"the link {path} leads outside of {root}, to {target}: copy what it leads to into the folder, or "
            f"exclude=[{path!r}]",
            code="unsafe_link",
        )
    here = os.path.dirname(place)
    if os.path.isabs(target):
        target = os.path.relpath(resolved, here)
    relative = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if relative.split("/")[0] == "..":  # the link leads back inside by way of a folder outside
        target = os.path.relpath(resolved, here)
    _check_name(target)
    return FoundFile(path, place, 0, False, target)


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise UnreadableFile(f"the name {path!r} is not UTF-8: rename it, or leave it out") from error


def _unreadable(place: str, error: OSError) -> UnreadableFile:
    return UnreadableFile(f"{place} cannot be read ({error.strerror}): leave it out with exclude=[…]")


_digests: dict[tuple[int, int, int, int], str] = {}
"""Digests of files by `FoundFile.seen`. It grows with the number of synced files."""


def hash_files(files: Sequence[FoundFile], advance: Callable[[int], None]) -> Iterator[TreeEntry]:
    """Yield the manifest's entries for files, in order; call ``advance`` with each number of bytes that is done."""
    pool = ThreadPoolExecutor(4, "loom-hash")
    try:
        known = [_digests.get(file.seen) for file in files]
        unknown = (file for file, found in zip(files, known, strict=True) if not (found or file.target))
        read = pool.map(_digest, unknown, itertools.repeat(advance))
        for file, found in zip(files, known, strict=True):
            if file.target:
                yield TreeEntry(file.path, target=file.target)
            elif found:
                advance(file.size)
                yield TreeEntry(file.path, found, file.size, file.executable)
            else:
                content, size = next(read)
                yield TreeEntry(file.path, content, size, file.executable)
    finally:
        pool.shutdown(cancel_futures=True)


def _digest(file: FoundFile, advance: Callable[[int], None]) -> tuple[str, int]:
    with UnchangedFile(file) as reading:
        status = os.fstat(reading.fileno())
        found = hashlib.sha256()
        while piece := reading.read(_READ):
            found.update(piece)
        reading.check()
    # A file changed this moment might be changed again within the same tick of its file system's clock.
    if time.time() - status.st_mtime > _SETTLED:
        _digests[_seen(status)] = found.hexdigest()
    advance(status.st_size)
    return found.hexdigest(), status.st_size


def _seen(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


class UnchangedFile:
    """A file that must not change while it is read; `check` raises an error if it has."""

    def __init__(self, file: FoundFile) -> None:
        self._path = file.path
        try:
            # Without waiting, since a FIFO may have taken the file's place.
            descriptor = os.open(file.place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise FileChanged(f"{file.path} was removed while the folder was being read: sync again") from error
        except OSError as error:
            raise _unreadable(file.place, error) from error
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        self._before = os.fstat(descriptor)

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self, count: int) -> bytes:
        """Return up to ``count`` bytes; none at the end."""
        try:
            return self._file.read(count) or b""
        except OSError as error:
            raise _unreadable(self._path, error) from error

    def check(self) -> None:
        """Raise `FileChanged` if the file has changed since it was opened."""
        now, before = os.fstat(self.fileno()), self._before
        if (now.st_mtime_ns, now.st_size) != (before.st_mtime_ns, before.st_size):
            raise self.changed()

    def changed(self) -> FileChanged:
        return FileChanged(f"{self._path} was changed while it was being read. Nothing was synced: sync again")

    def __enter__(self) -> UnchangedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
