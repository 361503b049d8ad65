"""Connections to a driver's port for process links that have yet to show the key."""

from __future__ import annotations

import asyncio

from loom.wire.bodies import Challenge
from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Kind, Message
from loom_gateway.driver.process_link.link import read_greeting
from tests.unit.loom_gateway.driver.process_link.processes import BOUND, Driver


async def connect(driver: Driver) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", driver.server.address.port)


async def message_of(reader: asyncio.StreamReader) -> Message:
    """What the driver says before anything is numbered."""
    (length,) = LENGTH.unpack(await asyncio.wait_for(reader.readexactly(LENGTH.size), BOUND))
    return read_greeting(await asyncio.wait_for(reader.readexactly(length), BOUND))


async def challenged(driver: Driver) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
    """A connection, and the driver's challenge."""
    reader, writer = await connect(driver)
    message = await message_of(reader)
    assert message.kind == Kind.CHALLENGE
    return reader, writer, Challenge.from_body(message.body).nonce


async def is_cut_off(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection; return whether the driver said nothing."""
    try:
        return await asyncio.wait_for(reader.read(), BOUND) == b""
    except ConnectionResetError:
        return True
