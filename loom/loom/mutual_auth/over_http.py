"""Requests over HTTP that are proven: each before it is carried out, and its answer before it is read.

A request without a proof is refused with a challenge: the nonce of the side that answers, good for one request.
The same request then comes with the nonce of the side that asks, and a proof for this method, host and path. So
what one host was sent is worth nothing at another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse

from loom.errors import ProtocolMismatch
from loom.mutual_auth.exchange import Exchange, Purpose, Side, checked_nonce, new_nonce
from loom.process.listen import bracketed

CHALLENGE_HEADER = "x-loom-challenge"
"""The nonce of the side that answers."""

NONCE_HEADER = "x-loom-nonce"
"""The nonce of the side that asks."""

PROOF_HEADER = "x-loom-proof"

LIFETIME = 10.0
"""Seconds in which a challenge has to be answered."""

MOST = 4096
"""Challenges that wait to be answered. Beyond them, the oldest is void."""


class Challenges:
    """The challenges that one side has given out. Any thread may use them."""

    def __init__(self, purpose: Purpose, clock: Callable[[], float] = time.monotonic) -> None:
        self._purpose = purpose
        self._clock = clock
        self._given: dict[str, float] = {}  # until when each is good, the oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._given)

    def new(self) -> str:
        """Return a challenge, for a refusal."""
        nonce = new_nonce()
        with self._lock:
            if len(self._given) >= MOST:
                del self._given[next(iter(self._given))]
            self._given[nonce] = self._clock() + LIFETIME
        return nonce

    def check(self, key: str, headers: Mapping[str, str], method: str, host: str, path: str) -> Exchange | None:
        """Return the exchange that a request with a proof belongs to; None if it proves nothing.

        Its challenge is used up then, whatever it proves.
        """
        challenge = headers.get(CHALLENGE_HEADER, "")
        with self._lock:
            until = self._given.pop(challenge, 0.0)
        if until <= self._clock():
            return None
        try:
            exchange = Exchange(self._purpose, key, checked_nonce(headers.get(NONCE_HEADER, "")), challenge)
        except ProtocolMismatch:
            return None
        proven = exchange.proves(headers.get(PROOF_HEADER, ""), Side.ASKS, method, host, path)
        return exchange if proven else None


def proof_of_answer(exchange: Exchange, status: int, *said: str) -> str:
    """Return the proof for the answer to a request."""
    return exchange.proof(Side.ANSWERS, str(status), *said)


@dataclass(frozen=True)
class ProvenAnswer:
    """The answer to a request. Nothing of it may be believed before `proves` says so."""

    response: HTTPResponse
    exchange: Exchange

    def proves(self, *said: str) -> bool:
        """Return whether who answers knows the key, and has said this."""
        shown = self.response.headers.get(PROOF_HEADER, "")
        return self.exchange.proves(shown, Side.ANSWERS, str(self.response.status), *said)


def ask(
    connection: HTTPConnection,
    purpose: Purpose,
    key: str,
    method: str,
    path: str,
    body: str | None = None,
) -> ProvenAnswer:
    """Send a request, after another one for a challenge.

    Raises:
        ProtocolMismatch: who answers gives no challenge of this version.
        OSError, http.client.HTTPException: nobody answers, or not over HTTP.
    """
    host = f"{bracketed(connection.host)}:{connection.port}"
    connection.request(method, path, headers={"host": host})
    challenge = checked_nonce(connection.getresponse().headers.get(CHALLENGE_HEADER, ""))
    connection.close()  # it may have sent a body of any length
    exchange = Exchange(purpose, key, new_nonce(), challenge)
    headers = {
        "host": host,
        NONCE_HEADER: exchange.asking,
        CHALLENGE_HEADER: challenge,
        PROOF_HEADER: exchange.proof(Side.ASKS, method, host, path),
        "content-type": "application/json",
    }
    connection.request(method, path, body, headers)
    return ProvenAnswer(connection.getresponse(), exchange)
