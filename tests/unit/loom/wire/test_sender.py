"""Sending: what is left to threads, connections that break, and bulk beside small messages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from loom.wire.messages import TURN, Buffer, Kind, Message, turns
from loom.wire.mux import CHUNK_SIZE
from loom.wire.sender import GIVE_WAY, HIGH_WATER, INLINE, LONGEST_PAUSE, FrameSender
from loom.wire.stream import Stream

BOUND = 10.0
CHUNKS = 4


class Line:
    """Takes everything at once, and calls someone for each frame before it does."""

    def __init__(self, takes: Callable[[], object] = lambda: None) -> None:
        self._takes = takes
        self._left = CHUNKS
        self.taken = threading.Event()
        """Set with the last chunk."""

    @staticmethod
    def encode(frame: bytes) -> bytes:
        return frame

    def try_send(self, data: Buffer) -> int:
        return len(data)

    def send_all(self, data: Buffer) -> None:
        self._takes()
        self._left -= 1
        if not self._left:
            self.taken.set()


@pytest.fixture
def sender() -> Iterator[FrameSender]:
    made = FrameSender(Stream(lanes=True), "sends")
    made.attach(Line())
    yield made
    made.close()


def pauses(sender: FrameSender, line: Line, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[float]:
    """How long it pauses after each chunk but the last, where each takes so many seconds."""
    made: list[float] = []
    clock = itertools.count(1000.0, seconds)
    monkeypatch.setattr("loom.wire.sender.time", SimpleNamespace(monotonic=lambda: next(clock), sleep=made.append))
    sender.attach_bulk(line, 0)
    sender.put(Message(Kind.RESULT, 1, [0.0], [b"", bytes(CHUNKS * CHUNK_SIZE)]))
    assert line.taken.wait(BOUND)
    return made[: CHUNKS - 1]


@pytest.mark.parametrize(("seconds", "pause"), [(0.0005, GIVE_WAY * 0.0005), (1.0, LONGEST_PAUSE)])
def test_bulk_pauses_while_small_messages_move(
    sender: FrameSender, monkeypatch: pytest.MonkeyPatch, seconds: float, pause: float
) -> None:
    line = Line(lambda: sender.put(Message(Kind.RESULT, 2, [0.0], [b"small"])))

    assert pauses(sender, line, monkeypatch, seconds) == pytest.approx([pause] * (CHUNKS - 1))


def test_bulk_does_not_pause_while_nothing_else_moves(sender: FrameSender, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pauses(sender, Line(), monkeypatch, 0.0005) == []


@pytest.mark.parametrize("size", [0, 1, TURN, TURN + 1, 3 * TURN])
def test_turns_are_the_whole_buffer(size: int) -> None:
    data = bytes(itertools.islice(itertools.cycle(range(251)), size))

    pieces = list(turns(data))

    assert b"".join(pieces) == data
    assert all(len(piece) <= TURN for piece in pieces)


class SlowLine(Line):
    """Takes nothing at once; what its thread sends waits for `go`, and fails if it is `broken`."""

    def __init__(self, go: bool = True, broken: bool = False) -> None:
        super().__init__()
        self.go = threading.Event()
        if go:
            self.go.set()
        self.broken = broken
        self.offered = threading.Event()
        self.sent: list[bytes] = []

    def try_send(self, data: Buffer) -> int:
        if self.broken:
            raise OSError("the line is broken")
        return 0

    def send_all(self, data: Buffer) -> None:
        self.offered.set()
        assert self.go.wait(BOUND)
        if self.broken:
            raise OSError("the line is broken")
        self.sent.append(bytes(data))
        self.taken.set()


def result(ident: int, size: int = 5) -> Message:
    return Message(Kind.RESULT, ident, [0.0], [b"", bytes(size)])


@pytest.fixture
def plain() -> Iterator[FrameSender]:
    """A sender without a bulk lane, and not attached."""
    made = FrameSender(Stream(), "sends")
    yield made
    made.close()


def test_what_a_socket_does_not_take_at_once_is_left_to_a_thread(plain: FrameSender) -> None:
    line = SlowLine()
    plain.attach(line)

    for ident in range(3):
        plain.put(result(ident))
    plain.put_raw(b"as it is")

    assert plain.drain(BOUND)
    assert len(line.sent) >= 2
    assert b"as it is" in b"".join(line.sent)


def test_raw_bytes_go_nowhere_without_a_connection(plain: FrameSender) -> None:
    plain.put_raw(b"lost")
    line = SlowLine()
    plain.attach(line)

    assert plain.drain(BOUND)
    assert b"lost" not in b"".join(line.sent)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_connection_that_breaks_is_let_go(plain: FrameSender, at_once: bool) -> None:
    line = SlowLine(go=at_once, broken=at_once)
    plain.attach(line)

    plain.put(result(1))
    if not at_once:
        assert line.offered.wait(BOUND)
        line.broken = True
        line.go.set()

    assert plain.drain(BOUND)
    assert not plain.attached


def test_a_connection_that_was_replaced_takes_nothing_with_it(plain: FrameSender) -> None:
    old, new = Line(), SlowLine()
    plain.attach(old)
    plain.attach(new)

    plain.detach(old)

    assert plain.attached
    plain.detach()
    assert not plain.attached


def test_what_is_gathered_leaves_when_it_is_flushed(plain: FrameSender) -> None:
    line = SlowLine()
    plain.attach(line)

    assert plain.gather(result(1))
    assert line.sent == []
    plain.flush()

    assert plain.drain(BOUND)
    assert len(line.sent) == 1


def test_a_message_that_is_in_no_hurry_is_left_to_the_thread(plain: FrameSender) -> None:
    line = SlowLine()
    plain.attach(line)

    plain.put(result(1), eager=False)

    assert line.taken.wait(BOUND)
    assert plain.drain(BOUND)


def test_a_message_can_be_taken_back_as_long_as_it_has_not_begun_to_leave(plain: FrameSender) -> None:
    plain.put(result(1, 3 * CHUNK_SIZE))
    plain.put(result(2))

    assert plain.withdraw(1)
    line = SlowLine()
    plain.attach(line)

    assert plain.drain(BOUND)
    assert sum(map(len, line.sent)) < CHUNK_SIZE


@pytest.mark.parametrize("gather", [True, False])
def test_a_large_message_is_sent_by_the_thread(plain: FrameSender, gather: bool) -> None:
    line = SlowLine()
    plain.attach(line)

    if gather:
        plain.gather(result(1, 4 * INLINE))
        plain.flush()
    else:
        plain.put(result(1, 4 * INLINE))

    assert plain.wait_until_taken(1, BOUND)
    assert plain.drain(BOUND)
    assert sum(map(len, line.sent)) > 4 * INLINE


def test_who_puts_too_much_waits_for_room(plain: FrameSender) -> None:
    for ident in range(3):
        plain.put(result(ident, HIGH_WATER))

    assert not plain.wait_for_room(0.0)
    line = SlowLine()
    assert plain.wait_for_room(0.0, on=line)  # it is not the one to send over
    plain.attach(line)
    assert not plain.wait_for_room(0.0, on=line)


def test_room_is_made_by_taking_a_message_back(plain: FrameSender) -> None:
    for ident in range(3):
        plain.put(result(ident, HIGH_WATER))

    assert all(plain.withdraw(ident) for ident in range(3))

    assert not plain.withdraw(0)
    assert plain.wait_for_room(0.0)
    assert plain.backlog == 0


def test_a_closed_sender_takes_nothing(plain: FrameSender) -> None:
    plain.close()

    assert not plain.put(result(1))
    assert not plain.gather(result(1))
    assert plain.wait_until_taken(1, 0.0)


def test_a_connection_of_bulk_that_breaks_leaves_bulk_to_the_first(sender: FrameSender) -> None:
    broken = SlowLine(broken=True)

    sender.attach_bulk(broken, 0)
    sender.put(result(1, 2 * CHUNK_SIZE))

    assert broken.offered.wait(BOUND)
    assert sender.drain(BOUND)
    assert sender.wait_until_taken(1, BOUND)


def test_raw_bytes_for_bulk_go_over_its_connection_if_it_has_one(sender: FrameSender) -> None:
    sender.put_raw_bulk(b"nowhere")
    line = SlowLine()
    sender.attach_bulk(line, 0)

    sender.put_raw_bulk(b"as it is")

    assert line.taken.wait(BOUND)
    assert line.sent == [b"as it is"]


def test_a_closed_sender_takes_no_connection_of_bulk(sender: FrameSender) -> None:
    sender.close()
    line = SlowLine()

    sender.attach_bulk(line, 0)
    sender.put_raw_bulk(b"nowhere")
    sender.detach_bulk(line)

    assert not line.offered.is_set()


def test_an_earlier_connection_of_bulk_is_let_go_when_another_comes(sender: FrameSender) -> None:
    first, second = SlowLine(), SlowLine()
    sender.attach_bulk(first, 0)
    sender.attach_bulk(second, 0)

    sender.detach_bulk(first)
    sender.put_raw_bulk(b"as it is")

    assert second.taken.wait(BOUND)
    assert (first.sent, second.sent) == ([], [b"as it is"])


class Narrow(Line):
    """Takes a chunk in a while, and after some none at all until it is over."""

    def __init__(self, chunks: int) -> None:
        super().__init__(self._take)
        self._chunks = chunks
        self.over = threading.Event()

    def try_send(self, data: Buffer) -> int:
        return 0

    def _take(self) -> None:
        self._chunks -= 1
        self.over.wait(0.15 if self._chunks >= 0 else BOUND)


@pytest.mark.parametrize(("chunks", "arrives"), [(CHUNKS, True), (1, False)])
def test_a_program_that_leaves_waits_as_long_as_the_rest_moves(chunks: int, arrives: bool) -> None:
    sender = FrameSender(Stream(lanes=True), "sends")
    line = Narrow(chunks)
    sender.attach(line)
    sender.put(Message(Kind.RUN, 1, ["run", True, None], [b"", bytes(CHUNKS * CHUNK_SIZE)]))
    assert sender.drain_while_it_moves(0.25) is arrives
    assert sender.has_rest is not arrives
    line.over.set()
    sender.close()
