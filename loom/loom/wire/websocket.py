"""A parser of WebSocket frames (RFC 6455, 5.2) for Loom's binary messages only.

Each of Loom's messages is one WebSocket frame. They bypass `websockets`' parser, a chain of generators, which costs
more than the rest of the gateway's work for a small call. All other frames (control frames, fragments) go on to
`websockets` unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import cast

from websockets.frames import apply_mask as apply_mask  # type: ignore[attr-defined]  # in C, if it can be

from loom.errors import TooLarge
from loom.wire.messages import Buffer

_BINARY = 0x82  # first byte of an unfragmented binary message
_SMALL = 16 << 10  # bytes up to which a copy costs less than a view

_U16 = struct.Struct("!H")
_U64 = struct.Struct("!Q")


class WebSocketFrames:
    """A splitter of received bytes into frames, whose payloads have ``limit`` bytes at most.

    The pieces of a message are unmasked as they come and never joined, so that passing them on needs no copy.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = b""  # the bytes of a head that has not come whole
        self._pieces: list[Buffer] = []
        """The received bytes of the frame under way: the payload of a message, or another frame with its head."""
        self._missing = 0  # bytes that the frame under way still lacks
        self._is_message = False
        self._mask = b""

    def receive(self, data: bytes) -> Iterator[tuple[bool, list[Buffer]]]:
        """Yield each frame that is whole now, in pieces: (True, payload) of a message, else (False, frame)."""
        if self._head:
            data = self._head + data
            self._head = b""
        position = 0
        if self._missing:
            position = self._take(data, 0)
            if self._missing:
                return
            yield self._whole()
        while position < len(data):
            start = self._begin(data, position)
            if start < 0:
                self._head = data[position:]
                return
            position = self._take(data, start)
            if self._missing:
                return
            yield self._whole()

    def _begin(self, data: bytes, position: int) -> int:
        """Read the head of a frame; return the position of the bytes to take, or -1 if the head is not whole."""
        have = len(data) - position
        if have < 2:
            return -1
        second = data[position + 1]
        length = second & 0x7F
        head = 2 if length < 126 else 4 if length == 126 else 10
        masked = 4 if second & 0x80 else 0
        if have < head + masked:
            return -1
        if length == 126:
            (length,) = _U16.unpack_from(data, position + 2)
        elif length == 127:
            (length,) = _U64.unpack_from(data, position + 2)
        if length > self._limit:
            raise TooLarge(f"a WebSocket frame of {length} bytes is over the limit of {self._limit}")
        self._is_message = data[position] == _BINARY
        if not self._is_message:
            self._mask = b""
            self._missing = head + masked + length
            return position
        start = position + head + masked
        self._mask = data[start - masked : start]
        self._missing = length
        return start

    def _take(self, data: bytes, start: int) -> int:
        """Take the bytes of the frame under way that have come; return where they end."""
        end = min(start + self._missing, len(data))
        if end == start:
            return end
        piece: Buffer = data[start:end] if end - start < _SMALL else memoryview(data)[start:end]
        mask = self._mask
        if mask:
            piece = apply_mask(cast(bytes, piece), mask)
            turn = len(piece) & 3
            self._mask = mask[turn:] + mask[:turn]
        self._pieces.append(piece)
        self._missing -= end - start
        return end

    def _whole(self) -> tuple[bool, list[Buffer]]:
        pieces, self._pieces = self._pieces, []
        return self._is_message, pieces


def joined(pieces: Sequence[Buffer]) -> bytes:
    """Join the pieces of a frame."""
    if len(pieces) == 1 and type(pieces[0]) is bytes:
        return pieces[0]
    return b"".join(pieces)


def message_head(length: int, mask: bytes = b"") -> bytes:
    """Return the head of an unfragmented binary message; with a mask, that of a client's."""
    bit = 0x80 if mask else 0
    if length < 126:
        head = struct.pack("!BB", _BINARY, bit | length)
    elif length < 65536:
        head = struct.pack("!BBH", _BINARY, bit | 126, length)
    else:
        head = struct.pack("!BBQ", _BINARY, bit | 127, length)
    return head + mask
