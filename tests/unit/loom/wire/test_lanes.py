"""Streams with two lanes: nothing is lost, doubled or overtaken, whichever connection is lost when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from unittest.mock import patch

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from loom.errors import ProtocolMismatch
from loom.wire import mux, stream
from loom.wire.frames import decode_frame, encode_frame
from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Kind, Message
from loom.wire.mux import BARRIER, OrderKey
from loom.wire.stream import Stream

CHUNK = 16
ENDS = st.integers(0, 1)
SIZES = st.sampled_from([0, 3, CHUNK + 1, 4 * CHUNK])
KEYS = st.sampled_from([None, BARRIER, 1, 1, 2])
SOME = st.sampled_from([1, 2, 20])


@pytest.fixture(autouse=True, scope="module")
def _small_frames() -> Iterator[None]:
    """Chunks of 16 bytes, frames of 4 messages, a window of a few frames, so that much happens in a fast test."""
    with (
        patch.object(mux, "CHUNK_SIZE", CHUNK),
        patch.object(mux, "_FRAME_MESSAGES", 4),
        patch.object(stream, "WINDOW", 300),
        patch.object(stream, "WINDOW", 300),
        patch.object(stream, "ACK_FRAMES", 3),
    ):
        yield


def call(ident: int, size: int) -> Message:
    return Message(Kind.CALL, ident, (), [bytes([ident % 251]) * size] if size else [])


def content(framed: bytes | None) -> bytes:
    assert framed is not None
    return framed[LENGTH.size :]


def pair() -> tuple[Stream, Stream]:
    return Stream(lanes=True), Stream(lanes=True)


def idents(messages: object) -> list[int]:
    return [message.id for message in messages]  # type: ignore[attr-defined]


class Line:
    """A connection of its own for the bulk lane: frames under way each way, until it is lost."""

    def __init__(self) -> None:
        self.under_way: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        self.lost = False


class TwoConnections(RuleBasedStateMachine):
    """Two ends, a connection that is made again at once, and one for bulk that comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = pair()
        self.under_way: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        self.lines: list[Line] = []
        self.uses: list[Line | None] = [None, None]
        self.welcomed: tuple[Line, int] | None = None
        self.missing: tuple[dict[int, tuple[OrderKey, int]], dict[int, tuple[OrderKey, int]]] = ({}, {})
        self.count = 0
        self.open_for_bulk()
        self.take_the_welcome()

    # -- messages

    @rule(end=ENDS, messages=st.lists(st.tuples(SIZES, KEYS), min_size=1, max_size=3))
    def put(self, end: int, messages: list[tuple[int, OrderKey]]) -> None:
        for size, key in messages:
            self.put_one(end, size, key)

    def put_one(self, end: int, size: int, key: OrderKey) -> None:
        self.count += 1
        self.missing[end][self.count] = key, size
        self.ends[end].put(call(self.count, size), key)

    def arrive(self, end: int, messages: list[Message]) -> None:
        missing = self.missing[1 - end]
        for message in messages:
            key, size = missing.pop(message.id)
            assert b"".join(message.parts) == bytes([message.id % 251]) * size
            overtaken = [
                ident
                for ident, (other, _) in missing.items()
                if ident < message.id
                and key is not None
                and other is not None
                and (key == other or BARRIER in (key, other))
            ]
            assert not overtaken, f"{message.id} came before {overtaken}"

    # -- frames

    @rule(end=ENDS, most=SOME)
    def send(self, end: int, most: int) -> None:
        for _ in range(most):
            framed = self.ends[end].next_frame()
            if framed is not None:
                self.under_way[end].append(framed)

    @rule(end=ENDS, most=SOME)
    def receive(self, end: int, most: int) -> None:
        for _ in range(min(most, len(self.under_way[1 - end]))):
            self.arrive(end, list(self.ends[end].receive(content(self.under_way[1 - end].popleft()))))

    @precondition(lambda self: any(self.uses))
    @rule(end=ENDS, most=SOME)
    def send_bulk(self, end: int, most: int) -> None:
        line = self.uses[end]
        if line is not None:
            for _ in range(most):
                framed = self.ends[end].next_bulk_frame()
                if framed is not None and not line.lost:
                    line.under_way[end].append(framed)

    @precondition(lambda self: self.lines)
    @rule(end=ENDS, back=st.sampled_from([1, 1, 2]), most=SOME)
    def receive_bulk(self, end: int, back: int, most: int) -> None:
        under_way = self.lines[max(len(self.lines) - back, 0)].under_way[1 - end]
        for _ in range(min(most, len(under_way))):
            self.ends[end].receive_bulk(content(under_way.popleft()))

    @rule(end=ENDS)
    def hear_the_bell(self, end: int) -> None:
        """Frames may come on the other connection before the thread that takes both hears of what has arrived."""
        self.arrive(end, self.ends[end].arrived())

    # -- connections

    @rule()
    def lose_the_connection(self) -> None:
        for end in (0, 1):
            self.under_way[end].clear()
        for end in (0, 1):
            here, there = self.ends[end], self.ends[1 - end]
            assert here.bulk is not None
            assert there.bulk is not None
            here.resume(there.received)
            if not here.apart:
                here.bulk.resume(there.bulk.received)

    @precondition(lambda self: self.welcomed is None)
    @rule()
    def open_for_bulk(self) -> None:
        """The other end has said yes, and sends already."""
        client, driver = self.ends
        assert client.bulk is not None
        assert driver.bulk is not None
        line = Line()
        self.lines.append(line)
        self.welcomed = line, driver.bulk.received
        self.use(1, line, client.bulk.received)

    @precondition(lambda self: self.welcomed is not None)
    @rule()
    def take_the_welcome(self) -> None:
        assert self.welcomed is not None
        (line, received), self.welcomed = self.welcomed, None
        self.use(0, line, received)

    def use(self, end: int, line: Line | None, received: int | None) -> None:
        bulk = self.ends[end].bulk
        assert bulk is not None
        bulk.resume(received)
        self.ends[end].apart = line is not None
        self.uses[end] = line

    @precondition(lambda self: self.lines)
    @rule(back=st.sampled_from([1, 1, 2]))
    def lose_a_line(self, back: int) -> None:
        line = self.lines[max(len(self.lines) - back, 0)]
        line.lost = True
        for under_way in line.under_way:
            under_way.clear()

    @rule(end=ENDS)
    def notice(self, end: int) -> None:
        line = self.uses[end]
        if line is not None and line.lost:
            self.use(end, None, None)

    def teardown(self) -> None:
        for line in self.lines:
            line.lost = True
        for end in (0, 1):
            self.notice(end)
        self.lose_the_connection()
        for _ in range(20 * self.count + 20):
            for end in (0, 1):
                self.send(end, 1)
                self.receive(1 - end, 1)
        for end in (0, 1):
            self.hear_the_bell(end)
        for end in (0, 1):
            assert not self.missing[end]
            assert not self.ends[end].unsettled
            assert not self.ends[end].ready
            assert not self.ends[end].holds


def test_all_arrives_once_and_in_its_order_whatever_is_lost() -> None:
    run_state_machine_as_test(
        TwoConnections, settings=settings(derandomize=True, deadline=None, max_examples=40, stateful_step_count=40)
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_arrives_however_much_is_lost() -> None:
    run_state_machine_as_test(
        TwoConnections,
        settings=settings(derandomize=True, deadline=None, max_examples=1000, stateful_step_count=60),
    )


def send_all(sender: Stream, receiver: Stream) -> list[int]:
    """What arrives of all that may leave, each lane on its own connection, bulk before control."""
    arrived: list[int] = []
    while sender.bulk_ready:
        receiver.receive_bulk(content(sender.next_bulk_frame()))
    arrived += idents(receiver.arrived())
    while (framed := sender.next_frame()) is not None:
        arrived += idents(receiver.receive(content(framed)))
    return arrived


def apart() -> tuple[Stream, Stream]:
    ends = pair()
    for end in ends:
        end.apart = True
    return ends


def test_what_waits_for_a_large_message_leaves_when_that_is_acknowledged() -> None:
    client, driver = apart()
    client.put(call(1, 3 * CHUNK), 1)
    client.put(call(2, 1), 1)
    client.put(call(3, 1), BARRIER)
    client.put(call(4, 1))

    assert send_all(client, driver) == [1, 4]
    assert client.unsettled
    acknowledgement = driver.next_frame()  # at once, though little has come
    client.receive(content(acknowledgement))
    assert send_all(client, driver) == [2, 3]


def test_what_has_arrived_and_was_not_taken_comes_before_what_waited_for_it() -> None:
    client, driver = apart()
    client.put(call(1, 3 * CHUNK), 7)
    client.put(call(2, 1), 7)
    while client.bulk_ready:
        driver.receive_bulk(content(client.next_bulk_frame()))
    client.receive(content(driver.next_frame()))  # which acknowledges it
    small = client.next_frame()

    assert idents(driver.receive(content(small))) == [1, 2]


def test_a_large_message_waits_for_no_large_one_that_has_left() -> None:
    client, driver = apart()
    for ident in (1, 2):
        client.put(call(ident, 3 * CHUNK), 1)

    assert send_all(client, driver) == [1, 2]


def test_a_large_message_is_held_until_the_small_ones_before_it_have_come() -> None:
    client, driver = apart()
    client.put(call(1, 1), 1)
    client.put(call(2, 3 * CHUNK), 1)
    client.put(call(3, 3 * CHUNK))
    small = content(client.next_frame())
    while client.bulk_ready:
        driver.receive_bulk(content(client.next_bulk_frame()))

    assert idents(driver.arrived()) == [3]
    assert driver.holds
    assert idents(driver.receive(small)) == [1, 2]
    assert not driver.holds


def test_bulk_goes_over_the_first_connection_again_when_the_second_is_lost() -> None:
    client, driver = apart()
    client.put(call(1, 3 * CHUNK))
    driver.receive_bulk(content(client.next_bulk_frame()))
    client.next_bulk_frame()  # which is lost
    assert client.next_frame() is None

    assert client.bulk is not None
    client.bulk.resume()
    client.apart = False

    assert send_one_way(client, driver) == [1]


def test_bulk_does_not_go_over_both_connections_when_the_second_comes_between_two_frames() -> None:
    client, driver = pair()
    client.put(call(1, 4 * CHUNK))
    client.put(call(2, 1))
    assert idents(driver.receive(content(client.next_frame()))) == [2]  # a chunk's turn is next
    assert client.bulk is not None
    client.bulk.resume(0)
    client.apart = True

    assert client.next_frame() is None
    while client.bulk_ready:
        driver.receive_bulk(content(client.next_bulk_frame()))
    assert idents(driver.arrived()) == [1]


def send_one_way(sender: Stream, receiver: Stream) -> list[int]:
    arrived: list[int] = []
    while (framed := sender.next_frame()) is not None:
        arrived += idents(receiver.receive(content(framed)))
    return arrived


def test_an_operation_of_which_nothing_has_come_can_be_taken_back() -> None:
    client, driver = apart()
    client.put(call(1, 3 * CHUNK))
    framed = client.next_bulk_frame()
    first = client.outbox.first_chunk(1)

    assert driver.expects(1, first)
    assert not driver.expects(1)
    driver.receive_bulk(content(framed))
    assert driver.expects(1)
    while client.bulk_ready:
        driver.receive_bulk(content(client.next_bulk_frame()))
    assert driver.expects(1)
    assert idents(driver.arrived()) == [1]
    assert not driver.expects(1, first)


def test_what_was_put_and_has_not_come_is_what_is_left_behind() -> None:
    client, _ = apart()
    client.put(call(1, 3 * CHUNK), 1)
    client.put(call(2, 1), 1)
    client.put(call(3, 1))
    client.next_frame()
    while client.bulk_ready:
        client.next_bulk_frame()

    assert sorted(idents(client.abandon())) == [1, 2, 3]


@pytest.mark.parametrize("arrived", [1, 2, 3])
def test_a_large_message_is_kept_whole_until_all_of_it_has_come(arrived: int) -> None:
    driver, client = Stream(lanes=True, keeps_whole=True), Stream(lanes=True)
    driver.apart = True
    sent = call(1, 3 * CHUNK)
    driver.put(sent)
    driver.put(call(2, CHUNK))
    for number in range(1, 4):
        framed = driver.next_bulk_frame()
        if number <= arrived:
            client.receive_bulk(content(framed))
    driver.receive_bulk(b"".join(encode_frame(0, arrived, [], lane=1)))

    left = driver.abandon()

    assert sorted(idents(left)) == ([1, 2] if arrived < 3 else [2])
    if arrived < 3:
        (kept,) = (message for message in left if message.id == 1)
        assert kept == sent


@pytest.mark.parametrize("lanes", [False, True])
def test_only_chunks_come_on_the_bulk_lane_and_only_where_it_was_agreed_on(lanes: bool) -> None:
    kind = Kind.CALL if lanes else Kind.CHUNK
    with pytest.raises(ProtocolMismatch, match="bulk lane"):
        Stream(lanes=lanes).receive(b"".join(encode_frame(1, 0, [Message(kind, 1, ())], lane=1)))


@pytest.mark.parametrize("lane", [0, 2, "1", True, None])
def test_a_frame_of_another_lane_is_refused(lane: object) -> None:
    header = msgpack.packb([1, 0, [], lane])
    with pytest.raises(ProtocolMismatch, match="it is of lane"):
        decode_frame(len(header).to_bytes(4, "big") + header)
