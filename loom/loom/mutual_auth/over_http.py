"""Proofs over HTTP: of a gateway before a token is shown to it, and of each request and its answer.

A forwarded port is one of this machine's, and another user of the machine may take it when the program that
forwards it ends; a port of a cluster's node is another program's when a gateway has moved. So before a token is
sent there, the gateway has to answer a challenge with an HMAC whose key is the token's hash, which it has and
whoever else listens on the port has not. On Linux the listener of a forwarded port also has to belong to this user,
so that nobody can pass the challenge on to the gateway.

A request without a proof is refused with a challenge: the nonce of the side that answers, good for one request.
The same request then comes with the nonce of the side that asks, and a proof for this method, host and path. So
what one host was sent is worth nothing at another.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from loom.errors import LoomError, NotAGateway, ProtocolMismatch, error_for_code
from loom.mutual_auth import Exchange, Purpose, Side, checked_nonce, new_nonce
from loom.process.listen import bracketed, is_loopback
from loom.token_file import digest

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


PROOF_PATH = "/api/v1/proof"

_forwarded: set[tuple[str, int]] = set()
"""Hosts and ports whose gateways have to prove themselves; for good, as old URLs may still be used."""

_HERE = "127.0.0.1"


def note_forwarded(port: int, host: str = _HERE) -> None:
    """Note a port that is to lead to a gateway, and may be another program's by now."""
    _forwarded.add((_HERE if is_loopback(host) else host.lower(), port))


def is_forwarded(host: str, port: int) -> bool:
    """Return whether a port was noted with `note_forwarded`."""
    return (_HERE if is_loopback(host) else host.lower(), port) in _forwarded


def key_id(token_digest: str) -> str:
    """Return the name by which a client asks for a proof with the token that has a digest."""
    return hashlib.sha256(b"loom key id " + token_digest.encode()).hexdigest()[:32]


def gateway_proof(token_digest: str, challenge: str) -> dict[str, str]:
    """Return the gateway's answer to a client's challenge: its own ``nonce``, and the ``proof``."""
    exchange = Exchange(Purpose.GATEWAY, token_digest, challenge, new_nonce())
    return {"nonce": exchange.answering, "proof": exchange.proof(Side.ANSWERS)}


def check_proof(sock: socket.socket, url: str, token: str | None) -> None:
    """Have the gateway behind a forwarded port prove that it knows a token, on a new connection to it.

    Args:
        url: the URL that the connection is for, of any of the gateway's paths below ``/api`` and ``/ws``.

    Raises:
        NotAGateway: it does not prove it. The token was not sent.
        AuthenticationError: the gateway does not know the token either.
    """
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None or not is_forwarded(parts.hostname, parts.port) or not token:
        return
    owner = listener_of(parts.port) if is_loopback(parts.hostname) else None
    if owner not in (None, os.getuid()):
        raise _unproven(url, f"user {owner} listens on port {parts.port} in place of kubectl or ssh")
    if token.count(".") == 2:
        # The gateway knows a token of an OpenID issuer only when it sees it.
        if owner is None:
            raise _unproven(url, "no gateway knows an OpenID token before it sees it: use `loom token create`")
        return
    challenge = new_nonce()
    shown = digest(token)
    path = _prefix(parts.path) + PROOF_PATH + "?" + urlencode({"key": key_id(shown), "challenge": challenge})
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
    connection.sock = sock
    try:
        connection.request("GET", path)
        with connection.getresponse() as response:
            answer = json_object(response.read(4096))
    except http.client.HTTPException as error:
        raise _unproven(url, f"it does not answer a challenge: {error or type(error).__name__}") from error
    if (refusal := error_in(answer)) is not None:
        raise refusal
    try:
        exchange = Exchange(Purpose.GATEWAY, shown, challenge, checked_nonce(str(answer.get("nonce"))))
    except ProtocolMismatch as error:
        raise _unproven(url, str(error)) from error
    if not exchange.proves(str(answer.get("proof")), Side.ANSWERS):
        raise _unproven(url, "it gives no right answer to a challenge")
    if connection.sock is None:
        raise ConnectionError("the gateway closed the connection after its proof")


def listener_of(port: int, table: Path = Path("/proc/net/tcp")) -> int | None:
    """Return the id of the user who listens on a port of 127.0.0.1; None if this system does not tell."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return None
    for line in lines:
        _, local, _, state, _, _, _, owner, *_ = line.split()
        if local == f"0100007F:{port:04X}" and state == "0A":
            return int(owner)
    return None


def _prefix(path: str) -> str:
    for own in ("/ws/v1", "/api/v1"):
        path = path.partition(own)[0]
    return path


def json_object(body: bytes) -> dict[str, Any]:
    """Return the object in a gateway's answer; an empty one if the answer is something else."""
    try:
        answer = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def error_in(answer: dict[str, Any]) -> LoomError | None:
    """Return the error that a gateway's answer describes; None if it describes none."""
    described = answer.get("error")
    if not isinstance(described, dict):
        return None
    return error_for_code(str(described.get("code")), str(described.get("message")))


def _unproven(url: str, why: str) -> NotAGateway:
    return NotAGateway(
        f"what answers at {url} has not proved that it is the gateway, so the token was not sent: {why}. Another "
        f"program may have taken the port, or the gateway is older than this client"
    )
