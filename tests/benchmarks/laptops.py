"""Laptops that come and go: ``python -m tests.benchmarks.laptops TOKEN SESSIONS URL…`` for several gateways.

Each is a WebSocket without Loom's proxy, whose cost is the laptop's. It says hello to a session, makes calls,
leaves, and comes back by the next gateway for the next session.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from loom.errors import LoomError
from loom.wire.frames import decode_frame
from loom.wire.handshake import Hello
from loom.wire.messages import Kind
from loom.wire.stream import unnumbered_frame
from tests.benchmarks.caller import serve
from tests.benchmarks.stand_in_drivers import session_name

CALL = bytes(200)
"""What a call of a small function is about as large as."""

STEP = 7
"""From one session to a laptop's next one; with no divisor in common with their number, each gets its turn."""


class Laptops:
    """The laptops, and the loop in which they live."""

    def __init__(self, token: str, sessions: int, urls: list[str]) -> None:
        self._token = token
        self._sessions = sessions
        self._urls = urls
        self._seen = {"connections": 0, "calls": 0, "failures": 0}
        self._waits: list[float] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="laptops", daemon=True).start()

    def begin(self, count: int, stay: float, per_second: float) -> None:
        """Have so many laptops come, stay for so many seconds each time, and make so many calls a second."""
        for number in range(count):
            asyncio.run_coroutine_threadsafe(self._come_and_go(number, stay, per_second), self._loop)

    def seen(self) -> dict[str, Any]:
        """Return connections, calls and failures so far, and the seconds of each connection since the last time."""
        waits, self._waits = self._waits, []
        return {**self._seen, "waits": waits}

    async def _come_and_go(self, number: int, stay: float, per_second: float) -> None:
        await asyncio.sleep(stay * (number % 100) / 100)  # not all at once
        for turn in itertools.count(number):
            try:
                await self._visit(turn, stay, per_second)
            except (OSError, LoomError, WebSocketException) as error:
                self._seen["failures"] += 1
                print(f"laptop {number}: {error!r}", file=sys.stderr)
                await asyncio.sleep(1.0)

    async def _visit(self, turn: int, stay: float, per_second: float) -> None:
        began = time.monotonic()
        url, session = self._urls[turn % len(self._urls)], session_name(turn * STEP % self._sessions)
        async with connect(
            f"{url}/ws/v1", additional_headers={"Authorization": f"Bearer {self._token}"}, compression=None
        ) as connected:
            hello = Hello(client="benchmark", session=session).message()
            await connected.send(b"".join(unnumbered_frame(hello)))
            (message,) = decode_frame(await _received(connected)).messages
            if message.kind != Kind.WELCOME:
                raise ConnectionError(f"no welcome but {message}")
            self._seen["connections"] += 1
            self._waits.append(time.monotonic() - began)
            until = time.monotonic() + stay
            while time.monotonic() < until:
                await connected.send(CALL)
                await _received(connected)
                self._seen["calls"] += 1
                await asyncio.sleep(1.0 / per_second)

    def close(self) -> None:
        """End nothing: the process ends, and its connections with it."""


async def _received(connected: ClientConnection) -> bytes:
    frame = await connected.recv()
    assert isinstance(frame, bytes)
    return frame


if __name__ == "__main__":
    serve(lambda: Laptops(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))  # type: ignore[arg-type, return-value]
