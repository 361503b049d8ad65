"""Connections that no client makes, held open in great number.

``python -m tests.benchmarks.hostile URL COUNT HOSTS`` holds so many connections, from so many addresses of the
loopback network, as long as standard input is open. A line on standard input names their kind; a line on standard
output says that they have been made. Loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from urllib.parse import urlsplit

__all__ = ["KINDS", "Hostile"]

AGAIN = 5.0
"""Seconds after which a connection that the gateway has closed is made again.

The first time it is after a part of them, so that the connections come again at an even pace.
"""

DRIP = 1.0
"""Seconds between two bytes of what is sent slowly."""

AT_ONCE = 100
"""Connections that are being made at the same time."""

_HEAD = b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
_WRONG = b"Authorization: Bearer wrong\r\n"
_UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)

KINDS = {
    "half-open": b"",
    "slow headers": b"GET /api/v1/status" + _HEAD + b"X-Slow: ",
    "slow after a first request": b"GET /healthz" + _HEAD + b"\r\nGET /",
    "garbage": bytes(range(128, 256)) + b"\r\n\r\n",
    "TLS on a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "wrong tokens": b"GET /api/v1/status" + _HEAD + _WRONG + b"\r\n",
    "upgrades without frames": b"GET /ws/v1" + _HEAD + _WRONG + _UPGRADE + b"\r\n",
    "huge headers": b"GET /" + _HEAD + b"X-Large: " + b"x" * (1 << 17),
    "tunnels": b"POST /api/v1/tunnel" + _HEAD + _WRONG + b"Content-Length: 1048576\r\n\r\n",
}
"""What is sent at once, by what is wrong with it. Then a byte follows now and then."""


class Hostile:
    """So many connections of one kind.

    Args:
        url: a gateway on 127.0.0.1.
        hosts: the number of addresses that they come from.
    """

    def __init__(self, url: str, count: int, hosts: int) -> None:
        parts = urlsplit(url)
        if parts.hostname != "127.0.0.1" or parts.port is None:
            raise ValueError(f"only a gateway on 127.0.0.1 is attacked, not {url}")
        self._port = parts.port
        self._count = count
        self._hosts = hosts
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, kind: str) -> None:
        """End those of another kind, and return when each of this one has been made once. ``none`` makes none."""
        await self.end()
        if kind not in KINDS:
            return
        gate = asyncio.Semaphore(AT_ONCE)
        made = [asyncio.Event() for _ in range(self._count)]
        self._tasks = [
            asyncio.ensure_future(self._hold(KINDS[kind], number, gate, event)) for number, event in enumerate(made)
        ]
        for event in made:
            await event.wait()

    async def end(self) -> None:
        # Python 3.11's `wait_for` may swallow a cancellation when its read ends at the same time.
        while pending := [task for task in self._tasks if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=1.0)
        self._tasks = []

    async def _hold(self, request: bytes, number: int, gate: asyncio.Semaphore, made: asyncio.Event) -> None:
        host = f"127.0.0.{number % self._hosts + 1}"
        again = AGAIN * (number + 1) / self._count
        while True:
            with contextlib.suppress(OSError):
                async with gate:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(host, 0))
                    made.set()
                try:
                    writer.write(request)
                    while not reader.at_eof():
                        with contextlib.suppress(asyncio.TimeoutError):
                            await asyncio.wait_for(reader.read(1 << 16), DRIP)
                        writer.write(b"x")
                finally:
                    writer.transport.abort()
            made.set()  # the gateway was faster
            await asyncio.sleep(again)
            again = AGAIN


async def main(url: str, count: int, hosts: int) -> None:
    """Attack as standard input says."""
    hostile = Hostile(url, count, hosts)
    while kind := (await asyncio.to_thread(sys.stdin.readline)).strip():
        await hostile.begin(kind)
        print("begun", flush=True)
    await hostile.end()


if __name__ == "__main__":
    os.nice(10)  # an attacker has a machine of its own, and takes no time from what is measured here
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
