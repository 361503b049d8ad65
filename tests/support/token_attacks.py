"""Attacks on a gateway by somebody with a good token, or none: ``python -m tests.support.token_attacks NAME JSON``.

Each goes on until the process is ended, on loopback only. The JSON has ``url``, ``view``, ``operate`` and ``drive``
(tokens of one user), and ``session`` (that user's).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import struct
import sys
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

__all__ = ["ATTACKS", "Attacker"]

Attack = Callable[["Attacker"], Awaitable[None]]

ATTACKS: dict[str, Attack] = {}
"""The attacks by name. One connection of each; `Attacker.run` makes as many as the name says."""

_TIMES: dict[str, int] = {}


def attack(times: int) -> Callable[[Attack], Attack]:
    """Register an attack that is made on so many connections at once."""

    def register(function: Attack) -> Attack:
        name = function.__name__.replace("_", " ")
        ATTACKS[name] = function
        _TIMES[name] = times
        return function

    return register


class Attacker:
    """Somebody with tokens."""

    def __init__(self, url: str, view: str, operate: str, drive: str, session: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 0
        assert self.host == "127.0.0.1", "only this machine is attacked"
        self.view, self.operate, self.drive, self.session = view, operate, drive, session

    async def run(self, name: str) -> None:
        await asyncio.gather(*(self._again(ATTACKS[name]) for _ in range(_TIMES[name])))

    async def _again(self, function: Attack) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, ValueError):
                await asyncio.wait_for(function(self), 60.0)
            await asyncio.sleep(0.01)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, limit=1 << 20)

    def head(self, request: str, token: str = "", *headers: str) -> bytes:
        shown = [f"Authorization: Bearer {token}"] if token else []
        return "\r\n".join([f"{request} HTTP/1.1", "Host: 127.0.0.1", *shown, *headers, "", ""]).encode()

    async def websocket(
        self, path: str, token: str, *headers: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connect()
        key = base64.b64encode(os.urandom(16)).decode()
        upgrade = (
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {key}",
        )
        writer.write(self.head(f"GET {path}", token, *upgrade, *headers))
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30.0)
        return reader, writer


def frame(opcode: int, payload: bytes, fin: bool = True, rsv1: bool = False) -> bytes:
    """A client's WebSocket frame, masked with zeros."""
    first = opcode | (0x80 if fin else 0) | (0x40 if rsv1 else 0)
    size = len(payload)
    if size < 126:
        return struct.pack("!BB4x", first, 0x80 | size) + payload
    return struct.pack("!BBH4x", first, 0x80 | 126, size) + payload


async def flood(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send the same again and again, as fast as it is taken."""
    while True:
        writer.write(data)
        await writer.drain()


async def ask(attacker: Attacker, request: str, token: str, body: bytes = b"", *headers: str) -> None:
    """Make requests on one connection, one after the other, and read the answers to their ends."""
    reader, writer = await attacker.connect()
    try:
        for _ in itertools.count():
            length = f"Content-Length: {len(body)}"
            writer.write(attacker.head(request, token, length, *headers) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await reader.readexactly(int(line.partition(b":")[2]))
            if b"transfer-encoding: chunked" in head.lower() or b"connection: close" in head.lower():
                return
    finally:
        writer.close()


async def hold(attacker: Attacker, sent: bytes) -> None:
    """Send something, read nothing, and stay."""
    _, writer = await attacker.connect()
    try:
        writer.write(sent)
        await asyncio.sleep(3600)
    finally:
        writer.close()


# -- HTTP ---------------------------------------------------------------------------------------------------


@attack(200)
async def a_chunked_body_that_trickles(by: Attacker) -> None:
    _, writer = await by.connect()
    writer.write(by.head("POST /api/v1/page/code", by.view, "Transfer-Encoding: chunked"))
    while True:
        writer.write(b"1\r\n \r\n")
        await writer.drain()
        await asyncio.sleep(0.005)


@attack(50)
async def chunks_with_long_extensions(by: Attacker) -> None:
    _, writer = await by.connect()
    writer.write(by.head("POST /api/v1/page/code", by.view, "Transfer-Encoding: chunked"))
    await flood(writer, b"1;" + b"x" * 4000 + b"\r\n \r\n")


@attack(50)
async def an_endless_head(by: Attacker) -> None:
    _, writer = await by.connect()
    writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    for number in itertools.count():
        writer.write(b"X-%d: %s\r\n" % (number, b"y" * 100))
        await writer.drain()


@attack(20)
async def many_headers_on_each_request(by: Attacker) -> None:
    await ask(by, "GET /api/v1/page/me", by.view, b"", *(f"X-{number}: y" for number in range(3000)))


@attack(20)
async def pipelined_requests_whose_answers_nobody_reads(by: Attacker) -> None:
    _, writer = await by.connect()
    await flood(writer, by.head("GET /api/v1/openapi.json", by.view) * 20)


@attack(20)
async def pipelined_requests_without_a_token(by: Attacker) -> None:
    _, writer = await by.connect()
    await flood(writer, by.head("GET /healthz") * 100)


@attack(20)
async def a_body_that_is_declared_and_never_comes(by: Attacker) -> None:
    await hold(
        by, by.head("POST /api/v1/weaver/commands", by.operate, "Content-Length: 65536", "Expect: 100-continue")
    )


@attack(10)
async def huge_query_parameters(by: Attacker) -> None:
    await ask(by, f"GET /api/v1/weaver/events?replica={'x' * 50_000}", by.view)


@attack(10)
async def thousands_of_query_parameters(by: Attacker) -> None:
    await ask(by, "GET /api/v1/weaver/events?" + "&".join(f"a{number}=1" for number in range(6000)), by.view)


@attack(10)
async def json_that_is_nested_deeply(by: Attacker) -> None:
    await ask(by, "POST /api/v1/weaver/commands", by.operate, b"[" * 60_000, "Content-Type: application/json")


@attack(10)
async def sign_ins_without_a_token(by: Attacker) -> None:
    body = json.dumps({"token": "x" * 30_000, "path": "/"}).encode()
    await ask(by, "POST /api/v1/page/sign-in", "", body, "Content-Type: application/json", "X-Loom-Page: 1")


@attack(10)
async def proofs_of_a_known_key(by: Attacker) -> None:
    await ask(by, f"GET /api/v1/proof?key={'0' * 32}&challenge={'0' * 32}", "")


# -- reads and changes that cost ------------------------------------------------------------------------------


@attack(30)
async def the_page_for_prometheus_in_parallel(by: Attacker) -> None:
    await ask(by, "GET /metrics", by.view)


@attack(30)
async def the_schema_in_parallel(by: Attacker) -> None:
    await ask(by, "GET /api/v1/openapi.json", by.view)


@attack(30)
async def lists_of_sessions_in_parallel(by: Attacker) -> None:
    await ask(by, "GET /api/v1/sessions?ended=true", by.view)


@attack(30)
async def descriptions_of_a_session_in_parallel(by: Attacker) -> None:
    await ask(by, f"GET /api/v1/sessions/{by.session}/meshes", by.view)


@attack(30)
async def spans_in_parallel(by: Attacker) -> None:
    await ask(by, f"GET /api/v1/sessions/{by.session}/spans?seconds=60", by.view)


@attack(30)
async def histories_in_parallel(by: Attacker) -> None:
    await ask(by, "GET /api/v1/weaver/replicas/train_0/metrics/loss?points=20000&since=0", by.view)


@attack(30)
async def profiles_in_parallel(by: Attacker) -> None:
    await ask(by, "GET /api/v1/weaver/replicas/train_0/profile?seconds=30", by.view)


@attack(30)
async def logs_in_parallel(by: Attacker) -> None:
    await ask(by, f"GET /api/v1/sessions/{by.session}/logs", by.view)


@attack(100)
async def followed_logs_that_nobody_reads(by: Attacker) -> None:
    await hold(by, by.head(f"GET /api/v1/sessions/{by.session}/logs?follow=1", by.view))


@attack(4)
async def globs_that_take_long_to_compile(by: Attacker) -> None:
    body = json.dumps({"kind": "pause", "replica": "*a" * 30_000, "target": "*a" * 30_000}).encode()
    await ask(by, "POST /api/v1/weaver/commands", by.operate, body, "Content-Type: application/json")


@attack(10)
async def plans_that_take_long_to_read(by: Attacker) -> None:
    text = "faults:\n" + "- {fault: sigkill, when: {time: 1 s}}\n" * 1500
    body = json.dumps({"text": text}).encode()
    await ask(by, "POST /api/v1/weaver/plans/check", by.operate, body, "Content-Type: application/json")


@attack(4)
async def policies_without_number(by: Attacker) -> None:
    for number in itertools.count():
        body = json.dumps({"group": f"group {number}", "action": "notify"}).encode()
        reader, writer = await by.connect()
        head = by.head("POST /api/v1/weaver/policies", by.operate, f"Content-Length: {len(body)}")
        writer.write(
            head.replace(b"\r\n\r\n", b"\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n") + body
        )
        await reader.read()
        writer.close()


@attack(10)
async def codes_and_sign_ins(by: Attacker) -> None:
    await ask(by, "POST /api/v1/page/code", by.view, b"{}", "Content-Type: application/json")


@attack(10)
async def shares_that_are_given_and_taken_back(by: Attacker) -> None:
    for verb, body in itertools.cycle((("PUT", b'{"scope": "view"}'), ("DELETE", b""))):
        reader, writer = await by.connect()
        headers = ("Content-Type: application/json", "Connection: close", f"Content-Length: {len(body)}")
        writer.write(by.head(f"{verb} /api/v1/sessions/{by.session}/shares/carol", by.drive, *headers) + body)
        await reader.read()
        writer.close()


# -- tunnels and WebSockets -----------------------------------------------------------------------------------


@attack(20)
async def tunnels_that_are_opened_and_left(by: Attacker) -> None:
    await ask(by, "POST /api/v1/tunnel", by.view)


@attack(100)
async def polls_of_a_tunnel_that_wait(by: Attacker) -> None:
    reader, writer = await by.connect()
    writer.write(by.head("POST /api/v1/tunnel", by.view, "Content-Length: 0"))
    await reader.readuntil(b"\r\n\r\n")
    opened = json.loads(await reader.readuntil(b"}"))
    if "tunnel" not in opened:  # it was refused
        return writer.close()
    writer.write(by.head(f"GET /api/v1/tunnel/{opened['tunnel']}/down?n=1", by.view))
    await reader.read()


@attack(100)
async def fragments_of_one_byte(by: Attacker) -> None:
    _, writer = await by.websocket("/ws/v1", by.view)
    writer.write(frame(2, b"x", fin=False))
    writer.write(frame(0, b"x", fin=False) * 60_000)
    await asyncio.sleep(3600)


@attack(20)
async def empty_fragments(by: Attacker) -> None:
    _, writer = await by.websocket("/ws/v1/weaver", by.view)
    writer.write(frame(1, b"", fin=False))
    await flood(writer, frame(0, b"", fin=False) * 1000)


@attack(20)
async def compressed_frames_that_nobody_agreed_on(by: Attacker) -> None:
    import zlib

    bomb = zlib.compressobj(wbits=-15)
    data = bomb.compress(b"\0" * (32 << 20)) + bomb.flush(zlib.Z_SYNC_FLUSH)
    extension = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"
    reader, writer = await by.websocket("/ws/v1/weaver", by.view, extension)
    writer.write(frame(1, data[:60_000], rsv1=True))
    await reader.read()


@attack(20)
async def pings_whose_pongs_nobody_reads(by: Attacker) -> None:
    _, writer = await by.websocket("/ws/v1/weaver", by.view)
    await flood(writer, frame(9, b"x" * 125) * 100)


@attack(300)
async def watchers_that_do_not_read(by: Attacker) -> None:
    _, writer = await by.websocket("/ws/v1/weaver?page=1", by.view)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(3600)


@attack(20)
async def subscriptions_without_end(by: Attacker) -> None:
    reader, writer = await by.websocket("/ws/v1/weaver", by.view, "Sec-WebSocket-Protocol: loom.page")
    wanted = json.dumps({"type": "subscribe", "replicas": [f"train_{n}" for n in range(3000)]}).encode()
    reading = asyncio.ensure_future(_read_on(reader))
    try:
        await flood(writer, frame(1, wanted[:60_000]) * 10)
    finally:
        reading.cancel()


@attack(20)
async def commands_over_a_socket_that_does_not_read(by: Attacker) -> None:
    _, writer = await by.websocket("/ws/v1/weaver", by.operate)
    await flood(writer, frame(1, b'{"type": "pause_training", "id": 1}') * 100)


@attack(200)
async def upgrades_without_a_hello(by: Attacker) -> None:
    await by.websocket("/ws/v1", by.view)
    await asyncio.sleep(3600)


@attack(10)
async def hellos_again_and_again(by: Attacker) -> None:
    reader, writer = await by.websocket("/ws/v1", by.view)
    writer.write(frame(2, os.urandom(60_000)))
    await reader.read()


async def _read_on(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


async def main() -> None:
    name, given = sys.argv[1:]
    await Attacker(**json.loads(given)).run(name)


if __name__ == "__main__":
    asyncio.run(main())
