"""The gateway's end of a driver's connection, over real unix sockets and the gateway's event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop

from loom_gateway.relay.links import DriverLink
from loom_gateway.sessions.session import Traffic

BOUND = 10.0


def test_what_comes_for_a_driver_that_is_gone_is_dropped(tmp_path: Path) -> None:
    async def write_late() -> tuple[int, bytes]:
        path = str(tmp_path / "driver")
        came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def leave_after_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.set_result(await reader.readexactly(7))
            writer.close()

        server = await asyncio.start_unix_server(leave_after_one, path)
        traffic = Traffic()
        _, link = await asyncio.get_running_loop().create_unix_connection(lambda: DriverLink(traffic), path)
        link.write(b"a", b"bc")
        await asyncio.wait_for(link.closed, BOUND)
        await asyncio.sleep(0)  # the transport lets go of its handle in the next turn of the loop
        link.write(b"nobody reads this")
        server.close()
        return traffic.frames, await came

    loop = uvloop.new_event_loop()
    try:
        assert loop.run_until_complete(write_late()) == (1, b"\x00\x00\x00\x03abc")
    finally:
        loop.close()
