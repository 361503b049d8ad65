"""Streams: every message arrives once and in order, whatever becomes of the connections."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loom.errors import ProtocolMismatch
from loom.wire.frames import decode_frame, encode_frame
from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.mux import CHUNK_SIZE
from loom.wire.stream import WINDOW, Stream, unnumbered_frame

CALL = Message(Kind.CALL, 7, (1, "add"), [b"payload"])
OUTSIDE = [Kind.HELLO, Kind.WELCOME, Kind.REFUSE, Kind.OPEN, Kind.ENDED, Kind.EVENT, Kind.PROBE, Kind.PROBED]


def frame(seq: int, ack: int = 0, *messages: Message) -> bytes:
    return b"".join(encode_frame(seq, ack, messages))


def next_frame(stream: Stream) -> bytes:
    framed = stream.next_frame()
    assert framed is not None
    (length,) = LENGTH.unpack_from(framed)
    assert len(framed) == LENGTH.size + length
    return framed[LENGTH.size :]


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


@pytest.mark.parametrize("seq", [4, 100])
def test_a_gap_is_refused(seq: int) -> None:
    stream = Stream()
    stream.receive(frame(1, 0, CALL))
    stream.receive(frame(2, 0, CALL))

    with pytest.raises(ProtocolMismatch, match=f"frame {seq} came where frame 3 had to come"):
        stream.receive(frame(seq, 0, CALL))
    assert stream.received == 2


@pytest.mark.parametrize("seq", [1, 2])
def test_what_has_come_already_is_passed_over(seq: int) -> None:
    stream = Stream()
    stream.receive(frame(1, 0, CALL))
    stream.receive(frame(2, 0, CALL))

    assert not stream.receive(frame(seq, 0, CALL))
    assert stream.received == 2


def test_an_acknowledgement_of_what_was_not_sent_is_refused() -> None:
    stream = Stream()
    stream.put(CALL)
    next_frame(stream)

    with pytest.raises(ProtocolMismatch, match="frame 2 was acknowledged; 1 have been sent"):
        stream.receive(frame(1, 2, CALL))


def test_an_older_acknowledgement_changes_nothing() -> None:
    stream = Stream()
    for _ in range(2):
        stream.put(CALL)
        next_frame(stream)
    stream.receive(frame(1, 2, CALL))

    stream.receive(frame(2, 1, CALL))

    assert stream.acknowledged == 2


def test_what_was_not_received_is_sent_again_on_the_next_connection() -> None:
    client, driver = Stream(), Stream()
    client.put(CALL)
    driver.receive(next_frame(client))
    client.put(CALL)
    lost = next_frame(client)

    client.resume(driver.received)

    assert next_frame(client) == lost
    assert client.next_frame() is None


def test_a_frame_is_kept_until_it_is_acknowledged() -> None:
    client, driver = Stream(), Stream()
    client.put(CALL)
    driver.receive(next_frame(client))
    assert client.kept_bytes > 0

    client.receive(driver.acknowledgement()[LENGTH.size :])

    assert client.kept_bytes == 0
    assert client.acknowledged == 1


@pytest.mark.parametrize("received", [0, 3])
def test_a_stream_cannot_be_resumed_where_frames_are_lacking(received: int) -> None:
    client, driver = Stream(), Stream()
    for _ in range(2):
        client.put(CALL)
        driver.receive(next_frame(client))
    client.receive(driver.acknowledgement()[LENGTH.size :])

    with pytest.raises(ProtocolMismatch, match=r"received up to frame 0, though it|up to frame 3, though 2 have"):
        client.resume(received)


def test_a_full_window_lets_nothing_new_out_until_some_of_it_is_acknowledged() -> None:
    client, driver = Stream(), Stream()
    piece = bytes(CHUNK_SIZE)
    arrived = []
    for _ in range(2 * WINDOW // CHUNK_SIZE):
        client.put(CALL._replace(parts=[piece]))
    while client.ready:
        arrived.append(next_frame(client))
    assert client.next_frame() is None
    assert WINDOW <= client.kept_bytes < WINDOW + 2 * CHUNK_SIZE

    for data in arrived:
        driver.receive(data)
    assert driver.ack_due
    acknowledgement = driver.next_frame()
    assert acknowledgement is not None
    assert not driver.ack_due
    client.receive(acknowledgement[LENGTH.size :])

    assert client.kept_bytes == 0
    assert client.next_frame() is not None


class Lossy(RuleBasedStateMachine):
    """Two streams over connections that lose all that is under way at any moment: all arrives once, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = (Stream(), Stream())
        self.under_way: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        self.put: tuple[list[int], list[int]] = ([], [])
        self.arrived: tuple[list[int], list[int]] = ([], [])

    @rule(end=st.integers(0, 1), size=st.sampled_from([0, 10, 3 * CHUNK_SIZE]))
    def put_message(self, end: int, size: int) -> None:
        number = len(self.put[end]) + 1
        self.put[end].append(number)
        self.ends[end].put(Message(Kind.CALL, number, (1, "add"), [bytes(size)]), key=1)

    @rule(end=st.integers(0, 1))
    def send_frame(self, end: int) -> None:
        framed = self.ends[end].next_frame()
        if framed is not None:
            self.under_way[end].append(framed)

    @rule(end=st.integers(0, 1))
    def send_acknowledgement(self, end: int) -> None:
        self.under_way[end].append(self.ends[end].acknowledgement())

    @rule(end=st.integers(0, 1))
    def receive_frame(self, end: int) -> None:
        if self.under_way[end]:
            data = self.under_way[end].popleft()[LENGTH.size :]
            self.arrived[end].extend(message.id for message in self.ends[1 - end].receive(data))

    @rule()
    def lose_the_connection(self) -> None:
        for end in (0, 1):
            self.under_way[end].clear()
        for end in (0, 1):
            self.ends[end].resume(self.ends[1 - end].received)

    @invariant()
    def all_arrives_once_and_in_order(self) -> None:
        for end in (0, 1):
            assert self.arrived[end] == self.put[end][: len(self.arrived[end])]

    def teardown(self) -> None:
        self.lose_the_connection()
        for end in (0, 1):
            while (framed := self.ends[end].next_frame()) is not None:
                self.under_way[end].append(framed)
                self.receive_frame(end)
            assert self.arrived[end] == self.put[end]


TestLossy = Lossy.TestCase
TestLossy.settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=30)


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
