"""`Frame`: the base of every message on the link, checks that its kinds share, and their framing.

On a stream of bytes a frame is a length (4 bytes, big endian), then a msgpack list that begins with a kind.
Threadlets use it with the weaver over TCP; the gateway and the drivers use it over the weaver's unix socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgpack

from loom.errors import ProtocolMismatch, TooLarge
from loom.wire.body import Body
from loom.wire.length_prefix import LENGTH

MAX_COUNT = 1 << 53  # the bound of steps, epochs and sequence numbers, so that a double holds them exactly
MAX_NAME = 200  # characters of the longest name
MAX_VALUES = 10_000  # keys of the largest map of values, such as a configuration
MAX_FRAME = 16 << 20  # bytes of the largest frame, not counting its length field
MAX_HELLO = 1 << 20  # bytes of the largest frame from a peer that has not authenticated yet

F = TypeVar("F", bound="Frame")


class Frame(Body):
    """A message on the link: a frozen dataclass that travels as a list, its kind before its fields."""

    __slots__: tuple[str, ...] = ()

    def to_body(self) -> list[Any]:
        """Return the frame as a list for msgpack: its kind, then its fields."""
        return [self.KIND, *(getattr(self, name) for name in self.__slots__)]

    @classmethod
    def from_body(cls: type[F], body: Sequence[Any]) -> F:
        """Check a received list, whose kind is known, and return it as a frame."""
        return super().from_body(body[1:])

    @classmethod
    def mismatch(cls, body: Any, why: str = "") -> ProtocolMismatch:
        return ProtocolMismatch(f"not {cls.title()}: {body!r:.80}" + (f": {why}" if why else ""))


def check_count(field: str, value: Any) -> int | None:
    """Return a count, such as a step, or None."""
    if value is not None and (type(value) is not int or not 0 <= value < MAX_COUNT):
        raise ProtocolMismatch(f"{field} is a count or None, not {value!r:.80}")
    return value


def optional_text(body: Mapping[str, object], field: str) -> str | None:
    """Return a text of at most `MAX_NAME` characters, or None if the field is missing."""
    value = body.get(field)
    if value is not None and (type(value) is not str or len(value) > MAX_NAME):
        raise ProtocolMismatch(f"{field} is a text of at most {MAX_NAME} characters, not {value!r:.80}")
    return value


def printable(body: Mapping[str, object], field: str) -> str:
    """Return a printable text of 1 to `MAX_NAME` characters."""
    value = optional_text(body, field)
    if not value or not value.isprintable():
        raise ProtocolMismatch(f"{field} is a printable text, not {value!r:.80}")
    return value


def values(field: str, value: Any) -> dict[str, Any]:
    """Return a map of at most `MAX_VALUES` keys, such as a configuration."""
    if type(value) is not dict or len(value) > MAX_VALUES:
        raise ProtocolMismatch(f"{field} is keys and values, not {value!r:.80}")
    return value


def pack(frame: Sequence[Any]) -> bytes:
    """Return the bytes of a frame. Characters that are not Unicode, as in some file names, become question marks.

    Raises:
        TooLarge: the frame has more than `MAX_FRAME` bytes.
        TypeError: the frame holds something other than text, numbers, bytes, None, lists and dicts.
        OverflowError: a number in the frame has more than 64 bits.
    """
    body: bytes = msgpack.packb(frame, unicode_errors="replace")
    if len(body) > MAX_FRAME:
        raise _too_large(frame[0], body)
    return LENGTH.pack(len(body)) + body


def pack_value(value: Any) -> bytes:
    """Return the bytes of a value in a frame, for `pack_around`; raise what `pack` raises."""
    packed: bytes = msgpack.packb(value, unicode_errors="replace")
    return packed


def pack_around(first: Sequence[Any], last: bytes) -> bytes:
    """Return the bytes of a frame of some items and of one more, the last, that is packed already."""
    header: bytes = msgpack.Packer().pack_array_header(len(first) + 1)
    body = b"".join([header, *map(pack_value, first), last])
    if len(body) > MAX_FRAME:
        raise _too_large(first[0], body)
    return LENGTH.pack(len(body)) + body


def _too_large(kind: Any, body: bytes) -> TooLarge:
    return TooLarge(f"a {kind!r:.40} frame has {len(body)} bytes; the limit is {MAX_FRAME}")


def unpack_all(bodies: Iterable[bytes]) -> list[list[Any]]:
    """Return the frames with some bodies, such as a splitter yields; raise what `unpack` raises."""
    return [unpack(body) for body in bodies]


def unpack(body: bytes) -> list[Any]:
    """Return the frame with a body. Raise `ProtocolMismatch` if it is none."""
    try:
        frame = msgpack.unpackb(body, ext_hook=refuse_extension)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolMismatch(f"not a frame of the weaver's link: {error}") from error
    if type(frame) is not list or not frame or type(frame[0]) is not str:
        raise ProtocolMismatch(f"not a frame of the weaver's link: {frame!r:.80}")
    return frame


def refuse_extension(code: int, data: bytes) -> Any:
    """Raise `ValueError`: frames have no extension types of msgpack."""
    raise ValueError(f"it holds an extension of type {code}")
