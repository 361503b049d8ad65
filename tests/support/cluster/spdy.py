"""As much of SPDY/3.1, the predecessor of HTTP/2, as kubectl speaks to forward ports: streams, no flow control.

As in https://www.chromium.org/spdy/spdy-protocol/spdy-protocol-draft3-1/; kubectl ignores windows and so does this.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

__all__ = ["FIN", "Data", "Decoder", "Encoder", "Opened", "Reset"]

FIN = 1
"""The flag of the last frame of a stream's direction."""

_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _PING, _GOAWAY = 1, 2, 3, 6, 7

_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age "
    "allow authorization cache-control connection content-base content-encoding content-language content-length "
    "content-location content-md5 content-range content-type date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma "
    "proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status"
)
_MORE_WORDS = ("200 OK", "version", "HTTP/1.1", "url", "public", "set-cookie", "keep-alive", "origin")
_REST = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized"
    "403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable"
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT"
    "chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,"
    "text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)


def _counted(text: str) -> bytes:
    return struct.pack(">I", len(text)) + text.encode()


DICTIONARY = b"".join(map(_counted, [*_WORDS.split(), *_MORE_WORDS])) + _REST.encode()
"""What header blocks are compressed with. Both sides have it."""


@dataclass(frozen=True)
class Opened:
    """The other side has opened a stream."""

    stream: int
    headers: dict[str, str]
    last: bool


@dataclass(frozen=True)
class Data:
    """Bytes of a stream; the last ones of their direction if ``last``."""

    stream: int
    body: bytes
    last: bool


@dataclass(frozen=True)
class Reset:
    """The other side has given a stream up."""

    stream: int


@dataclass(frozen=True)
class Ping:
    number: int


@dataclass
class Decoder:
    """Makes events of bytes, however they are cut."""

    _buffer: bytearray = field(default_factory=bytearray)
    _inflate: zlib._Decompress = field(default_factory=lambda: zlib.decompressobj(zdict=DICTIONARY))

    def feed(self, received: bytes) -> list[Opened | Data | Reset | Ping]:
        """The events that these bytes complete."""
        self._buffer += received
        events: list[Opened | Data | Reset | Ping] = []
        while len(self._buffer) >= 8:
            head, rest = struct.unpack(">II", self._buffer[:8])
            flags, length = rest >> 24, rest & 0xFFFFFF
            if len(self._buffer) < 8 + length:
                break
            body = bytes(self._buffer[8 : 8 + length])
            del self._buffer[: 8 + length]
            if not head & 0x8000_0000:
                events.append(Data(head, body, bool(flags & FIN)))
            elif (event := self._control(head & 0xFFFF, flags, body)) is not None:
                events.append(event)
        return events

    def _control(self, kind: int, flags: int, body: bytes) -> Opened | Reset | Ping | None:
        (number,) = struct.unpack(">I", body[:4]) if len(body) >= 4 else (0,)
        if kind == _SYN_STREAM:
            return Opened(number, self._headers(body[10:]), bool(flags & FIN))
        if kind == _RST_STREAM:
            return Reset(number)
        return Ping(number) if kind == _PING else None

    def _headers(self, block: bytes) -> dict[str, str]:
        plain = self._inflate.decompress(block)
        at = 4
        texts = []
        for _ in range(2 * struct.unpack(">I", plain[:4])[0]):
            (length,) = struct.unpack(">I", plain[at : at + 4])
            texts.append(plain[at + 4 : at + 4 + length].decode())
            at += 4 + length
        return dict(zip(texts[::2], texts[1::2], strict=True))


class Encoder:
    """Makes bytes of what is to be said."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(zdict=DICTIONARY)

    def accept(self, stream: int) -> bytes:
        """The answer to a stream that was opened; it has no headers."""
        block = self._deflate.compress(struct.pack(">I", 0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return self._frame(_SYN_REPLY, struct.pack(">I", stream) + block)

    def pong(self, number: int) -> bytes:
        return self._frame(_PING, struct.pack(">I", number))

    def data(self, stream: int, body: bytes, last: bool = False) -> bytes:
        return struct.pack(">II", stream, (FIN if last else 0) << 24 | len(body)) + body

    @staticmethod
    def _frame(kind: int, body: bytes) -> bytes:
        return struct.pack(">HHI", 0x8003, kind, len(body)) + body
