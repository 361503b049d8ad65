"""Streams: frames are numbered, and only the frame that has to come next is taken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loom.errors import ProtocolMismatch
from loom.wire.frames import decode_frame, encode_frame
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.stream import Stream, unnumbered_frame

CALL = Message(Kind.CALL, 7, (1, "add"), [b"payload"])
OUTSIDE = [Kind.HELLO, Kind.WELCOME, Kind.REFUSE, Kind.OPEN, Kind.ENDED]


def frame(seq: int, ack: int = 0, *messages: Message) -> bytes:
    return b"".join(encode_frame(seq, ack, messages))


def next_frame(stream: Stream) -> bytes:
    buffers = stream.next_frame()
    assert buffers is not None
    return b"".join(buffers)


def plain(message: Message) -> tuple[object, ...]:
    return message.kind, message.id, tuple(message.body), [bytes(part) for part in message.parts]


def test_frames_are_numbered_from_one() -> None:
    stream = Stream()
    numbers = []
    for _ in range(3):
        stream.put(CALL)
        numbers.append(decode_frame(next_frame(stream)).seq)

    assert numbers == [1, 2, 3]
    assert stream.sent == 3


def test_there_is_no_frame_when_nothing_was_put() -> None:
    stream = Stream()

    assert stream.next_frame() is None
    assert stream.sent == 0


def test_a_message_arrives_as_it_was_put() -> None:
    client, driver = Stream(), Stream()
    client.put(CALL)

    (arrived,) = driver.receive(next_frame(client))

    assert plain(arrived) == plain(CALL)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.booleans(), max_size=30))
def test_each_side_acknowledges_what_it_has_received(turns: list[bool]) -> None:
    client, driver = Stream(), Stream()
    for client_speaks in turns:
        speaker, listener = (client, driver) if client_speaks else (driver, client)
        speaker.put(CALL)
        listener.receive(next_frame(speaker))
        assert listener.received == speaker.sent
        assert listener.acknowledged == speaker.received


@pytest.mark.parametrize("seq", [1, 2, 4, 100])
def test_a_gap_or_a_duplicate_is_refused(seq: int) -> None:
    stream = Stream()
    stream.receive(frame(1, 0, CALL))
    stream.receive(frame(2, 0, CALL))

    with pytest.raises(ProtocolMismatch, match=f"frame {seq} came where frame 3 had to come"):
        stream.receive(frame(seq, 0, CALL))
    assert stream.received == 2


def test_an_acknowledgement_of_what_was_not_sent_is_refused() -> None:
    stream = Stream()
    stream.put(CALL)
    next_frame(stream)

    with pytest.raises(ProtocolMismatch, match="frame 2 was acknowledged; 1 have been sent"):
        stream.receive(frame(1, 2, CALL))


def test_an_acknowledgement_that_goes_back_is_refused() -> None:
    stream = Stream()
    for _ in range(2):
        stream.put(CALL)
        next_frame(stream)
    stream.receive(frame(1, 2, CALL))

    with pytest.raises(ProtocolMismatch, match="frame 1 was acknowledged"):
        stream.receive(frame(2, 1, CALL))


@pytest.mark.parametrize("kind", OUTSIDE)
def test_the_handshake_travels_outside_the_numbered_stream(kind: Kind) -> None:
    stream = Stream()

    (message,) = stream.receive(b"".join(unnumbered_frame(Message(kind, 0, ("body",)))))

    assert message.kind == kind
    assert stream.received == 0


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in OUTSIDE] + [200])
def test_everything_else_is_refused_outside_the_numbered_stream(kind: int) -> None:
    with pytest.raises(ProtocolMismatch, match="outside the numbered stream"):
        Stream().receive(b"".join(unnumbered_frame(Message(kind, 0, ()))))


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", bytearray(20)])
def test_what_is_no_frame_is_refused(data: Buffer) -> None:
    with pytest.raises(ProtocolMismatch, match="not a frame"):
        Stream().receive(data)
