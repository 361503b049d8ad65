"""The connection of the bulk lane beside small messages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from loom.wire.messages import TURN, Buffer, Kind, Message, turns
from loom.wire.mux import CHUNK_SIZE
from loom.wire.sender import GIVE_WAY, LONGEST_PAUSE, FrameSender
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
