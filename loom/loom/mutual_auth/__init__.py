"""Proofs by which two sides show each other that they know a key, without the key.

In one exchange one side asks, and the other answers. Each side gives the other a nonce, and both nonces are in
every proof. So a proof is worth nothing in another exchange (a replay), on the other side (a reflection), or for
another purpose.

`loom.mutual_auth.over_http` has either side of a request over HTTP that is proven in both directions, and has a
gateway behind a forwarded port prove itself before the token is shown to it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from enum import Enum

from loom.errors import ProtocolMismatch

VERSION = 1

_NONCE = re.compile("([0-9]{1,4})-([0-9a-f]{64})")


class Side(Enum):
    """The prover."""

    ASKS = "asks"
    ANSWERS = "answers"


class Purpose(Enum):
    """The purpose of a key that two sides know. A key may serve two: the token of a job is also its gateway's."""

    GATEWAY = "gateway"
    PROCESS_LINK = "lifeline"
    PEER = "peer"
    POD = "pod"
    SESSION_HOST = "session host"


def new_nonce() -> str:
    """Return a nonce for the other side. It says by which version of the proof this side proves itself."""
    return f"{VERSION}-{secrets.token_hex(32)}"


def checked_nonce(text: str) -> str:
    """Return the other side's nonce. Raise `ProtocolMismatch` if it is none of this version."""
    found = _NONCE.fullmatch(text)
    if found is None:
        raise ProtocolMismatch("the other side gives no challenge: it is no Loom, or another version of it")
    if int(found[1]) != VERSION:
        raise ProtocolMismatch(
            f"the other side proves itself by version {found[1]} of the proof, and this one by version {VERSION}: "
            f"use the same version of Loom on both"
        )
    return text


@dataclass(frozen=True)
class Exchange:
    """The inputs of both sides' proofs."""

    purpose: Purpose
    key: str
    asking: str
    """The nonce of the side that asks."""
    answering: str
    """The nonce of the side that answers."""

    def proof(self, side: Side, *said: str) -> str:
        """Return the proof that a side knows the key, and says this."""
        parts = (f"loom proof {VERSION}", self.purpose.value, side.value, self.asking, self.answering, *said)
        # With their lengths, so that nothing can pass from one part to the next.
        text = b"".join(len(part).to_bytes(4, "big") + part for part in map(str.encode, parts))
        return hmac.new(self.key.encode(), text, hashlib.sha256).hexdigest()

    def proves(self, shown: str, side: Side, *said: str) -> bool:
        """Return whether a text is that proof, in a time that says nothing about it."""
        return hmac.compare_digest(shown.encode(), self.proof(side, *said).encode())
