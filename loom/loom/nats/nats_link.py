"""The connection to NATS, and the causes for which nats-py gives one up for good."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from loom.errors import AuthenticationError, InvalidAddress, LoomError, NatsUnreachable
from loom.nats.message_counts import MessageTrouble, Tally
from loom.tls import client_context

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5  # seconds that a server may take to accept a connection

OPEN_TIMEOUT, CLOSE_TIMEOUT = 15.0, 2.0
"""Seconds that connecting and closing may take."""

PING_EVERY = 10
"""Seconds between pings. A server that leaves two unanswered counts as away."""

MAX_UNREAD = 10_000  # messages of a subject that wait for the bridge; further ones are dropped
AGAIN = 0.5  # seconds between attempts to reconnect

_SCHEMES = ("nats", "tls", "ws", "wss")

_REFUSED = ("authorization", "authentication")  # words in the errors of NATS for a client that it refuses

FAILURES = (OSError, nats.errors.Error, asyncio.TimeoutError)
"""The errors of a server that is away, or that refuses something."""


class NatsAway(Exception):
    """There is no connection to NATS at the moment."""


@contextlib.contextmanager
def _away() -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise NatsAway(str(error)) from error


@dataclass(frozen=True)
class NatsLogin:
    """The bridge's credentials for NATS, named as its client names them; those that are not needed stay None."""

    user: str | None = None
    password: str | None = None
    token: str | None = None
    user_credentials: str | None = None
    """A file with a JWT and an NKEY seed."""
    ca: str | None = None
    """The file of a certificate authority for ``tls://``; see `loom.tls.client_context`."""


@dataclass(frozen=True)
class SubjectSubscription:
    """The wish for the messages on a subject."""

    subject: str
    queue: str
    """The queue group, of whose members one gets each message; "" for each message."""
    take: Callable[[Msg], Awaitable[None]]


class NatsLink:
    """A connection to a server or cluster of NATS, which nats-py makes again whenever it is lost.

    ``lost`` is called when the connection is lost, before nats-py makes another one, and ``came`` when there is one
    again. A ``url`` that is not one of NATS raises `InvalidAddress`.
    """

    def __init__(
        self,
        url: str,
        login: NatsLogin,
        lost: Callable[[], None],
        came: Callable[[], Awaitable[None]],
        tally: Tally,
    ) -> None:
        self.name = _without_password(url)
        self.subscriptions: list[SubjectSubscription] = []
        """The messages that the connection is to bring; complete before `open`."""
        self._url = url
        self._on_loss = lost
        self._on_reconnect = came
        self._tally = tally
        self._options = _login_options(login, url)
        self._client: Client | None = None
        self._is_up = False
        self._last_error: Exception | None = None

    async def open(self) -> None:
        """Connect, or raise `NatsUnreachable`, or `AuthenticationError` if the server refuses the credentials."""
        client = Client()
        self._last_error = None
        try:
            connecting = client.connect(
                self._url,
                error_cb=self._note,
                disconnected_cb=self._note_loss,
                reconnected_cb=self._note_return,
                name="loom bridge",
                # The first connection: nats-py would try for ever.
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=CONNECT_TIMEOUT,
                ping_interval=PING_EVERY,
                no_echo=True,
                **self._options,
            )
            # With a server whose certificate is not trusted, the client would wait for ever.
            await asyncio.wait_for(connecting, OPEN_TIMEOUT)
            for one in self.subscriptions:
                await client.subscribe(one.subject, one.queue, cb=one.take, pending_msgs_limit=MAX_UNREAD)
            await flush(client, CONNECT_TIMEOUT)
        except (*FAILURES, ValueError) as error:
            raise await self._not_opened(client, error) from error
        client.options.update(allow_reconnect=True, max_reconnect_attempts=-1, reconnect_time_wait=AGAIN)
        self._client = client
        self._is_up = True

    async def keep(self) -> None:
        """Replace a client that nats-py has closed, without end.

        It closes a client, and reconnects no more, after errors that a server sends, such as "Slow Consumer".
        It does not call back if the data that it still had to send could not be sent.
        """
        while True:
            await asyncio.sleep(AGAIN)
            if self._client is not None and self._client.is_closed:
                await self._note_loss()
                try:
                    await self.open()
                except LoomError as error:
                    logger.debug("%s", error)
                else:
                    await self._note_return()

    def check(self) -> Client:
        """Return the connected client, or raise `NatsAway`, as the methods below do."""
        if self._client is None or not (self._is_up and self._client.is_connected):
            raise NatsAway
        return self._client

    @property
    def max_payload(self) -> int:
        """Bytes that a message may have."""
        return self.check().max_payload

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str], reply: str = "") -> None:
        """Publish a message. It has arrived once `flush` returns, if the connection was not lost since."""
        with _away():
            await self.check().publish(subject, data, reply, dict(headers))

    async def flush(self) -> None:
        """Wait until the server has received every message published on its connection."""
        with _away():
            await flush(self.check(), CONNECT_TIMEOUT)

    async def close(self) -> None:
        """Send the remaining messages, and disconnect."""
        self._is_up = False
        if self._client is not None:
            with contextlib.suppress(*FAILURES):
                await flush(self._client, 1)
            with contextlib.suppress(*FAILURES):
                await asyncio.wait_for(self._client.close(), CLOSE_TIMEOUT)

    async def _note(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            return self._tally.refuse(error.subject, MessageTrouble.BEHIND, f"{MAX_UNREAD} messages wait already")
        self._last_error = error
        if self._is_up:
            logger.warning("NATS at %s: %s", self.name, error or type(error).__name__)

    async def _note_loss(self) -> None:
        if self._is_up:
            self._is_up = False
            error = self._last_error
            why = "the connection is lost" if error is None else str(error) or type(error).__name__
            logger.warning("NATS at %s is away (%s); trying again until it is back", self.name, why)
            self._on_loss()

    async def _note_return(self) -> None:
        self._is_up = True
        self._last_error = None
        logger.info("NATS at %s is back", self.name)
        await self._on_reconnect()

    async def _not_opened(self, client: Client, error: Exception) -> LoomError:
        why = error if str(error) and not isinstance(error, nats.errors.NoServersError) else self._last_error
        with contextlib.suppress(*FAILURES):
            await asyncio.wait_for(client.close(), CLOSE_TIMEOUT)
        text = str(why or error).removeprefix("nats: ").strip("'") or type(why or error).__name__
        if any(word in text.lower() for word in _REFUSED):
            return AuthenticationError(
                f"NATS at {self.name} does not let the bridge in ({text}): give --nats-user and "
                f"--nats-password, --nats-token or --nats-creds"
            )
        return NatsUnreachable(f"no NATS at {self.name} ({text}): check the address and that the server runs")


async def flush(client: Client, timeout: int) -> None:
    """Wait until the server has received everything that a client has sent and subscribed to so far.

    One flush is not enough: ``Client.flush`` writes its PING at once, before the data that waits for the client's
    own flusher. That data is written by the time the PONG comes, and so lies before a second PING.
    """
    await client.flush(timeout)
    await client.flush(timeout)


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.scheme not in _SCHEMES:
        raise InvalidAddress(f"{url!r} is not a URL of NATS: write nats://HOST:4222")
    return f"{parts.scheme}://{host}:{port or 4222}"


def _login_options(login: NatsLogin, url: str) -> Mapping[str, Any]:
    options: dict[str, object] = {
        name: value for name, value in vars(login).items() if name != "ca" and value is not None
    }
    if login.ca is not None or urlsplit(url).scheme in ("tls", "wss"):
        options["tls"] = client_context(login.ca)
    return options
