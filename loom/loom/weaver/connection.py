"""A connection of the weaver's, apart from its frames: trainings have these, too, and do not import asyncio."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from loom.control.frame import MAX_FRAME, pack
from loom.wire.length_prefix import FrameSplitter

MAX_UNREAD = 2 * MAX_FRAME
"""Bytes that may wait for a peer that does not read. The limit leaves room for the largest frame."""


SILENCE = 10.0
"""Seconds after which a gateway or a driver that acknowledges no bytes counts as lost, and so does the weaver."""


class FrameConnection(asyncio.Protocol):
    """A connection that carries frames on a stream."""

    transport: asyncio.Transport

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.splitter = FrameSplitter(limit)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are not asyncio's classes

    def send(self, frame: list[Any]) -> None:
        self.write(pack(frame))

    def write(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(data)
        if self.transport.get_write_buffer_size() > MAX_UNREAD:
            self.transport.abort()

    def read(self, more: bool) -> None:
        """Go on reading, or read no more until the next call."""
        if self.transport.is_closing():
            return
        if more:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def close(self) -> None:
        self.transport.close()

    def abort(self) -> None:
        """Close the connection at once, and drop what waits to be sent."""
        self.transport.abort()
