"""The frames of a WebSocket (RFC 6455, 5.2), found in a stream of bytes.

Only as much as it takes to get Loom's binary messages, each one WebSocket frame, past `websockets`' parser, which
is a chain of generators and costs more than all else that the gateway does for a small call. Everything else
(control frames, fragments) goes on to `websockets` as it came.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from loom.errors import TooLarge

try:
    from websockets.speedups import apply_mask
except ImportError:  # websockets without its C extension
    from websockets.utils import apply_mask

__all__ = ["WebSocketFrames", "apply_mask", "message_head"]

_BINARY = 0x82
"""First byte of an unfragmented binary message."""

_U16 = struct.Struct("!H")
_U64 = struct.Struct("!Q")


class WebSocketFrames:
    """Cuts received bytes into frames.

    Args:
        limit: bytes of the largest payload.
    """

    def __init__(self, limit: int) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def receive(self, data: bytes) -> Iterator[tuple[bool, bytes]]:
        """Each frame that is whole now: ``(True, payload)`` of a message, else ``(False, the frame's bytes)``.

        Raises:
            TooLarge: a frame's payload is over the limit.
        """
        buffer = self._buffer
        if buffer:
            buffer += data
            whole = bytes(buffer) if self._end(buffer, 0) else None
            if whole is None:
                return
            buffer.clear()
            data = whole
        position = 0
        while end := self._end(data, position):
            yield self._frame(data, position, end)
            position = end
        if position < len(data):
            buffer += data[position:]

    def _end(self, data: bytes | bytearray, position: int) -> int:
        """Where the frame at a position ends; 0 if it is not all there."""
        have = len(data) - position
        if have < 2:
            return 0
        second = data[position + 1]
        length = second & 0x7F
        head = 2
        if length == 126:
            head = 4
            if have < head:
                return 0
            (length,) = _U16.unpack_from(data, position + 2)
        elif length == 127:
            head = 10
            if have < head:
                return 0
            (length,) = _U64.unpack_from(data, position + 2)
        if length > self._limit:
            raise TooLarge(f"a WebSocket frame of {length} bytes is over the limit of {self._limit}")
        size = head + (4 if second & 0x80 else 0) + length
        return position + size if have >= size else 0

    @staticmethod
    def _frame(data: bytes, position: int, end: int) -> tuple[bool, bytes]:
        if data[position] != _BINARY:
            return False, data[position:end]
        second = data[position + 1]
        length = second & 0x7F
        start = position + (2 if length < 126 else 4 if length == 126 else 10)
        if not second & 0x80:
            return True, data[start:end]
        return True, apply_mask(data[start + 4 : end], data[start : start + 4])


def message_head(length: int, mask: bytes = b"") -> bytes:
    """What comes before the payload of an unfragmented binary message; with a mask, a client's."""
    bit = 0x80 if mask else 0
    if length < 126:
        head = struct.pack("!BB", _BINARY, bit | length)
    elif length < 65536:
        head = struct.pack("!BBH", _BINARY, bit | 126, length)
    else:
        head = struct.pack("!BBQ", _BINARY, bit | 127, length)
    return head + mask
