"""The first frame of a connection: the key is read first, and nothing else is kept or unpacked before."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import Any

import msgpack
import pytest

from loom.control.frame import MAX_HELLO, pack
from loom.control.handshake import MAX_HEAD, MAX_KEY, PROTOCOL, FirstFrame
from loom.errors import AuthenticationError, ProtocolMismatch
from tests.support.garbage import pieces


def read(key: str) -> str:
    if not key.startswith("good"):
        raise AuthenticationError("wrong")
    return key


def hello(key: object, **more: Any) -> bytes:
    return pack(["hello", {"protocol": PROTOCOL, "key": key, **more}])


def split(data: bytes, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    parts = []
    while data:
        size = chance.choice((1, 2, 5, 1000, 100_000))
        parts.append(data[:size])
        data = data[size:]
    return parts


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "frame",
    [
        pack(["hello", "good"]),
        pack(["hello", "good" + "x" * (MAX_KEY - 4)]),
        hello("good", replica="train_0"),
        hello("good" + "x" * (MAX_KEY - 4), config={"much": "x" * 500_000}),
        pack(["hello", {"key": "good", "protocol": PROTOCOL}]),
        pack(["hello", {"new": [[1, {"deep": [2]}]], "protocol": PROTOCOL, "key": "good"}]),
    ],
)
def test_a_good_key_is_found_however_the_frame_is_cut(frame: bytes, seed: int) -> None:
    first = FirstFrame(MAX_HELLO, read)
    came = b""
    for part in split(frame + b"behind it", seed):
        came += part
        if (found := first.feed(part)) is not None:
            break

    assert found is not None
    assert found[0].startswith("good")
    assert found[1] == came
    assert len(came) <= MAX_HEAD + 100_000  # the last part is what was read from the socket at once


def head(*values: bytes, announced: int = MAX_HELLO) -> bytes:
    return struct.pack(">I", announced) + b"".join(values)


HELLO = b"\x92" + msgpack.packb("hello")
BAD = [
    pack(["dance", "good"]),
    pack(["hello"]),
    pack(["hello", 1]),
    pack(["hello", b"good"]),
    pack(["hello", ["good"]]),
    pack(["hello", ""]),
    pack(["hello", {}]),
    pack(["hello", {"protocol": 7, "key": "good"}]),
    pack(["hello", {"protocol": [7], "key": "good"}]),
    pack(["hello", {str(number): 1 for number in range(100)} | {"key": "good"}]),
    pack(["hello", {"large": "x" * MAX_HEAD, "key": "good"}]),
    pack(["hello", "good" + "x" * MAX_KEY]),
    pack(["hello", "good", "more"]),
    hello(["good"]),
    hello({"key": "good"}),
    head(announced=1 << 30),
    head(HELLO, b"\x81\xa3key\xdb\x40\x00\x00\x00", b"x" * MAX_HEAD),  # a text of 1 GiB
    head(HELLO, b"\x81\xa3key\xdd\x40\x00\x00\x00", b"\x90" * MAX_HEAD),  # a list of 2^30
    head(HELLO, b"\xdf\xff\xff\xff\xff" * 1000),
    head(HELLO, b"\x81\xa1x", b"\xdd\xff\xff\xff\xff" * 2000),  # lists within lists
    head(b"\x91" * MAX_HEAD),
    head(b"\x92\xc7\xff\x05", b"x" * MAX_HEAD),
    head(b"\xc1" * MAX_HEAD),
    head(b"\x92\xa5hello\xa4\xff\xff\xff\xff", announced=11),
    *(struct.pack(">I", len(piece)) + piece for piece in pieces(56) if len(piece) > 100),
]


def feed_all(first: FirstFrame[str], frame: bytes) -> None:
    """Feed a frame as far as the limit for its head."""
    for position in range(0, MAX_HEAD + 512, 512):
        first.feed(frame[position : position + 512])


@pytest.mark.parametrize("frame", BAD)
def test_what_has_no_good_key_at_its_beginning_is_refused_there(frame: bytes) -> None:
    first = FirstFrame(MAX_HELLO, read)
    tracemalloc.start()
    try:
        with pytest.raises((ProtocolMismatch, AuthenticationError)):
            feed_all(first, frame)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 200_000


def test_a_wrong_key_is_refused_before_the_rest_of_its_frame_has_come() -> None:
    frame = hello("wrong", config={"much": "x" * 900_000})

    first = FirstFrame(MAX_HELLO, read)
    with pytest.raises(AuthenticationError):
        first.feed(frame[:100])

    assert first.missing == len(frame) - 100
