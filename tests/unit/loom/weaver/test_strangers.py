"""Connections to the weaver that have shown no key: bounded in number and bytes, while honest ones are served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loom.control import frame
from loom.control.frame import MAX_HELLO, pack
from loom.control.handshake import MAX_HEAD
from loom.token_file import ADMIN
from loom.weaver.server import threadlets
from tests.support.garbage import pieces
from tests.unit.loom.weaver.raw_threadlet import BOUND, hello_of
from tests.unit.loom.weaver.running import KEYS, Running, running

CROWD = 40


@contextlib.asynccontextmanager
async def strangers(weaver: Running, kind: str) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Connections to one of the weaver's sockets on which nothing has been said."""
    opened = []
    for _ in range(CROWD):
        opening: Any = (
            asyncio.open_connection("127.0.0.1", weaver.port)
            if kind == "tcp"
            else asyncio.open_unix_connection(weaver.client.place)
        )
        opened.append((await opening)[1])
    yield opened
    for writer in opened:
        writer.close()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_connections_without_a_key_are_bounded_and_keep_nobody_out(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threadlets, "MOST_STRANGERS", 8)
    async with running() as weaver:
        early = await weaver.threadlet()
        async with strangers(weaver, kind):
            await weaver.threadlet("train_1")

            peers = weaver.server.peers
            of_kind = peers.links_without_key if kind == "tcp" else peers.callers_without_key
            assert len(of_kind) <= 8
            await weaver.until(lambda: len(peers.links) + len(peers.callers) <= 2 + 8 + 1)
            assert len(await weaver.client.ask("replicas")) == 2  # neither they nor the gateway made room
            early.send("beat", 1.0, 1, "step")


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_what_strangers_say_is_neither_unpacked_nor_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[int] = []
    plain = frame.unpack

    def unpack(body: bytes) -> list[Any]:
        unpacked.append(len(body))
        return plain(body)

    monkeypatch.setattr(frame, "unpack", unpack)
    said = [
        pack(["hello", hello_of("wrong:key:x", "train_0", "i", config={"much": "x" * 800_000})]),
        pack(["hello", [[1, 2, 3]] * 1000]),
        MAX_HELLO.to_bytes(4, "big") + b"\x92\xa5hello\xdd\x00\x04\x00\x00" + b"\x90" * 500_000,
        (1 << 30).to_bytes(4, "big") + b"\x90" * 500_000,
        *pieces(7),
    ]
    async with running() as weaver, strangers(weaver, kind) as opened:
        for one, writer in zip(said * 2, opened, strict=False):
            writer.write(one)
            with contextlib.suppress(OSError):
                await writer.drain()
        await weaver.threadlet()
        assert await weaver.client.ask("replicas")

        hello = len(pack(["hello", hello_of(KEYS.of(ADMIN), "train_0", "instance of train_0")]))
        assert max(unpacked) < hello + 1000
        for link in weaver.server.peers.links:
            assert link._first is None or len(link._first._head) < MAX_HEAD


async def test_who_shows_a_wrong_key_before_much_else_learns_why() -> None:
    async with running() as weaver:
        link = await weaver.connect()
        link.send("hello", hello_of("wrong", "train_0", "i", config={"much": "x" * 900_000}))

        assert (await link.receive("refuse"))[1] == "authentication"
        with pytest.raises(EOFError):
            await asyncio.wait_for(link.receive("refuse"), BOUND)
