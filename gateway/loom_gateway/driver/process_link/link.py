"""One end of a process link, whatever carries it: bytes in, messages out, and back, across lost connections.

An `Introduction` comes first on a connection, before either end believes the other. The driver sends a challenge,
the process's end a proof that it knows the driver's key, and the driver another one with its answer
(`loom.mutual_auth`). The key itself is never sent. The process asks to be tied to the driver, or to watch
other processes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from loom.errors import ProtocolMismatch
from loom.mutual_auth import Exchange, Purpose, Side, checked_nonce, new_nonce
from loom.process.listen import is_loopback
from loom.wire.bodies import Challenge, ProcessesGone, Tie, Tied, Untied, Watch
from loom.wire.frames import decode_frame
from loom.wire.length_prefix import FrameSplitter, behind_length
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.stream import Stream, unnumbered_frame

MAX_FRAME = 1 << 20  # bytes of the largest frame of a process link
MAX_GREETING = 4096  # bytes of the largest frame from a peer that has not shown the key
MOST_WATCHED = 10_000  # proc meshes that a process watches; beyond it, the first ones are forgotten
PATIENCE = 60.0  # default of ``--worker-patience``: seconds without network that processes survive
ATTEMPT = 2.0  # seconds that one attempt to connect again, with its greeting, may take
RETRY = 0.2  # seconds between two attempts

REFUSED_FOR = 10.0
"""Seconds of refused connections after which a peer is gone, if its connection was reset before.

The kernel of a peer that has ended closes its connections in order, and refuses new ones: such a peer is gone at
the first refusal. After a reset, a firewall may refuse in the peer's name for some time, but none does within one
machine.
"""


class ProcessLinkAddress(NamedTuple):
    """The settings by which a process ties itself to its driver. It reaches the process with its bootstrap."""

    host: str
    port: int
    key: str  # secret of the driver: only processes that it has started know it
    patience: float  # seconds without network after which either end gives up the other


class LinkEnd:
    """One end of a process link: the numbered messages of both directions, on one connection after the other."""

    def __init__(self) -> None:
        self._stream = Stream(MAX_FRAME)
        self._splitter = FrameSplitter(MAX_FRAME)

    @property
    def received(self) -> int:
        """The number of the last frame that has come, which the next connection begins with."""
        return self._stream.received

    def connected(self, received: int) -> None:
        """Begin on a new connection, whose other side has received the frames up to a number."""
        self._splitter = FrameSplitter(MAX_FRAME)
        self._stream.resume(received)

    def put(self, message: Message) -> None:
        """Queue a message. It arrives once, in order, if the ends meet again."""
        self._stream.put(message)

    @property
    def settled(self) -> bool:
        """True if the other side has acknowledged everything."""
        return not self._stream.outbox and not self._stream.kept

    @property
    def kept_bytes(self) -> int:
        """The bytes that wait to be sent or acknowledged."""
        return self._stream.kept_bytes + self._stream.outbox.pending_bytes

    def to_send(self, acknowledge: bool = False) -> bytes:
        """Take the bytes to send on the connection; with ``acknowledge``, tell the other side what has come."""
        frames = list(iter(self._stream.next_frame, None))
        if acknowledge and self._stream.untold:
            frames.append(self._stream.acknowledgement())
        return b"".join(frames)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that the bytes complete; raise `ProtocolMismatch` for other bytes."""
        for frame in self._splitter.feed(data):
            yield from self._stream.receive(frame)


def greeting(message: Message) -> bytes:
    """Return the bytes of a message before a connection carries numbered ones."""
    return behind_length(unnumbered_frame(message))


def read_greeting(frame: Buffer) -> Message:
    """Return the message of such a frame, which has passed no check yet."""
    seq, _, messages, lane = decode_frame(frame)
    if seq or lane or len(messages) != 1:
        raise ProtocolMismatch("a process link begins with one message outside the numbered stream")
    return messages[0]


def break_after(sock: socket.socket, seconds: float) -> None:
    """Have the kernel break a connection when the peer has been silent for so many seconds, and little more."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        idle = max(1, round(seconds / 12))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(idle / 4)))
        # For data that is not acknowledged, and for the probes, instead of their number. The kernel counts from the
        # last that came, which may be ``idle`` seconds before the network went away.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round((seconds + idle) * 1000))


class Refusals:
    """Decides whether refused connections to a host mean that the peer is gone. ``clean``: it closed in order."""

    def __init__(self, host: str, clean: bool = False) -> None:
        self._believed = clean or is_loopback(host)
        self._since: float | None = None

    def refused(self, now: float) -> bool:
        """Note a refused attempt; return whether the peer is gone."""
        if self._since is None:
            self._since = now
        return self._believed or now - self._since >= REFUSED_FOR

    def other(self) -> None:
        """Note an attempt that failed in another way."""
        self._since = None


A = TypeVar("A")  # the answers that may come

_ANSWERS: dict[Kind, tuple[type[Tied | Untied | ProcessesGone], ...]] = {
    Kind.TIE: (Tied, Untied),
    Kind.WATCH: (ProcessesGone,),
}


class Introduction(Generic[A]):
    """The process's end of one connection until the driver has answered. Bytes in, bytes out.

    Args:
        asks: what this end says of itself, without a proof.
    """

    def __init__(self, key: str, asks: Tie | Watch) -> None:
        self._key = key
        self._asks = asks
        self._splitter = FrameSplitter(MAX_GREETING)
        self._exchange: Exchange | None = None
        self.clock: float | None = None
        """The driver's, when it sent its challenge."""
        self.answer: A | None = None
        """The driver's; None until it has come."""

    @property
    def rest(self) -> bytes:
        """The bytes after the answer."""
        return self._splitter.rest

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the driver; return those for it.

        Raises:
            ProtocolMismatch: who sent them does not know the driver's key, or is of another version.
        """
        for frame in self._splitter.feed(data):
            message = read_greeting(frame)
            if self._exchange is not None:
                self.answer = _believed(self._exchange, self._asks.KIND, message)
                break
            if message.kind != Kind.CHALLENGE:
                raise ProtocolMismatch(f"a driver begins with CHALLENGE, not with message {message.kind}")
            challenged = Challenge.from_body(message.body)
            self.clock = challenged.clock
            challenge = checked_nonce(challenged.nonce)
            self._exchange = exchange = Exchange(Purpose.PROCESS_LINK, self._key, new_nonce(), challenge)
            proof = exchange.proof(Side.ASKS, *self._asks.said)
            return greeting(replace(self._asks, nonce=exchange.asking, proof=proof).message())
        return b""


def _believed(exchange: Exchange, asked: Kind, message: Message) -> Any:
    answers = {answer.KIND: answer for answer in _ANSWERS[asked]}
    if message.kind not in answers:
        names = " or ".join(kind.name for kind in answers)
        raise ProtocolMismatch(f"a driver answers {asked.name} with {names}, not with message {message.kind}")
    answer = answers[Kind(message.kind)].from_body(message.body)
    if not exchange.proves(answer.proof, Side.ANSWERS, *answer.said):
        raise ProtocolMismatch("who answers in place of the driver does not know its key")
    return answer


def asked_of(frame: Buffer, key: str, challenge: str) -> tuple[Tie | Watch, Exchange]:
    """Return what a process's end asks, and the exchange for the answer. For the driver.

    Raises:
        ProtocolMismatch: it does not know the key.
    """
    message = read_greeting(frame)
    if message.kind not in _ANSWERS:
        raise ProtocolMismatch(f"a process begins with TIE or WATCH, not with message {message.kind}")
    asked = (Tie if message.kind == Kind.TIE else Watch).from_body(message.body)
    exchange = Exchange(Purpose.PROCESS_LINK, key, checked_nonce(asked.nonce), challenge)
    if not exchange.proves(asked.proof, Side.ASKS, *asked.said):
        raise ProtocolMismatch("a stranger does not know the driver's key")
    return asked, exchange


def answer_of(exchange: Exchange, answer: Tied | Untied | ProcessesGone) -> bytes:
    """Return the driver's answer, with its proof."""
    return greeting(replace(answer, proof=exchange.proof(Side.ANSWERS, *answer.said)).message())
