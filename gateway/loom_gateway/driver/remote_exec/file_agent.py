"""`FileAgent`: the actor that reads and writes files in the process of a rank, for copies."""

from __future__ import annotations

from typing import Any

from loom.actor import Actor, endpoint
from loom.file_access import FileAccess, attempt


class FileAgent(Actor):
    """An actor apart from `RankAgent`, in a thread of its own, so that a slow disk holds up no terminal."""

    def __init__(self) -> None:
        self._copies: dict[str, FileAccess] = {}

    @endpoint
    def begin(self, handle: str) -> None:
        self._copies[handle] = FileAccess()

    @endpoint
    def do(self, handle: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Return the result of a method of `FileAccess`, or a `loom.file_access.FileProblem`."""
        return attempt(lambda: getattr(self._copies[handle], method)(*arguments))

    @endpoint
    def end(self, handle: str) -> None:
        """Remove the files of a copy that were begun and not finished."""
        copy = self._copies.pop(handle, None)
        if copy is not None:
            copy.close()
