"""Who may come in: the gateway's token."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from loom.errors import AuthenticationError

__all__ = ["TokenAuthority", "generate_token"]


def generate_token() -> str:
    """A new token, with 256 bits of randomness."""
    return secrets.token_urlsafe(32)


class TokenAuthority:
    """Checks tokens. Keeps only their hash, and compares in constant time."""

    def __init__(self, token: str) -> None:
        self._digest = _digest(token)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Check the ``Authorization: Bearer`` header of a request.

        Raises:
            AuthenticationError: it is missing, of another scheme, or its token is wrong.
        """
        given = next((value for name, value in headers if name.lower() == b"authorization"), None)
        if given is None:
            raise AuthenticationError(
                "this gateway needs a token: pass token=… to loom.connect or set LOOM_TOKEN "
                "(HTTP: the header `Authorization: Bearer TOKEN`)"
            )
        scheme, _, token = given.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(token.strip()), self._digest):
            raise AuthenticationError(
                "this gateway does not accept the token; the gateway printed its own when it started"
            )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
