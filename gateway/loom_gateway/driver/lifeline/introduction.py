"""How the two ends of a lifeline get to know each other on a connection, before either believes the other.

The driver sends a challenge, the process's end a proof that it knows the driver's key, and the driver another one
with its answer (`loom.proof.exchange`). The key itself is never sent.
"""

from __future__ import annotations

from dataclasses import replace

from loom.errors import ProtocolMismatch
from loom.proof.exchange import Exchange, Purpose, Side, checked_nonce, new_nonce
from loom.wire.bodies import Challenge, Tie, Tied, Untied
from loom.wire.messages import Buffer, Kind, Message
from loom_gateway.driver.lifeline.line import MAX_GREETING, FrameSplitter, greeting, read_greeting


class Introduction:
    """The process's end of one connection until the driver has answered. Bytes in, bytes out.

    Args:
        tie: what this end says of itself, without a proof.
    """

    def __init__(self, key: str, tie: Tie) -> None:
        self._key = key
        self._tie = tie
        self._splitter = FrameSplitter(MAX_GREETING)
        self._exchange: Exchange | None = None
        self.answer: Tied | Untied | None = None
        """The driver's; None until it has come."""

    @property
    def rest(self) -> bytes:
        """The bytes after the answer."""
        return self._splitter.rest

    def feed(self, data: Buffer) -> bytes:
        """Take bytes from the driver; return those for it.

        Raises:
            ProtocolMismatch: who sent them does not know the driver's key, or is of another version.
        """
        for frame in self._splitter.feed(data):
            message = read_greeting(frame)
            if self._exchange is not None:
                self.answer = _believed(self._exchange, message)
                break
            if message.kind != Kind.CHALLENGE:
                raise ProtocolMismatch(f"a driver begins with CHALLENGE, not with message {message.kind}")
            challenge = checked_nonce(Challenge.from_body(message.body).nonce)
            self._exchange = exchange = Exchange(Purpose.LIFELINE, self._key, new_nonce(), challenge)
            proof = exchange.proof(Side.ASKS, *self._tie.said)
            return greeting(replace(self._tie, nonce=exchange.asking, proof=proof).message())
        return b""


def _believed(exchange: Exchange, message: Message) -> Tied | Untied:
    if message.kind not in (Kind.TIED, Kind.UNTIED):
        raise ProtocolMismatch(f"a driver answers TIE with TIED or UNTIED, not with message {message.kind}")
    answer = (Tied if message.kind == Kind.TIED else Untied).from_body(message.body)
    if not exchange.proves(answer.proof, Side.ANSWERS, *answer.said):
        raise ProtocolMismatch("who answers in place of the driver does not know its key")
    return answer


def tie_of(frame: Buffer, key: str, challenge: str) -> tuple[Tie, Exchange]:
    """Return what a process's end has said, and the exchange for the answer. For the driver.

    Raises:
        ProtocolMismatch: it does not know the key.
    """
    message = read_greeting(frame)
    if message.kind != Kind.TIE:
        raise ProtocolMismatch(f"a process begins with TIE, not with message {message.kind}")
    tie = Tie.from_body(message.body)
    exchange = Exchange(Purpose.LIFELINE, key, checked_nonce(tie.nonce), challenge)
    if not exchange.proves(tie.proof, Side.ASKS, *tie.said):
        raise ProtocolMismatch("a stranger does not know the driver's key")
    return tie, exchange


def answer_of(exchange: Exchange, answer: Tied | Untied) -> bytes:
    """Return the driver's answer, with its proof."""
    return greeting(replace(answer, proof=exchange.proof(Side.ANSWERS, *answer.said)).message())
