"""How the two ends of a process link get to know each other on a connection, before either believes the other.

The driver sends a challenge, the process's end a proof that it knows the driver's key, and the driver another one
with its answer (`loom.mutual_auth.exchange`). The key itself is never sent. The process asks to be tied to the
driver, or to watch other processes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic, TypeVar

from loom.errors import ProtocolMismatch
from loom.mutual_auth.exchange import Exchange, Purpose, Side, checked_nonce, new_nonce
from loom.wire.bodies import Challenge, ProcessesGone, Tie, Tied, Untied, Watch
from loom.wire.framing import FrameSplitter
from loom.wire.messages import Buffer, Kind, Message
from loom_gateway.driver.process_link.link import MAX_GREETING, greeting, read_greeting

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
