"""`FirstFrame`: the first frame of a connection, of which nothing is kept or unpacked before its key is good.

A first frame is ``["hello", key]``, or ``["hello", {"protocol": 1, "key": key, …}]`` from a threadlet. The key is
at its beginning, so `MAX_HEAD` bytes are enough to find it. Until then no length in the frame is believed: only the
kind, the names in front of the key, and the key are unpacked; other values are passed over without making them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgpack

from loom.control.introduction import MAX_KEY, PROTOCOL
from loom.errors import ProtocolMismatch
from loom.wire.framing import LENGTH

MAX_HEAD = MAX_KEY + 512
"""Bytes of a first frame in which its key has to end."""

_MAX_FIELDS = 8  # fields of a threadlet's hello up to its key

G = TypeVar("G")


class FirstFrame(Generic[G]):
    """The bytes of a connection up to the key in its first frame.

    Args:
        limit: bytes of the largest first frame.
        read: returns what a key grants; raises `AuthenticationError` if the key is wrong.
    """

    def __init__(self, limit: int, read: Callable[[str], G]) -> None:
        self._limit = limit
        self._read = read
        self._head = b""  # what has come; `MAX_HEAD` bytes at most between two calls of `feed`
        self.missing = 0
        """Bytes of the frame that have not come, as far as its length has."""

    def feed(self, data: bytes) -> tuple[G, bytes] | None:
        """Return what the key grants, and every byte of the connection until now; None until the key has come.

        Raises:
            ProtocolMismatch: the frame is no hello, is too large, or has no key at its beginning.
            AuthenticationError: the key is wrong.
        """
        data = self._head + data
        if len(data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data)
            if length > self._limit:
                raise ProtocolMismatch(f"the first frame claims {length} bytes; the limit is {self._limit}")
            end = LENGTH.size + length
            self.missing = max(end - len(data), 0)
            key = _key_in(data[LENGTH.size : min(end, MAX_HEAD)], whole=end <= min(len(data), MAX_HEAD))
            if key is not None:
                self._head = b""
                return self._read(key), data
            if len(data) >= MAX_HEAD:
                raise ProtocolMismatch(f"the first frame has no key in its first {MAX_HEAD} bytes")
        self._head = data
        return None


def _key_in(head: bytes, whole: bool) -> str | None:
    """Return the key in the beginning of a frame; None if more has to come."""
    unpacker = msgpack.Unpacker(
        max_buffer_size=MAX_HEAD, max_array_len=0, max_map_len=0, max_bin_len=0, max_ext_len=0
    )
    unpacker.feed(head)
    try:
        length, kind = unpacker.read_array_header(), unpacker.unpack()
        if kind != "hello" or length != 2:
            raise ProtocolMismatch(f"the first frame on the link is a hello, not {kind!r:.40}")
        key = unpacker.unpack() if _is_text(head, unpacker.tell()) else _key_of_map(unpacker)
    except msgpack.OutOfData:
        if whole:
            raise ProtocolMismatch("the first frame on the link is a hello; this one ends within") from None
        return None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolMismatch(f"the first frame on the link is a hello, not this: {error}") from error
    if type(key) is not str or len(key) > MAX_KEY:
        raise ProtocolMismatch(f"key is a text of at most {MAX_KEY} characters")
    return key


def _is_text(head: bytes, position: int) -> bool:
    if position >= len(head):
        raise msgpack.OutOfData
    first = head[position]
    return 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB


def _key_of_map(unpacker: msgpack.Unpacker) -> str:
    for _ in range(min(unpacker.read_map_header(), _MAX_FIELDS)):
        name = unpacker.unpack()
        if name == "key":
            key: str = unpacker.unpack()
            return key
        if name != "protocol":
            unpacker.skip()
        elif (protocol := unpacker.unpack()) != PROTOCOL:
            raise ProtocolMismatch(f"the threadlet speaks version {protocol!r:.20}, the weaver {PROTOCOL}")
    raise ProtocolMismatch("the first frame on the link has no key at its beginning")
