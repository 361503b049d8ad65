"""Copies of files and folders between this machine and a rank's."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from loom.errors import FileChanged, LoomError, WrongArguments, WrongState
from loom.file_access import FILE, FOLDER, LINK, FileAccess, FileEntry, attempt, checked
from loom_proxy.ranks.place import RankPlace

PIECE = 256 << 10
"""Bytes of a file in one message."""

AHEAD = 16
"""Pieces that are read before the first of them is written, and as many that are being written."""

T = TypeVar("T")


class Progress(NamedTuple):
    """How far a copy is."""

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
        self._access = FileAccess()

    def do(self, method: str, *arguments: Any) -> Callable[[], Any]:
        answer = attempt(lambda: getattr(self._access, method)(*arguments))
        return lambda: checked(answer, "this machine")

    def close(self) -> None:
        self._access.close()


class _There:
    """The files of a rank's host."""

    def __init__(self, place: RankPlace, operation: str, path: str, away: float) -> None:
        self._place = place
        self._handle = place.ask(operation, path, away).get()

    def do(self, method: str, *arguments: Any) -> Callable[[], Any]:
        answer = self._place.ask("file", self._handle, method, *arguments)
        return lambda: checked(answer.get(), self._place.name)

    def close(self) -> None:
        with contextlib.suppress(LoomError):
            self._place.ask("end", self._handle).get()


def copy_to(
    place: RankPlace, source: str, path: str, on_progress: Callable[[Progress], object], away: float
) -> str:
    """Copy from this machine to a rank's; return the absolute path of the copy."""
    with contextlib.closing(_Here()) as here, contextlib.closing(_There(place, "copy_to", path, away)) as there:
        return _copy(here, there, source, path, on_progress)


def copy_from(
    place: RankPlace, source: str, path: str, on_progress: Callable[[Progress], object], away: float
) -> str:
    """Copy from a rank's machine to this one; return the absolute path of the copy."""
    with contextlib.closing(_Here()) as here, contextlib.closing(_There(place, "copy_from", source, away)) as there:
        return _copy(there, here, source, path, on_progress)


class _Step(NamedTuple):
    """A thing to make: a folder, a link, or a piece of a file."""

    path: str
    entry: FileEntry
    offset: int = 0
    data: Callable[[], bytes] = bytes


def _copy(
    source: _Files, sink: _Files, path: str, destination: str, on_progress: Callable[[Progress], object]
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
        on_progress(Progress(files, size))
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
    if entry.kind == FOLDER:
        yield _Step(copy, entry)
        for inside in source.do("list", original)():
            if not inside.name or inside.name in (".", "..") or "/" in inside.name:
                raise WrongState(f"{original!r} has an entry {inside.name!r:.80}, which is no name of a file")
            yield from _steps(source, os.path.join(original, inside.name), os.path.join(copy, inside.name), inside)
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
