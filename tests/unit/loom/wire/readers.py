"""What reads bytes of a stranger, as functions to be fuzzed."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Iterator

from loom.errors import ProtocolMismatch, TooLarge
from loom.wire.frames import decode_frame, encode_frame, pack_texts, unpack_texts
from loom.wire.handshake import Hello, Welcome, check_protocol, error_from_refusal, refusal
from loom.wire.messages import Kind, Message
from loom.wire.mux import ChunkInbox
from loom.wire.stream import Stream, unnumbered_frame
from loom.wire.websocket import WebSocketFrames, joined, message_head

__all__ = ["ALLOWED", "READERS", "read", "seeds"]

ALLOWED = (ProtocolMismatch, TooLarge)
"""What may be raised at bytes that are not in order."""

LARGEST = 1 << 20
"""Bytes of a message that the fuzzed stream takes."""


def _pieces(data: bytes) -> Iterator[bytes]:
    """Cut bytes into pieces, each behind its length in two bytes."""
    position = 0
    while position + 2 <= len(data):
        (length,) = struct.unpack_from(">H", data, position)
        yield data[position + 2 : position + 2 + length]
        position += 2 + length


def read_frame(data: bytes) -> None:
    """A frame, and what a handshake in it says."""
    for message in decode_frame(data).messages:
        for read_body in (_read_hello, _read_welcome, _read_refusal):
            try:
                read_body(message)
            except ALLOWED:
                continue


def _read_hello(message: Message) -> None:
    check_protocol(Hello.from_body(message.body).protocol, "gateway", "client")


def _read_welcome(message: Message) -> None:
    check_protocol(Welcome.from_body(message.body).protocol, "client", "cluster")


def _read_refusal(message: Message) -> None:
    error_from_refusal(message)


def read_stream(data: bytes) -> None:
    """Frames of a stream, one after the other."""
    stream = Stream(max_message=LARGEST)
    for number in range(3):
        stream.put(Message(Kind.CALL, number, (number, "add")))
        stream.next_frame()
    for frame in _pieces(data):
        stream.receive(frame)


def read_chunks(data: bytes) -> None:
    """Messages as chunks, in frames that are in order."""
    inbox = ChunkInbox(LARGEST, in_pieces={Kind.CALL})
    for frame in _pieces(data):
        for message in decode_frame(frame).messages:
            inbox.receive(message)


def read_websocket(data: bytes) -> None:
    """WebSocket frames, cut where the first byte has it."""
    splitter = WebSocketFrames(LARGEST)
    cuts = random.Random(data[:1])
    position = 1
    while position < len(data):
        length = cuts.randint(1, 40)
        for _, pieces in splitter.receive(data[position : position + length]):
            joined(pieces)
        position += length


def read_texts(data: bytes) -> None:
    """A map of texts."""
    unpack_texts(data)


READERS: dict[str, Callable[[bytes], None]] = {
    "frame": read_frame,
    "stream": read_stream,
    "chunks": read_chunks,
    "websocket": read_websocket,
    "texts": read_texts,
}

_ORDER = list(READERS.values())


def read(data: bytes) -> None:
    """Have the reader that the first byte names read the others."""
    if data:
        with contextlib.suppress(*ALLOWED):
            _ORDER[data[0] % len(_ORDER)](data[1:])


def seeds() -> dict[str, list[bytes]]:
    """Bytes that are in order, for each reader."""
    call = Message(Kind.CALL, 7, (1, "add", {"a": None}), [b"payload", bytearray(40)])
    shakes = [Hello(session="train").message(), Welcome("train", ["tcp://10.0.0.1:26600"]).message()]
    chunks = [
        Message(Kind.CHUNK, 1, (0, 8, (int(Kind.CALL), 7, (1, "add"), [3, 5], [True, False])), [b"1234"]),
        Message(Kind.CHUNK, 1, (4, 8, None), [b"5678"]),
    ]
    numbered = [b"".join(encode_frame(number, 0, [call])) for number in (1, 2, 3)]
    return {
        "frame": [
            numbered[0],
            *(b"".join(unnumbered_frame(message)) for message in [*shakes, refusal(TooLarge("no"))]),
        ],
        "stream": [_behind_lengths(numbered)],
        "chunks": [_behind_lengths([b"".join(encode_frame(1, 0, [message])) for message in chunks])],
        "websocket": [b"\x01" + message_head(3) + b"abc" + message_head(3, b"mask") + b"abc\x89\x00"],
        "texts": [pack_texts({"text": "no", "number": 3})],
    }


def _behind_lengths(frames: list[bytes]) -> bytes:
    return b"".join(struct.pack(">H", len(frame)) + frame for frame in frames)
