"""Turns on an event loop, for work that would hold it for too long."""

from __future__ import annotations

import asyncio
import time

TURN = 0.002
"""Seconds for which one piece of work holds the event loop."""


class Turns:
    """Divides long work into turns, between which the event loop does what else there is."""

    def __init__(self) -> None:
        self._end = time.perf_counter() + TURN

    async def rest(self) -> None:
        """Let the event loop do other work, if this turn is over."""
        if time.perf_counter() >= self._end:
            await asyncio.sleep(0)
            self._end = time.perf_counter() + TURN
