"""Stand-ins for the drivers of many sessions: ``python -m tests.benchmarks.stand_in_drivers FOLDER FIRST COUNT``.

One process leaves the files of COUNT drivers in the state folder of a session host, which adopts them when it
starts. Each has a socket, welcomes every client, and sends back what it is sent. There is no Monarch behind it: a
real driver is a process of its own, whose cost is measured by itself. Prints a line when all listen.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import time
from typing import cast

from loom.process.identity import boot_id, start_time
from loom.token_file import ADMIN
from loom.wire.bodies import Description
from loom.wire.frames import decode_frame
from loom.wire.handshake import Hello, Welcome
from loom.wire.length_prefix import MAX_FRAME, FrameSplitter, behind_length
from loom.wire.messages import Kind
from loom.wire.stream import unnumbered_frame
from loom_gateway.access.token_authority import OWN
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord


def session_name(number: int) -> str:
    """Return the name of a stand-in's session."""
    return f"session-{number:08x}"


class _Connection(asyncio.Protocol):
    """A gateway's connection: of a client, or for questions."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._splitter = FrameSplitter(MAX_FRAME)
        self._welcomed = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._splitter.feed(data):
            if self._welcomed:
                self._transport.write(behind_length([frame]))
            else:
                self._answer(frame)

    def _answer(self, frame: bytes) -> None:
        (message,) = decode_frame(frame).messages
        if message.kind == Kind.HELLO:
            self._welcomed = True
            hello = Hello.from_body(message.body)
            welcome = Welcome(session=self._session, workers=[], mode=hello.mode, stream=hello.stream or "s")
            self._transport.write(behind_length(unnumbered_frame(welcome.message())))
        elif message.kind == Kind.DESCRIBE:
            life = Description().message(parts=[b'{"because": ["persist"], "until": null, "linger": 0.0}'])
            self._transport.write(behind_length(unnumbered_frame(life)))


async def _serve(folder: str, first: int, count: int) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    pid = os.getpid()
    for number in range(first, first + count):
        files = DriverFiles(os.path.join(folder, f"driver-{number:08x}"))
        name = session_name(number)
        await asyncio.get_running_loop().create_unix_server(lambda name=name: _Connection(name), files.socket)
        files.write_record(
            DriverRecord(
                pid,
                start_time(pid) or 0,
                session=name,
                created=time.time(),
                persist=True,
                owner=OWN,
                user=ADMIN,
                boot=boot_id(),
                knows_users=True,
            )
        )
    print("ready", flush=True)
    await over.wait()


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
