"""The watch over frames that an open connection loses: whatever is lost is noticed, and sent again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loom.errors import ProtocolMismatch
from loom.wire import mux
from loom.wire.bodies import Probe, Probed
from loom.wire.frames import decode_frame, encode_frame
from loom.wire.length_prefix import LENGTH
from loom.wire.lost_frames import EVERY, GAP, MOST_PATIENCE, PATIENCE, ConnectionWatch, answer_to
from loom.wire.messages import Kind, Message
from loom.wire.stream import MOST_DAMAGES, OutOfStep, Stream

CLIENT, DRIVER = 0, 1
CHUNK = 64


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with patch.object(mux, "CHUNK_SIZE", CHUNK), patch.object(mux, "_FRAME_MESSAGES", 2):
        yield


class Line:
    """Two streams over one connection after the other, which loses what it is told to lose."""

    def __init__(self, lanes: bool) -> None:
        self.ends = (Stream(lanes=lanes), Stream(lanes=lanes))
        self.watch = ConnectionWatch(self.ends[CLIENT])
        self.now = 0.0
        self.arrived: tuple[list[int], list[int]] = ([], [])
        self.connections = 0
        self.connect()

    def connect(self) -> None:
        self.connections += 1
        client, driver = self.ends
        both = [(end.received, 0 if end.bulk is None else end.bulk.received) for end in self.ends]
        for end, (received, received_bulk) in zip((client, driver), reversed(both), strict=True):
            end.resume(received)
            if end.bulk is not None:
                end.bulk.resume(received_bulk)
        self.watch.connected(self.now, *both[DRIVER])

    def put(self, end: int, ident: int, size: int) -> None:
        self.ends[end].put(Message(Kind.CALL, ident, (), [bytes(size)] if size else ()), 1)

    def carry(self, copies: Iterator[int]) -> None:
        """Send all that there is, each frame in so many copies, of which the second comes behind the next frame.

        Connect anew when an end notices that one is missing.
        """
        for end in (CLIENT, DRIVER):
            late: bytes | None = None
            while (frame := self.ends[end].next_frame()) is not None:
                number = next(copies)
                for each in [frame] * (number > 0) + [late] * (late is not None):
                    if each is not None and not self.deliver(end, each):
                        return
                late = frame if number > 1 else None
            if late is not None and not self.deliver(end, late):
                return

    def deliver(self, end: int, frame: bytes) -> bool:
        try:
            for message in self.ends[1 - end].receive(frame[LENGTH.size :]):
                if message.kind == Kind.PROBE:
                    self.deliver(DRIVER, answer_to(self.ends[DRIVER], Probe.from_body(message.body).number))
                elif message.kind == Kind.PROBED:
                    self.watch.answered(Probed.from_body(message.body))
                else:
                    self.arrived[end].append(message.id)
        except OutOfStep:
            self.connect()
            return False
        return True

    def wait(self, copies: Iterator[int]) -> None:
        """Let time pass until the client asks, or has waited too long; a ping is answered all the time."""
        self.now += EVERY
        try:
            self.watch.check(self.now, self.now)
        except OutOfStep:
            self.connect()
        if self.watch.due(self.now):
            question = self.watch.question(self.now)
            for _ in range(next(copies)):
                self.deliver(CLIENT, question)


def look_until(watch: ConnectionWatch, since: float, until: float) -> None:
    """Look once a second, on a connection that answers all pings."""
    for now in range(int(since), int(until)):
        watch.check(now, heard=now)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from([CLIENT, DRIVER]), st.sampled_from([0, 10, 5 * CHUNK])), max_size=12),
    st.lists(st.sampled_from([0, 1, 2]), max_size=60),
)
def test_whatever_an_open_connection_loses_or_doubles_arrives_once_and_in_order(
    lanes: bool, puts: list[tuple[int, int]], copies: list[int]
) -> None:
    line = Line(lanes)
    sent: tuple[list[int], list[int]] = ([], [])
    lost = iter([*copies, *[1] * 10_000])
    for ident, (end, size) in enumerate(puts):
        line.put(end, ident, size)
        sent[end].append(ident)
        line.carry(lost)
    for _ in range(200):
        if line.arrived == sent and next(lost, None) is not None:
            break
        line.wait(lost)
        line.carry(lost)

    assert line.arrived == sent


@pytest.mark.parametrize("lanes", [True, False])
def test_news_of_a_gap_ask_for_another_connection_at_once(lanes: bool) -> None:
    line = Line(lanes)

    (news,) = decode_frame(answer_to(line.ends[DRIVER], GAP)[LENGTH.size :]).messages

    with pytest.raises(OutOfStep, match="a later frame than the next one"):
        line.watch.answered(Probed.from_body(news.body))


@pytest.mark.parametrize("end", [CLIENT, DRIVER])
@pytest.mark.parametrize("size", [0, 5 * CHUNK])
@pytest.mark.parametrize("lanes", [True, False])
def test_a_lost_frame_is_noticed_with_the_next_question(lanes: bool, size: int, end: int) -> None:
    line = Line(lanes)
    line.put(end, 1, size)
    line.carry(iter([0] * 100))

    line.wait(iter([1]))

    assert line.connections == 2
    line.carry(iter([1] * 100))
    assert line.arrived[end] == [1]


def test_a_connection_that_only_answers_pings_is_given_up_after_a_while() -> None:
    line = Line(True)
    every = iter([0] * 1000)
    while line.connections == 1:
        line.wait(every)

    assert line.now <= EVERY + PATIENCE + 2 * EVERY


def test_a_busy_driver_that_has_lost_nothing_is_asked_more_and_more_patiently() -> None:
    line = Line(True)
    at = []
    for _ in range(400):
        before = line.connections
        line.wait(iter([0]))
        if line.connections > before:
            at.append(line.now)

    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert gaps == sorted(gaps)
    assert MOST_PATIENCE <= gaps[-1] <= MOST_PATIENCE + 3 * EVERY


def test_a_connection_of_which_nothing_was_heard_is_left_to_its_pings() -> None:
    line = Line(True)
    line.watch.question(0.0)

    for seconds in range(10 * int(PATIENCE)):
        line.watch.check(seconds, heard=0.0)


def test_a_program_that_was_stopped_reads_first_what_has_come_meanwhile() -> None:
    line = Line(True)
    line.watch.question(0.0)

    line.watch.check(3600.0, heard=3600.0)

    with pytest.raises(OutOfStep, match="has not answered for"):
        look_until(line.watch, 3600, 3600 + 2 * PATIENCE)


def test_an_answer_of_an_earlier_connection_is_left_alone() -> None:
    line = Line(True)
    line.put(CLIENT, 1, 0)
    assert line.ends[CLIENT].next_frame() is not None  # and is lost
    line.watch.question(0.0)
    line.connect()

    line.watch.answered(Probed(1, 0, 0, 0, 0))

    assert line.ends[CLIENT].again


def test_bytes_that_are_acknowledged_count_as_an_answer() -> None:
    line = Line(False)
    line.put(CLIENT, 1, 5 * CHUNK)
    frames = list(iter(line.ends[CLIENT].next_frame, None))
    line.watch.question(0.0)
    for number, frame in enumerate(frames, 1):
        line.deliver(CLIENT, frame)
        line.deliver(DRIVER, line.ends[DRIVER].acknowledgement())
        for seconds in range((number - 1) * int(PATIENCE - 1), number * int(PATIENCE - 1)):
            line.watch.check(seconds, heard=seconds)

    with pytest.raises(OutOfStep, match="has not answered for"):
        look_until(line.watch, len(frames) * PATIENCE, (len(frames) + 3) * PATIENCE)


@pytest.mark.parametrize(
    "frame",
    [encode_frame(3, 0, []), encode_frame(0, 7, []), encode_frame(1, 7, [])],
    ids=["a gap", "an acknowledgement too far", "both"],
)
def test_numbers_that_cannot_be_ask_for_another_connection_and_change_nothing(frame: list[bytes]) -> None:
    stream, other = Stream(), Stream()

    with pytest.raises(OutOfStep):
        stream.receive(b"".join(frame))

    other.put(Message(Kind.CALL, 1, ()))
    whole = other.next_frame()
    assert whole is not None
    assert [message.id for message in stream.receive(whole[LENGTH.size :])] == [1]


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("damage", [b"", b"\x00\x00", bytes(40), b"\xff" * 40, b"\x00\x00\x00\x02\x93\x01"])
def test_a_frame_that_cannot_be_read_asks_for_another_connection_and_not_for_ever(
    damage: bytes, bulk: bool
) -> None:
    sender, stream = Stream(lanes=True), Stream(lanes=True)
    receive = stream.receive_bulk if bulk else stream.receive
    for _ in range(MOST_DAMAGES):
        with pytest.raises(OutOfStep):
            receive(damage)
    with pytest.raises(ProtocolMismatch, match="not a frame") as raised:
        receive(damage)
    assert not isinstance(raised.value, OutOfStep)

    sender.put(Message(Kind.CALL, 1, (), ()))
    frame = sender.next_frame()
    assert frame is not None
    assert [message.id for message in stream.receive(frame[LENGTH.size :])] == [1]
    with pytest.raises(OutOfStep):  # something has come meanwhile
        receive(damage)


@pytest.mark.parametrize("lane", ["small", "bulk"])
def test_a_handshake_that_shows_that_nothing_can_be_resumed_says_why(lane: str) -> None:
    stream = Stream(lanes=True)
    assert stream.bulk is not None

    with pytest.raises(ProtocolMismatch, match="received up to frame 5, though 0 have been sent") as raised:
        (stream if lane == "small" else stream.bulk).resume(5)
    assert not isinstance(raised.value, OutOfStep)
