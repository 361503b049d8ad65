"""Resuming a page's lost socket: positions, and the newest messages of a feed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

MAX_MESSAGES = 5000
"""Messages of one feed that are kept."""

MAX_SIZE = 4 << 20
"""Characters of these messages together."""


class Since(NamedTuple):
    """The last message that a page took, before its socket was lost."""

    feed: str
    at: int

    @classmethod
    def read(cls, text: str | None) -> Since | None:
        """Return what the ``since`` of an address says, ``FEED.POSITION``; None if it makes no sense."""
        found = re.fullmatch(r"([0-9a-f]{1,64})\.([0-9]{1,18})", text or "")
        return None if found is None else cls(found[1], int(found[2]))


class KeptMessages:
    """The newest messages of a feed, by position."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, str]] = deque()
        self._size = 0
        self.begins = 0
        """The position after which every message is kept."""

    def begin(self, at: int) -> None:
        """Keep the messages after a position."""
        self._kept.clear()
        self._size, self.begins = 0, at

    def add(self, at: int, text: str) -> None:
        self._kept.append((at, text))
        self._size += len(text)
        while len(self._kept) > MAX_MESSAGES or self._size > MAX_SIZE:
            self.begins, oldest = self._kept.popleft()
            self._size -= len(oldest)

    def after(self, at: int) -> Iterator[tuple[int, str]]:
        """Yield the position and the text of each kept message after a position."""
        return ((position, text) for position, text in self._kept if position > at)
