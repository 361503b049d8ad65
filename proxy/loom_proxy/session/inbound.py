"""Hands each message that comes to whoever takes messages of its kind."""

from __future__ import annotations

from collections.abc import Callable

from loom.wire.messages import Kind, Message

__all__ = ["Inbound"]


class Inbound:
    """Subscribers by kind of message. They are called by the thread that reads from the connection."""

    def __init__(self) -> None:
        self._takers: dict[int, Callable[[Message], None]] = {}

    def on(self, kind: Kind, take: Callable[[Message], None]) -> None:
        """Have a function called with each message of a kind."""
        self._takers[int(kind)] = take

    def take(self, message: Message) -> None:
        """Hand a message on; one of a kind that nobody takes is dropped."""
        take = self._takers.get(message.kind)
        if take is not None:
            take(message)
