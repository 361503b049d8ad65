"""The driver's port for lifelines: who does not know the key is not believed, costs nothing, and is cut off."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from loom.wire.bodies import ProcessEnded, Tie
from loom.wire.frames import encode_frame
from loom.wire.lane import LENGTH, behind_length
from loom.wire.messages import Message
from loom_gateway.driver.lifeline import server as lifelines
from loom_gateway.driver.lifeline.line import greeting
from tests.unit.loom_gateway.driver.lifeline.processes import BOUND, Driver, Process


async def connect(driver: Driver) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", driver.server.address.port)


async def is_cut_off(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection; return whether the driver said nothing."""
    try:
        return await asyncio.wait_for(reader.read(), BOUND) == b""
    except ConnectionResetError:
        return True


def tie(key: str, again: bool = False, procs: int = 7) -> Message:
    return Tie(key, "a name", procs, 0, again, 0).message()


ENDED = behind_length(encode_frame(1, 0, [ProcessEnded().message()]))


@pytest.mark.parametrize(
    "said",
    [
        b"[7, 0]\n",  # what an earlier version believed
        b'[7, 0, "logs"]\n',
        LENGTH.pack(0xFFFFFFFF),
        LENGTH.pack(4097),
        LENGTH.pack(8) + b"\0" * 8,
        greeting(tie("another key")) + ENDED,
        greeting(tie("")) + ENDED,
        greeting(tie("schlüssel")) + ENDED,
        greeting(ProcessEnded().message()),
        ENDED,
    ],
)
async def test_what_a_stranger_says_is_not_believed(said: bytes) -> None:
    async with Driver() as driver:
        with Process(driver.server.address) as process:
            process.tell("print before")
            await driver.until(lambda: (7, 0) in driver.printed)
            reader, writer = await connect(driver)
            writer.write(said)
            assert await is_cut_off(reader)
            writer.close()
            process.tell("print after")
            await driver.until(lambda: driver.printed[7, 0] == b"before\nafter\n")
            assert driver.gone == []
            assert driver.started == [(7, 0)]


async def test_who_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines, "STRANGER_TIMEOUT", 0.05)
    async with Driver() as driver:
        reader, writer = await connect(driver)
        writer.write(greeting(tie(driver.server.address.key))[:-1])
        assert await is_cut_off(reader)
        writer.close()
        assert driver.started == []


async def test_a_crowd_of_strangers_keeps_no_process_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines, "MOST_STRANGERS", 8)
    async with Driver() as driver:
        crowd = [await connect(driver) for _ in range(40)]
        with Process(driver.server.address) as process:
            process.tell("print here")
            await driver.until(lambda: driver.printed.get((7, 0)) == b"here\n")
        assert all([await is_cut_off(reader) for reader, _ in crowd[:30]])
        for _, writer in crowd:
            writer.close()


async def test_a_process_that_the_driver_has_never_seen_cannot_come_back() -> None:
    async with Driver() as driver:
        reader, writer = await connect(driver)
        writer.write(greeting(tie(driver.server.address.key, again=True)))
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        assert lifelines.read_greeting(await reader.readexactly(length)).kind == lifelines.Kind.UNTIED
        writer.close()
        assert driver.started == []


def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def test_a_process_that_ends_before_its_agent_holds_the_line_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifelines, "START_GRACE", 0.05)
    async with Driver(patience=10 * BOUND) as driver:
        for procs, end in ((7, asyncio.StreamWriter.close), (8, reset)):
            reader, writer = await connect(driver)
            writer.write(greeting(tie(driver.server.address.key, procs=procs)))
            await reader.readexactly(LENGTH.size)
            end(writer)
        await driver.until(lambda: driver.gone)
        assert driver.gone == [(7, 0)]  # a reset may be the network's, and the agent has the whole patience


async def test_garbage_after_the_key_breaks_the_connection_and_nothing_else() -> None:
    async with Driver() as driver:
        with Process(driver.server.address) as process:
            process.tell("print before")
            await driver.until(lambda: (7, 0) in driver.printed)
            reader, writer = await connect(driver)
            writer.write(greeting(tie(driver.server.address.key, procs=8)) + LENGTH.pack(0xFFFFFFFF))
            await asyncio.wait_for(reader.read(), BOUND)
            writer.close()
            process.tell("print after")
            await driver.until(lambda: driver.printed[7, 0] == b"before\nafter\n")
            assert driver.gone == []
