"""`Screen`: the messages of processes without a threadlet, before the intake believes a byte of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from nats.aio.msg import Msg

from loom.errors import LimitReached, LoomError, NotFound, RateLimited
from loom.nats.commands import error_reply
from loom.nats.envelopes import HEADER, SOURCE, EnvelopeKind, Format, decode
from loom.nats.intake import BridgedReplicas
from loom.nats.tally import Bucket, MessageTrouble, Tally

MAX_SIZE = 64 << 10
"""Bytes of one message."""

RATE = 2000.0  # messages on one subject in a second
MAX_ANSWERING = 1000  # registrations whose senders wait for the weaver
YIELD_EVERY = 20  # messages after which others get their turn: a burst comes without a pause

Reply = Callable[[dict[str, Any], Format, str], Awaitable[None]]
"""A function that replies a body, in a format, to a subject; "" is nobody."""

_EVENTS = (EnvelopeKind.REGISTER_DEVICE, EnvelopeKind.ACKNOWLEDGEMENT, EnvelopeKind.DRAIN)
REPORTED = {
    EnvelopeKind.TRAINING_STATUS: (EnvelopeKind.TRAINING_STATUS,),
    EnvelopeKind.DEVICE_STATUS: (EnvelopeKind.DEVICE_STATUS,),
    EnvelopeKind.HEARTBEAT: (EnvelopeKind.HEARTBEAT,),
    EnvelopeKind.REGISTER_DEVICE: _EVENTS,
    EnvelopeKind.ACKNOWLEDGEMENT: _EVENTS,
}
"""The kinds of messages on the subject of a kind. A body without an envelope is of the first."""


class Screen:
    """A check of size, rate and form, with a count of what passes and of what does not.

    ``subjects`` are those of the kinds in `REPORTED`.
    """

    def __init__(
        self, bridge: str, intake: BridgedReplicas, tally: Tally, subjects: dict[EnvelopeKind, str], reply: Reply
    ) -> None:
        self._bridge = bridge
        self._intake = intake
        self._tally = tally
        self._reply = reply
        self._kinds = {subjects[kind]: kinds for kind, kinds in REPORTED.items()}
        self._buckets = {subject: Bucket(RATE) for subject in self._kinds}
        self._answering: set[asyncio.Task[None]] = set()
        self._turn = itertools.count(1)

    @property
    def subjects(self) -> list[str]:
        """The subjects of the messages."""
        return list(self._kinds)

    async def take(self, message: Msg) -> None:
        """Take a message as it comes from NATS."""
        # Some clients answer a command with its headers: one with this bridge's own id is not from this bridge, to
        # which NATS echoes nothing.
        if message.headers and message.headers.get(HEADER, self._bridge) != self._bridge:
            return
        if next(self._turn) % YIELD_EVERY == 0:
            await asyncio.sleep(0)
        await self.pass_on(message.subject, message.data, message.reply)

    async def pass_on(self, subject: str, data: bytes, reply: str, age: float = 0.0) -> None:
        """Pass a message that was sent ``age`` seconds ago to the intake, and reply."""
        if not self._buckets[subject].take():
            return self._tally.refuse(
                subject, MessageTrouble.TOO_MANY, f"more than {RATE:g} messages come in a second"
            )
        if len(data) > MAX_SIZE:
            return self._tally.refuse(
                subject, MessageTrouble.TOO_LARGE, f"a message has {len(data)} bytes, more than {MAX_SIZE}"
            )
        try:
            first, *also = self._kinds[subject]
            envelope = decode(first, data, *also)
            if envelope.source.startswith(SOURCE):
                return
            replica = self._intake.take(envelope, age)
        except LoomError as error:
            self._tally.refuse(subject, _trouble(error), error)
            return await self._reply(error_reply(error), Format.of(data), reply)
        self._tally.taken[subject] += 1
        if reply:
            is_settled = self._intake.settle(replica) if envelope.kind is EnvelopeKind.REGISTER_DEVICE else None
            self._answer(is_settled, Format.of(data), reply)

    async def close(self) -> None:
        """Give up what waits for an answer."""
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    def _answer(self, settled: Coroutine[Any, Any, None] | None, format: Format, reply: str) -> None:
        if len(self._answering) >= MAX_ANSWERING:
            if settled is not None:
                settled.close()
            return
        task = asyncio.ensure_future(self._answer_later(settled, format, reply))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_later(self, settled: Coroutine[Any, Any, None] | None, format: Format, reply: str) -> None:
        body: dict[str, Any] = {"ok": True, "done": True}
        try:
            if settled is not None:
                await settled
        except LoomError as error:
            body = error_reply(error)
        await self._reply(body, format, reply)


def _trouble(error: LoomError) -> MessageTrouble:
    if isinstance(error, NotFound):
        return MessageTrouble.UNKNOWN
    if isinstance(error, LimitReached):
        return MessageTrouble.TOO_MANY if isinstance(error, RateLimited) else MessageTrouble.FULL
    return MessageTrouble.MALFORMED
