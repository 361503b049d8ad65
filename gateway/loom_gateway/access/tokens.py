"""Tokens and their scopes: the gateway's own token, and those of its token file."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Iterable

from loom.errors import AuthenticationError, TokenFileError, TokenRevoked
from loom.token_file import Token, TokenFile, digest

logger = logging.getLogger(__name__)


OWN = "gateway"
"""The id and name of the gateway's own token, which is not in the file, does not expire, and may do everything."""


class TokenAuthority:
    """Checks the gateway's own token, and those of a file. Keeps only their hashes."""

    def __init__(self, token: str, file: TokenFile | None = None) -> None:
        self._own = Token(OWN, OWN, "drive", digest(token), time.time())
        self._file = file
        self._version: tuple[int, ...] | None = None  # of the file's last content
        self._by_digest: dict[str, Token] = {}
        self._by_id: dict[str, Token] = {}
        self._trouble: TokenFileError | None = None  # so that an error is logged once

    def reload(self) -> None:
        """Read the file again if it has changed. While it cannot be read, its last content stays in force."""
        if self._file is None:
            return
        try:
            version = self._file.version()
            if version == self._version:
                return
            self._version = version
            tokens = self._file.read()
        except TokenFileError as error:
            if str(error) != str(self._trouble):
                logger.error("%s; going by what it said before", error)
            self._trouble = error
            return
        self._trouble = None
        self._by_digest = {token.sha256: token for token in tokens}
        self._by_id = {token.id: token for token in tokens}

    def check(self, shown: str) -> Token:
        """Return the token with a digest. Raise `AuthenticationError` if there is none, or `TokenRevoked`."""
        if hmac.compare_digest(shown, self._own.sha256):
            return self._own
        self.reload()
        # The time of the look-up may depend on the digest, but reveals nothing about a token.
        token = self._by_digest.get(shown)
        if token is None:
            raise AuthenticationError(
                "this gateway does not accept the token; the gateway printed its own when it started"
                + ("" if self._file is None else ", and `loom token create` makes more")
            )
        self.confirm(token.id)
        return token

    def confirm(self, ident: str) -> None:
        """Raise `TokenRevoked` if the token with an id, which was accepted, was revoked or has expired."""
        if ident in ("", OWN):  # an empty id is that of a gateway that recorded no owners
            return
        token = self._by_id.get(ident)
        state = "revoked" if token is None else token.state(time.time())
        if state != "valid":
            name = "" if token is None else f" ({token.name!r})"
            how = "has expired" if state == "expired" else "was revoked"
            raise TokenRevoked(f"the token {ident}{name} {how}: ask for a new one and connect with it")


def digest_shown(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the digest of the token in a request's headers. Raise `AuthenticationError` if there is none."""
    given = next((value for name, value in headers if name.lower() == b"authorization"), None)
    if given is None:
        raise AuthenticationError(
            "this gateway needs a token: pass token=… to loom.connect or set LOOM_TOKEN "
            "(HTTP: the header `Authorization: Bearer TOKEN`)"
        )
    scheme, _, token = given.decode("latin-1").partition(" ")
    if scheme.lower() != "bearer":
        raise AuthenticationError(
            "this gateway takes a token in the header `Authorization: Bearer TOKEN`, and no other scheme"
        )
    return digest(token.strip())
