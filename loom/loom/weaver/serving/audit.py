"""`AuditTrail`: what the drivers' sessions were asked to do to replicas and in processes of ranks.

It is for the gateway, which keeps the audit.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from itertools import islice
from typing import Any

AT_ONCE = 256
"""Entries in one answer to a gateway, whose event loop takes them."""

MAX_ENTRIES = 10_000
"""Entries that wait for a gateway; beyond it the oldest are dropped."""

_MAX_TEXT = 200


class AuditTrail:
    """Numbered entries, each of which is given to the gateway until it says that it has written it."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._entries: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_ENTRIES)
        self._last = 0
        self._more = asyncio.Event()

    def add(self, user: str, session: str, operation: str, arguments: dict[str, Any], time: float) -> None:
        """Add an entry for an operation of a session. Values stay out of it: they may be secrets."""
        about = {name: str(value)[:_MAX_TEXT] for name, value in arguments.items() if name in _SHOWN}
        keys = {"keys": [str(key)[:_MAX_TEXT] for key in arguments["params"]]} if "params" in arguments else {}
        self._last += 1
        entry = {"given": time, "user": user, "session": session, "operation": operation, **about, **keys}
        self._entries.append((self._last, entry))
        self._more.set()

    async def after(self, trail: str, number: int, timeout: float) -> dict[str, Any]:
        """Drop the entries up to a number of this trail; return those after it, or none when the time is over."""
        while trail == self._id and self._entries and self._entries[0][0] <= number:
            self._entries.popleft()
        if not self._entries:
            self._more.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._more.wait(), timeout)
        given = list(islice(self._entries, AT_ONCE))
        last = given[-1][0] if given else self._last
        return {"trail": self._id, "last": last, "entries": [entry for _, entry in given]}


_OF_RANKS = ("mesh", "rank", "what", "guest")
"""``what`` is a command, a path or a port; ``guest`` is the user, if the session is another user's."""

_SHOWN = ("kind", "target", "fault", "duration", "injection", "device", "reason", "group", "action", *_OF_RANKS)
