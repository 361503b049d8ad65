"""An attack on a gateway: bad handshakes and wrong tokens, so many a second.

``python -m tests.benchmarks.attack ws://127.0.0.1:8470 200 10`` attacks for 10 s and prints what was answered, as
JSON. Loopback only.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from urllib.parse import urlsplit

__all__ = ["attack"]

BOUND = 20.0
"""Seconds that a gateway has to answer one of them."""

_UPGRADE = (
    b"GET /ws/v1 HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n%s\r\n"
)

TRIES = {
    "no HTTP": b"\x16\x03\x01 what is this\r\n\r\n",
    "no WebSocket": b"GET /ws/v1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "a broken handshake": _UPGRADE.replace(b"dGhlIHNhbXBsZSBub25jZQ==", b"no key") % b"",
    "no token": _UPGRADE % b"",
    "a wrong token": _UPGRADE % b"Authorization: Bearer wrong\r\n",
    "a wrong token over REST": (
        b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n"
        b"Authorization: Bearer wrong\r\nConnection: close\r\n\r\n"
    ),
}
"""What is sent, by what is wrong with it."""


async def attack(url: str, per_second: int, seconds: float) -> Counter[str]:
    """Attack, at an even pace; how often each status was answered."""
    parts = urlsplit(url)
    if parts.hostname != "127.0.0.1" or parts.port is None:
        raise ValueError(f"only a gateway on 127.0.0.1 is attacked, not {url}")
    loop = asyncio.get_running_loop()
    start = loop.time()
    requests = list(TRIES.values())
    tries = []
    for number in range(int(per_second * seconds)):
        await asyncio.sleep(start + number / per_second - loop.time())
        tries.append(loop.create_task(_try(parts.hostname, parts.port, requests[number % len(requests)])))
    return Counter(await asyncio.gather(*tries))


async def _try(host: str, port: int, request: bytes) -> str:
    try:
        return await asyncio.wait_for(_answer(host, port, request), BOUND)
    except asyncio.TimeoutError:
        return "nothing in time"
    except OSError as error:
        return type(error).__name__


async def _answer(host: str, port: int, request: bytes) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        line = await reader.readline()
        await reader.read()
    finally:
        writer.close()
    return line.split(b" ")[1].decode() if line.startswith(b"HTTP/") else "nothing"


if __name__ == "__main__":
    os.nice(10)  # an attacker has a machine of its own, and takes no time from what is measured here
    answers = asyncio.run(attack(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
    print(json.dumps(answers), flush=True)
