"""Copies of files and folders between this machine and a rank's.

The answers of a rank's machine decide nothing on this machine but the content of the copy: `_Received`
checks it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple, Protocol, TypeVar

from loom.errors import FileChanged, LoomError, WrongArguments, WrongState
from loom.file_access import FILE, FOLDER, LINK, OTHER, FileAccess, FileEntry, attempt, checked, is_name
from loom.terminal_text import fit_line
from loom_proxy.remote_exec.rank import RankProcess

PIECE = 256 << 10
"""Bytes of a file in one message."""

DEEPEST = 128
"""Folders in one another in a copy, at most: another machine may tell of folders without an end."""

AHEAD = 16
"""Pieces that are read before the first of them is written, and as many that are being written."""

T = TypeVar("T")


class CopyProgress(NamedTuple):
    """The progress of a copy."""

    files: int
    """The number of files that were copied."""
    size: int
    """The bytes that were copied."""


class _Files(Protocol):
    """The files of one machine."""

    def do(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Begin a method of `FileAccess`; return what waits for its result, or raises its error."""


class _Here:
    """The files of this machine."""

    def __init__(self) -> None:
        self._access = FileAccess(_umask())

    def do(self, method: str, *arguments: Any) -> Callable[[], Any]:
        answer = attempt(lambda: getattr(self._access, method)(*arguments))
        return lambda: checked(answer, "this machine")

    def close(self) -> None:
        self._access.close()


class _There:
    """The files of a rank's host."""

    def __init__(self, process: RankProcess, operation: str, path: str, away: float) -> None:
        self._process = process
        self._handle = process.ask(operation, path, away).get()

    def do(self, method: str, *arguments: Any) -> Callable[[], Any]:
        answer = self._process.ask("file", self._handle, method, *arguments)
        return lambda: checked(answer.get(), self._process.name)

    def close(self) -> None:
        with contextlib.suppress(LoomError):
            self._process.ask("end", self._handle).get()


class _Received:
    """The files of a rank's host, with everything checked that it says of them."""

    def __init__(self, files: _Files) -> None:
        self._files = files
        self._root = ""

    def do(self, method: str, *arguments: Any) -> Callable[[], Any]:
        answer = self._files.do(method, *arguments)
        return lambda: getattr(self, f"_{method}")(answer(), *arguments)

    def _look(self, answer: Any, path: str) -> tuple[str, FileEntry]:
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], str)):
            raise _no_answer("what it is", path)
        entry = _entry(answer[1], path)
        if entry.kind == LINK:
            raise _no_answer("where a link leads", path)
        # The name that the caller wrote decides what the copy is called, if it is one.
        written = os.path.basename(path.rstrip("/"))
        if is_name(written) and not written.startswith("~"):
            entry = entry._replace(name=written)
        elif entry.name and (not is_name(entry.name) or _has_controls(entry.name)):
            raise WrongState(f"{path!r} is called {entry.name!r:.80} there, which is no name of a file here")
        self._root = answer[0]
        return answer[0], entry

    def _list(self, answer: Any, path: str) -> list[FileEntry]:
        if not isinstance(answer, list):
            raise _no_answer("what is in the folder", path)
        entries, names = [_entry(each, path) for each in answer], set()
        for entry in entries:
            if not is_name(entry.name) or _has_controls(entry.name) or entry.name in names:
                raise WrongState(f"{path!r} has an entry {entry.name!r:.80}, which is no name of a file here")
            if entry.kind == LINK and _leads_out(entry.target, path[len(self._root) :].count("/")):
                raise WrongState(
                    f"{os.path.join(path, entry.name)!r} leads to {entry.target!r:.200}, out of what is copied: "
                    f"copy that by its own name"
                )
            names.add(entry.name)
        return entries

    def _read(self, answer: Any, path: str, offset: int, size: int) -> bytes:
        if not isinstance(answer, bytes) or len(answer) > size:
            raise _no_answer(f"{size} bytes", path)
        return answer


def _entry(said: Any, path: str) -> FileEntry:
    """Return an entry that another machine has said. Raise `WrongState` if it is none."""
    try:
        name, kind, mode, size, target = said
    except (TypeError, ValueError):
        raise _no_answer("what it is", path) from None
    texts = all(isinstance(each, str) for each in (name, target)) and kind in (FILE, FOLDER, LINK, OTHER)
    if not texts or not all(type(each) is int and each >= 0 for each in (mode, size)):
        raise _no_answer("what it is", path)
    return FileEntry(name, kind, mode & 0o777, size, target)


def _has_controls(name: str) -> bool:
    """Return whether a name has characters that a terminal obeys; bytes that are no UTF-8 are none."""
    plain = os.fsencode(name).decode(errors="replace")
    return fit_line(plain) != plain


def _no_answer(wanted: str, path: str) -> WrongState:
    return WrongState(f"the rank's machine was asked for {wanted} of {path!r:.200}, and said something else")


def _leads_out(target: str, depth: int) -> bool:
    """Return whether a link so many folders deep in a copy leads out of the copy.

    Its way up is counted from its own folder, to which no link leads. After a name, ``..`` would go up from
    wherever that name leads.
    """
    names = [name for name in target.split("/") if name not in ("", ".")]
    rises = len(list(itertools.takewhile(lambda name: name == "..", names)))
    return not target or target.startswith("/") or "\0" in target or rises > depth or ".." in names[rises:]


def _umask() -> int:
    """Return this process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def copy_to(
    process: RankProcess, source: str, path: str, on_progress: Callable[[CopyProgress], object], away: float
) -> str:
    """Copy from this machine to a rank's; return the absolute path of the copy."""
    with closing(_Here()) as here, closing(_There(process, "copy_to", path, away)) as there:
        return _copy(here, there, source, path, on_progress)


def copy_from(
    process: RankProcess, source: str, path: str, on_progress: Callable[[CopyProgress], object], away: float
) -> str:
    """Copy from a rank's machine to this one; return the absolute path of the copy."""
    with (
        contextlib.closing(_Here()) as here,
        contextlib.closing(_There(process, "copy_from", source, away)) as there,
    ):
        return _copy(_Received(there), here, source, path, on_progress)


class _Step(NamedTuple):
    """A thing to make: a folder, a link, or a piece of a file."""

    path: str
    entry: FileEntry
    offset: int = 0
    data: Callable[[], bytes] = bytes


def _copy(
    source: _Files, sink: _Files, path: str, destination: str, on_progress: Callable[[CopyProgress], object]
) -> str:
    found, entry = source.do("look", path)()
    copied: str = sink.do("destination", destination, entry.name or "root")()
    writing: deque[Callable[[], Any]] = deque()
    made: list[_Step] = []  # links and the modes of folders come last
    files = size = 0

    def begin(method: str, *arguments: Any) -> None:
        writing.append(sink.do(method, *arguments))
        while len(writing) > AHEAD:
            writing.popleft()()

    for step in _ahead(_steps(source, found, copied, entry)):
        if step.entry.kind != FILE:
            made.append(step)
            if step.entry.kind == FOLDER:
                begin("make_folder", step.path)
            continue
        data = step.data()
        expected = min(PIECE, step.entry.size - step.offset)
        if len(data) < expected:
            raise FileChanged(f"{step.entry.name!r} became shorter while it was copied: copy it again")
        if step.offset == 0:
            begin("begin", step.path)
        begin("write", step.path, step.offset, data)
        size += len(data)
        if step.offset + len(data) >= step.entry.size:
            begin("finish", step.path, step.entry.mode)
            files += 1
        on_progress(CopyProgress(files, size))
    for step in made:
        if step.entry.kind == LINK:
            begin("make_link", step.path, step.entry.target)
    for step in reversed(made):
        if step.entry.kind == FOLDER:
            begin("set_mode", step.path, step.entry.mode)
    while writing:
        writing.popleft()()
    return copied


def _steps(source: _Files, original: str, copy: str, entry: FileEntry) -> Iterator[_Step]:
    top = copy
    ahead = deque([(original, copy, entry)])  # the folder that is gone through has its entries first
    while ahead:
        original, copy, entry = ahead.popleft()
        if copy[len(top) :].count("/") > DEEPEST:
            raise WrongState(f"{original:.200}… is more than {DEEPEST} folders deep: copy a folder in it")
        if entry.kind == FOLDER:
            yield _Step(copy, entry)
            inside = source.do("list", original)()
            ahead.extendleft(
                (os.path.join(original, one.name), os.path.join(copy, one.name), one) for one in reversed(inside)
            )
        elif entry.kind == LINK:
            yield _Step(copy, entry)
        elif entry.kind == FILE:
            for offset in range(0, max(1, entry.size), PIECE):
                length = min(PIECE, entry.size - offset)
                yield _Step(copy, entry, offset, source.do("read", original, offset, length))
        else:
            raise WrongArguments(f"{original!r} is neither a file nor a folder nor a link, and cannot be copied")


def _ahead(steps: Iterable[T]) -> Iterator[T]:
    """Yield what an iterator yields, with some taken from it before."""
    iterator = iter(steps)
    taken = deque(itertools.islice(iterator, AHEAD))
    while taken:
        yield taken.popleft()
        taken.extend(itertools.islice(iterator, 1))
