"""Large frames of the weaver, which are decoded while the event loop does other things too."""

from __future__ import annotations

import io
from typing import Any

import msgpack

from loom.control.frame import refuse_extension
from loom.errors import ProtocolMismatch
from loom.process.turns import Turns

LARGE = 64 << 10
"""Bytes of a frame that takes too long to be decoded at once."""

_DEPTH = 5
"""Levels whose parts are decoded one by one: those of a snapshot down to the fields of one replica."""

_MANY = 64
"""Parts of a value on a deeper level that is decoded part by part, too."""

_PIECE = 64 << 10  # bytes that are read at once

_BYTES, _TEXT = 0xC6, 0xDB  # the types of msgpack whose length has 32 bits

_AT_ONCE = 16
"""Parts that are decoded between two looks at the clock."""


async def unpack_in_turns(body: bytes) -> list[Any]:
    """Return the frame with a body, as `unpack` does. Raise `ProtocolMismatch` if it is none."""
    decoding = _Decoding(body)
    try:
        frame = await decoding.value(0)
        if decoding.at != len(body):
            raise ValueError("something follows it")
    except (ValueError, TypeError, IndexError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolMismatch(f"not a frame of the weaver's link: {error}") from error
    if type(frame) is not list or not frame or type(frame[0]) is not str:
        raise ProtocolMismatch(f"not a frame of the weaver's link: {frame!r:.80}")
    return frame


class _Decoding:
    """The decoding of one body."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._go_on(0)
        self._turns = Turns()
        self._parts = 0

    async def value(self, depth: int) -> Any:
        """Return the next value, which is on this level."""
        self._parts += 1
        if self._parts % _AT_ONCE == 0:
            await self._turns.rest()
        at = self.at
        kind, count = _header(self._body, at)
        if kind is bytes:
            start, end = at + 5, at + 5 + count
            found = self._body[start:end]
            if len(found) < count:
                raise msgpack.OutOfData
            self._go_on(end)
            return found.decode() if self._body[at] == _TEXT else found
        if kind is None or (depth >= _DEPTH and count < _MANY):
            return self._unpacker.unpack()
        if kind is list:
            return [await self.value(depth + 1) for _ in range(self._unpacker.read_array_header())]
        values = {}
        for _ in range(self._unpacker.read_map_header()):
            name = self._unpacker.unpack()
            if type(name) not in (str, bytes):
                raise ValueError(f"a key is no text: {name!r:.40}")
            values[name] = await self.value(depth + 1)
        return values

    @property
    def at(self) -> int:
        """Where the next value begins."""
        return self._from + int(self._unpacker.tell())

    def _go_on(self, at: int) -> None:
        """Go on at a place. The body is read in pieces, since a copy of all of it takes long, too."""
        stream = io.BytesIO(self._body)
        stream.seek(at)
        self._from = at
        self._unpacker = msgpack.Unpacker(stream, read_size=_PIECE, ext_hook=refuse_extension)


def _header(body: bytes, at: int) -> tuple[type | None, int]:
    """Return whether the value at a place is a list, a dict or long bytes (or a text), and how much is in it."""
    first = body[at]
    if first in (_BYTES, _TEXT):
        return bytes, int.from_bytes(body[at + 1 : at + 5], "big")
    if 0x80 <= first <= 0x8F:
        return dict, first & 15
    if 0x90 <= first <= 0x9F:
        return list, first & 15
    if 0xDC <= first <= 0xDF:
        width = 2 if first in (0xDC, 0xDE) else 4
        return (list if first < 0xDE else dict), int.from_bytes(body[at + 1 : at + 1 + width], "big")
    return None, 0
