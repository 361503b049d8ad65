"""`Strangers`: the connections of a listening socket that have not shown a key, bounded in number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")


class Strangers(Generic[C]):
    """The connections without a key, of which the oldest is cut off when there are too many.

    Who knows the key shows it at once, so whoever holds connections cuts off its own.

    Args:
        most: the number of connections.
        cut: closes a connection at once.
    """

    def __init__(self, most: int, cut: Callable[[C], object]) -> None:
        self._most = most
        self._cut = cut
        self._waiting: dict[C, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, connection: C) -> None:
        """Add a new connection, after cutting off the oldest if there are as many as there may be."""
        if len(self._waiting) >= self._most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._cut(oldest)
        self._waiting[connection] = None

    def discard(self, connection: C) -> None:
        """Forget a connection, which has shown the key or is over."""
        self._waiting.pop(connection, None)

    def cut_all(self) -> None:
        """Cut off every connection."""
        for connection in list(self._waiting):
            self._cut(connection)
