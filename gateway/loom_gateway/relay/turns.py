"""`RelayTurns`: the event loop's time, shared among users while frames come faster than they can be handled.

An event loop handles everything that a socket has before it looks at the next one, and 256 KiB of the smallest
frames take it a second. So `MESSAGES` messages of one connection are handled at once. The rest waits, and nothing
more is read from that connection. Of the connections of a user that wait, one goes on in each round of the loop:
a user who sends more waits for longer, and others do not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MESSAGES = 128
"""Messages of one connection that are handled at once: one to two milliseconds."""

SLICE = 1 << 10
"""Bytes of one connection that are parsed at once while they may be control frames, which take 6 bytes each."""


class RelayTurns:
    """The connections that wait for their turn, by user."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """What goes on with each connection that waits, the one that waits longest first."""

    def wait(self, user: str, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` in a later round of the event loop, after what waits of the same user."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._waiting.setdefault(user, deque()).append(go_on)

    async def turn(self, user: str) -> None:
        """Wait for a turn of a user."""
        mine = asyncio.get_running_loop().create_future()
        self.wait(user, lambda: None if mine.done() else mine.set_result(None))
        await mine

    def _next_round(self) -> None:
        due = [(user, of_user.popleft()) for user, of_user in self._waiting.items()]
        for user, _ in due:
            if not self._waiting[user]:
                del self._waiting[user]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_round)
        for _, go_on in due:
            go_on()
