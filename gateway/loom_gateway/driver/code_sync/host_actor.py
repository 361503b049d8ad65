"""The actor that keeps synchronised folders on a host.

A session has one on each host, in a process of its own, which imports this module and no handler.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import NamedTuple

from loom.actor import Actor, endpoint
from loom.manifest import Manifest, Span
from loom_gateway.driver.code_sync.cache import BlobsMissing, Hold, TreeCache
from loom_gateway.driver.code_sync.sys_path import shadowed

HELD = 16  # newest trees that the agent keeps; processes that use a tree hold it themselves


class FilePart(NamedTuple):
    """A part of a content."""

    digest: str
    size: int  # bytes of the whole content
    offset: int
    data: bytes


class Assembled(NamedTuple):
    """The result of assembling a tree."""

    place: str  # folder that contains the tree; empty if contents are missing
    missing: list[str]  # digests of the missing contents
    shadowed: list[str]  # a sentence for each installed module that the tree hides


class TreeAgent(Actor):
    """Puts trees into the cache of its machine."""

    def __init__(self) -> None:
        self._cache = TreeCache.of_this_machine()
        self._held: deque[Hold] = deque()  # the newest trees, so that they are not trimmed
        self._has_grown = False  # whether contents arrived since the last trim

    @endpoint
    def put(self, upload: str, pieces: list[FilePart]) -> None:
        for piece in pieces:
            self._cache.receive(upload, *piece)
        self._has_grown = True

    @endpoint
    def give(self, spans: list[Span]) -> list[FilePart]:
        """Return pieces of contents, as far as this machine has them."""
        found = []
        for digest, size, offset, count in spans:
            with contextlib.suppress(BlobsMissing):
                found.append(FilePart(digest, size, offset, self._cache.read(digest, size, offset, count)))
        return found

    @endpoint
    def assemble(self, packed: bytes) -> Assembled:
        manifest = Manifest.unpack(packed)
        self._cache.check_fits(manifest.size)
        try:
            hold = self._cache.assemble(manifest)
        except BlobsMissing as lacking:
            return Assembled("", lacking.digests, [])
        self._held.append(hold)
        if len(self._held) > HELD:
            self._held.popleft().close()
        if self._has_grown:
            self._cache.trim()
            self._has_grown = False
        return Assembled(str(hold.folder), [], shadowed(manifest.module_names))
