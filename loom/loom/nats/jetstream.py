"""`RequestStream`: the requests that NATS keeps in JetStream while no bridge is there, and until they are done.

A request is acknowledged to NATS once it is done and the bridge has written down that it is. If the bridge is
killed before the acknowledgement, NATS delivers the request again, and the record says that it was done. If the
bridge is killed before the record, the weaver gets the request again with the same id, and does not do it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, DiscardPolicy, RetentionPolicy, StreamConfig

from loom.errors import Conflict, NatsUnreachable
from loom.nats.message_counts import MessageTrouble, Tally
from loom.nats.nats_link import AGAIN, FAILURES, NatsAway, NatsLink
from loom.nats.state import BridgeState
from loom.nats.subjects import HEADER

logger = logging.getLogger(__name__)

MAX_AGE = 3600.0
"""Seconds after which NATS forgets a request that was not done: nobody expects an old command any more."""

MAX_KEPT = 100_000  # requests that NATS keeps; it refuses further ones
MAX_BYTES = 64 << 20  # bytes of them
ACK_WAIT = 5.0
"""Seconds after which NATS delivers a request again if its bridge is silent about it."""

MESSAGE_ID = "Nats-Msg-Id"  # the header by which a sender marks repetitions of a request
REPLY_TO = "Loom-Reply-To"
"""The header with the subject for the bridge's reply: on the usual one NATS answers that it keeps the request."""

_API_TIMEOUT = 5.0  # seconds that JetStream may take to answer
_FETCH_TIMEOUT = 5.0
"""Seconds that one question for a request waits at NATS, and is missed if the connection is lost meanwhile."""

Take = Callable[[str, bytes, str, str, float], Awaitable[None]]
"""A function that does a request: its subject, bytes, reply subject or "", id, and age in seconds."""


class RequestStream:
    """A durable stream of requests, one after another.

    ``name`` is the stream's, with exactly the ``subjects``, and ``durable`` is what bridges of one gateway share.
    """

    def __init__(
        self,
        link: NatsLink,
        state: BridgeState,
        tally: Tally,
        name: str,
        durable: str,
        subjects: Sequence[str],
        take: Take,
    ) -> None:
        self._link = link
        self._state = state
        self._tally = tally
        self._name = name
        self._durable = durable
        self._subjects = subjects
        self._take = take

    async def open(self) -> None:
        """Make the stream and its consumer, unless they are there.

        Raises:
            NatsUnreachable: NATS has no JetStream for the bridge.
            Conflict: there is a stream with the name, and it has other subjects.
        """
        try:
            await self._prepare(self._link.check())
        except FAILURES as error:
            why = str(error) or type(error).__name__
            raise NatsUnreachable(
                f"NATS at {self._link.name} has no JetStream for the bridge ({why}): "
                "start nats-server with --jetstream, enable it for the account, and let the bridge publish on "
                "$JS.API.> and $JS.ACK.>; or leave --jetstream out"
            ) from error

    async def run(self) -> None:
        """Do the requests one after another, without end."""
        while True:
            try:
                await self._consume()
            except NatsAway:
                pass
            except (Conflict, *FAILURES) as error:
                why = str(error) or type(error).__name__
                self._tally.refuse(f"the stream {self._name}", MessageTrouble.AWAY, why)
            await asyncio.sleep(AGAIN)

    async def _prepare(self, client: Client) -> JetStreamContext.PullSubscription:
        jetstream = client.jetstream(timeout=_API_TIMEOUT)
        try:
            found = (await jetstream.stream_info(self._name)).config.subjects or []
        except nats.js.errors.NotFoundError:
            found = list(self._subjects)
            await jetstream.add_stream(
                StreamConfig(
                    name=self._name,
                    subjects=found,
                    retention=RetentionPolicy.INTEREST,
                    discard=DiscardPolicy.NEW,  # what NATS has confirmed to its sender is not dropped
                    max_age=MAX_AGE,
                    max_msgs=MAX_KEPT,
                    max_bytes=MAX_BYTES,
                )
            )
        if sorted(found) != sorted(self._subjects):
            raise Conflict(
                f"the stream {self._name} in NATS has the subjects {', '.join(sorted(found))}, and the bridge "
                f"needs {', '.join(sorted(self._subjects))}: delete the stream, or give another --prefix"
            )
        try:
            await jetstream.consumer_info(self._name, self._durable)
        except nats.js.errors.NotFoundError:
            await jetstream.add_consumer(
                self._name,
                ConsumerConfig(
                    durable_name=self._durable,
                    deliver_policy=DeliverPolicy.NEW,
                    ack_policy=AckPolicy.EXPLICIT,
                    ack_wait=ACK_WAIT,
                    max_ack_pending=1,  # the order of a pause and a resume matters, also with several bridges
                ),
            )
        return await jetstream.pull_subscribe_bind(durable=self._durable, stream=self._name)

    async def _consume(self) -> None:
        requests = await self._prepare(self._link.check())
        try:
            while self._link.check():
                with contextlib.suppress(nats.errors.TimeoutError):
                    for message in await requests.fetch(1, _FETCH_TIMEOUT):
                        await self._do(message)
        finally:
            with contextlib.suppress(*FAILURES):
                await requests.unsubscribe()

    async def _do(self, message: Msg) -> None:
        headers = message.headers or {}
        if HEADER not in headers:  # it is not what a bridge has said
            id = self._id(message)
            if self._state.is_done(id):
                self._tally.repeated += 1
            else:
                age = max(0.0, time.time() - message.metadata.timestamp.timestamp())
                with _in_progress(message):
                    await self._take(message.subject, message.data, headers.get(REPLY_TO, ""), id, age)
                self._state.note_done(id)
                self._tally.done += 1
        await message.ack()

    def _id(self, message: Msg) -> str:
        """Return the id of a request, the same whenever it is delivered and whoever delivers it."""
        about = message.metadata
        marked = (message.headers or {}).get(MESSAGE_ID)
        # The time is in it because a stream that is made anew counts from one.
        identity = marked or f"{about.sequence.stream} {about.timestamp.isoformat()}"
        return hashlib.sha256(f"{self._name} {identity}".encode()).hexdigest()[:32]


@contextlib.contextmanager
def _in_progress(message: Msg) -> Iterator[None]:
    """Say to NATS again and again that a request is being done."""

    async def say() -> None:
        while True:
            await asyncio.sleep(ACK_WAIT / 3)
            await message.in_progress()

    saying = asyncio.ensure_future(say())
    saying.add_done_callback(lambda done: done.cancelled() or done.exception())  # NATS that is away says so itself
    try:
        yield
    finally:
        saying.cancel()
