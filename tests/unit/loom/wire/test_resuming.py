"""A stream over connections that break anywhere, in a handshake too: all arrives once, whole and in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from loom.errors import ProtocolMismatch
from loom.wire import mux, stream
from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Kind, Message
from loom.wire.mux import BARRIER, OrderKey
from loom.wire.stream import Stream

CHUNK = 16
WINDOW = 300
ACK_FRAMES = 3
FRAME = 200
"""Bytes of the largest frame, here: a head and a chunk."""

CLIENT, DRIVER = 0, 1
ENDS = st.sampled_from([CLIENT, DRIVER])


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with (
        patch.object(mux, "CHUNK_SIZE", CHUNK),
        patch.object(mux, "_FRAME_MESSAGES", 3),
        patch.object(stream, "WINDOW", WINDOW),
        patch.object(stream, "ACK_FRAMES", ACK_FRAMES),
    ):
        yield


def payload(ident: int, size: int) -> bytes:
    return bytes((ident * 31 + position) % 251 for position in range(size))


class Opening(NamedTuple):
    """What a client says on a connection: which frame it has received last, and frames of its own."""

    hello: int
    frames: list[bytes]


class Line(RuleBasedStateMachine):
    """Two streams, and the connection between them: whole, none, or one on which the welcome is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = (Stream(), Stream())
        self.under_way: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        """Frames that each end has sent, on the connection that there is."""
        self.attached = [True, True]
        self.welcomed: int | None = None
        """What the welcome that is under way says."""
        self.openings = [Opening(0, [])]
        """What the client said on each connection; any of it may come again."""
        self.missing: tuple[dict[int, OrderKey], dict[int, OrderKey]] = ({}, {})
        """What each end has put in and the other has not got, in order."""
        self.sizes: dict[int, int] = {}
        self.next_ident = 1

    # -- messages -------------------------------------------------------------------------------------------

    @rule(end=ENDS, size=st.sampled_from([0, 1, CHUNK, 3 * CHUNK]), key=st.sampled_from([None, BARRIER, 1, 2]))
    def put(self, end: int, size: int, key: OrderKey) -> None:
        ident, self.next_ident = self.next_ident, self.next_ident + 1
        parts = [payload(ident, size)] if size else []
        self.sizes[ident] = size
        self.missing[end][ident] = key
        self.streams[end].put(Message(Kind.CALL, ident, (), parts), key)

    @rule(end=ENDS, key=st.sampled_from([None, 1]))
    def put_much(self, end: int, key: OrderKey) -> None:
        for _ in range(2 * WINDOW // CHUNK):
            self.put(end, CHUNK, key)

    @rule(end=ENDS, data=st.data())
    def take_back(self, end: int, data: st.DataObject) -> None:
        if self.missing[end]:
            ident = data.draw(st.sampled_from(list(self.missing[end])))
            if self.streams[end].outbox.withdraw(ident):
                del self.missing[end][ident]

    @rule(end=ENDS, frames=st.integers(1, 4))
    def send(self, end: int, frames: int) -> None:
        for _ in range(frames):
            if self.attached[end] and (frame := self.streams[end].next_frame()) is not None:
                self.under_way[end].append(frame)
                if end == CLIENT:
                    self.openings[-1].frames.append(frame)

    @rule(end=ENDS)
    def acknowledge(self, end: int) -> None:
        if self.attached[end]:
            self.under_way[end].append(self.streams[end].acknowledgement())

    @rule(end=ENDS, size=st.sampled_from([1, CHUNK]))
    def exchange(self, end: int, size: int) -> None:
        self.put(end, size, 1)
        for speaker in (end, 1 - end):
            self.send(speaker, 10)
            self.acknowledge(speaker)
            self.deliver(speaker, 20)

    @rule(end=ENDS, frames=st.integers(1, 4))
    def deliver(self, end: int, frames: int) -> None:
        """Have frames of an end arrive at the other."""
        while frames and self.under_way[end] and self.attached[1 - end]:
            self.arrive(end, self.under_way[end].popleft())
            frames -= 1

    def arrive(self, end: int, frame: bytes) -> None:
        for message in self.streams[1 - end].receive(frame[LENGTH.size :]):
            missing = self.missing[end]
            key = missing.pop(message.id)
            assert b"".join(map(bytes, message.parts)) == payload(message.id, self.sizes[message.id])
            overtaken = [
                ident
                for ident, other in missing.items()
                if ident < message.id and None not in (key, other) and (key == other or BARRIER in (key, other))
            ]
            assert not overtaken, f"{message.id} of key {key} arrived before {overtaken}"

    # -- connections ----------------------------------------------------------------------------------------

    @rule(to_driver=st.integers(0, 5), to_client=st.integers(0, 5))
    def lose(self, to_driver: int, to_client: int) -> None:
        """The connection breaks; of what was under way some arrives first."""
        self.deliver(CLIENT, to_driver)
        self.deliver(DRIVER, to_client)
        for frames in self.under_way:
            frames.clear()
        self.attached = [False, False]
        self.welcomed = None

    @precondition(lambda self: self.attached == [False, False])
    @rule()
    def say_hello(self) -> None:
        hello = self.streams[CLIENT].received
        self.openings.append(Opening(hello, []))
        self.streams[DRIVER].resume(hello)
        self.attached[DRIVER] = True
        self.welcomed = self.streams[DRIVER].received

    @precondition(lambda self: self.welcomed is not None)
    @rule()
    def be_welcomed(self) -> None:
        assert self.welcomed is not None
        self.streams[CLIENT].resume(self.welcomed)
        self.attached[CLIENT] = True
        self.welcomed = None

    @rule(answers=st.integers(0, 3), data=st.data())
    def repeat_an_opening(self, answers: int, data: st.DataObject) -> None:
        """Somebody says again what the client said: the driver lets the connection go, and answers to nobody."""
        opening = data.draw(st.sampled_from(self.openings))
        self.lose(0, 0)
        driver = self.streams[DRIVER]
        if opening.hello < driver.acknowledged:
            with pytest.raises(ProtocolMismatch, match=f"received up to frame {opening.hello}, though"):
                driver.resume(opening.hello)
            return
        driver.resume(opening.hello)
        for frame in opening.frames[: data.draw(st.integers(0, len(opening.frames)))]:
            self.arrive(CLIENT, frame)
        for _ in range(answers):
            driver.next_frame()

    # -- what holds -----------------------------------------------------------------------------------------

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        for end in self.streams:
            assert 0 <= end.kept_bytes < WINDOW + FRAME
            assert (end.kept_bytes == 0) == (end.sent == end.acknowledged)

    def teardown(self) -> None:
        self.lose(0, 0)
        self.say_hello()
        self.be_welcomed()
        while any(self.missing):
            before = [len(missing) for missing in self.missing], self.streams[0].received, self.streams[1].received
            for end in (CLIENT, DRIVER):
                self.send(end, 1000)
                self.deliver(end, 1000)
            after = [len(missing) for missing in self.missing], self.streams[0].received, self.streams[1].received
            assert before != after, "nothing moves any more"
        for end in (CLIENT, DRIVER):
            self.acknowledge(end)
            self.deliver(end, 1000)
        assert [end.kept_bytes for end in self.streams] == [0, 0]
        assert [end.incoming() for end in self.streams] == [(0, 0), (0, 0)]


def test_whatever_breaks_all_arrives_once_whole_and_in_its_order() -> None:
    run_state_machine_as_test(
        Line, settings=settings(derandomize=True, deadline=None, max_examples=40, stateful_step_count=30)
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_breaks_however_often() -> None:
    run_state_machine_as_test(
        Line, settings=settings(derandomize=True, deadline=None, max_examples=1000, stateful_step_count=60)
    )
