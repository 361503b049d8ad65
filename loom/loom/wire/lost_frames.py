"""Lost frames: a watch over a connection that may lose some while it stays open.

A load balancer that fails over, or a proxy, may answer a WebSocket's pings and drop the messages. Then nothing
shows that a frame is gone until the next one comes, which may be never. So the client asks from time to time, in
the same direction as its frames, what the driver has received (`loom.wire.bodies.Probe`). The answer comes behind
all frames that the driver has sent before it. Frames that are missing then are lost, in either direction.

A driver to which a frame comes behind a gap says so at once, by an answer to a question that nobody has asked.
"""

from __future__ import annotations

from loom.wire.bodies import Probe, Probed
from loom.wire.length_prefix import behind_length
from loom.wire.stream import OutOfStep, Stream, unnumbered_frame

EVERY = 5.0  # seconds between two questions

GAP = 0  # the number of an answer that nobody asked for; questions count from 1

PATIENCE = 15.0
"""Seconds without an answer, on a connection that brings other signs of life, until it counts as lost."""

PAUSE = 12.0  # seconds between two calls of `ConnectionWatch.check` that show that this program was stopped

MOST_PATIENCE = 300.0
"""Seconds that the patience grows to while no answer comes and nothing is lost: the driver may be busy."""


class ConnectionWatch:
    """The watch of a client over one connection after the other. All times are those of one monotonic clock.

    Args:
        bulk: whether the connection is the bulk lane's own.
    """

    def __init__(self, stream: Stream, bulk: bool = False) -> None:
        self._stream = stream
        self._bulk = bulk
        self._number = 0  # of the last question
        self._asked: float | None = None  # when the question was asked that has no answer yet, or last made sense
        self._next = 0.0  # when the next question is due
        self._patience = PATIENCE
        self._looked = 0.0  # when `check` was called last
        self._sent = (0, 0)  # the last frames of each lane before the question
        self._progress = (0, 0, 0)
        self._silent = False  # whether the last connection was given up because no answer came

    def connected(self, now: float, received: int, received_bulk: int) -> None:
        """Begin on a new connection, whose other side has received each lane's frames up to a number."""
        if self._silent and (self._bulk or received >= self._sent[0]) and received_bulk >= self._sent[1]:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._silent = False
        self._asked = None
        self._looked = now
        self._next = now + EVERY

    def due(self, now: float) -> bool:
        """Return whether to send a `question`."""
        return now >= self._next and self._asked is None

    def question(self, now: float) -> bytes:
        """Return the frame of the next question, to be sent behind all frames that the stream has given out."""
        self._number += 1
        self._asked, self._next = now, now + EVERY
        self._sent, self._progress = self._stream.given_out(self._bulk), self._moved
        return behind_length(unnumbered_frame(Probe(self._number).message()))

    def check(self, now: float, heard: float) -> None:
        """Raise `OutOfStep` if the question has waited too long, though the connection was heard of since.

        Bytes that move count as an answer: the question, or its answer, is behind them.
        """
        paused = now - self._looked > PAUSE  # then what has come in the meantime is not read yet
        self._looked = now
        if self._asked is None:
            return
        if paused:
            self._asked = now
        if (moved := self._moved) != self._progress:
            self._progress, self._asked = moved, now
        if now - self._asked > self._patience and heard > self._asked:
            self._silent = True
            raise OutOfStep(f"the driver has not answered for {now - self._asked:.0f} s, though the network has")

    def answered(self, answer: Probed) -> None:
        """Take an answer; raise `OutOfStep` if a frame from before the question or the answer is missing."""
        if answer.number == GAP:
            raise OutOfStep("the driver has received a later frame than the next one")
        if self._asked is None or answer.number != self._number:
            return  # to a question on an earlier connection
        self._asked, self._patience = None, PATIENCE
        for ours, received in zip(self._sent, (answer.received, answer.received_bulk), strict=True):
            if received < ours:
                raise OutOfStep(f"the driver has received {received} frames of the {ours} that were sent")
        for here, sent in zip(self._stream.received_of_both, (answer.sent, answer.sent_bulk), strict=True):
            if here < sent:
                raise OutOfStep(f"{here} frames have come of the {sent} that the driver has sent")

    @property
    def _moved(self) -> tuple[int, int, int]:
        bulk = self._stream.bulk
        if bulk is None:
            return self._stream.acknowledged, 0, 0
        return self._stream.acknowledged, bulk.acknowledged, bulk.received


def answer_to(stream: Stream, number: int, bulk: bool = False) -> bytes:
    """Return the frame that answers a `Probe`, to be sent behind all frames that the stream has given out."""
    sent, received = stream.given_out(bulk), stream.received_of_both
    return behind_length(unnumbered_frame(Probed(number, *received, *sent).message()))
