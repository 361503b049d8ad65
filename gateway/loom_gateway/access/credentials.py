"""The credentials of a request: a token, or the sign-in of a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from loom.errors import AuthenticationError
from loom_gateway.access.sign_ins import PREFIX

PAGE_PROTOCOL = "loom.page"
"""The subprotocol of a page's WebSocket."""

_KEY_PROTOCOL = "loom.key."
"""Begins a subprotocol that shows a sign-in: a page cannot give its WebSocket a header."""

HOST_COOKIE = "__Host-"
"""Begins the names of cookies that no other host, and no page without TLS, can set."""


class RequestCredential(NamedTuple):
    """A text, and what it is."""

    text: str
    is_sign_in: bool
    """True if it is the sign-in of a page, and not a token."""
    in_cookie: bool = False
    """True if the browser added it by itself, perhaps for another page."""


def credential_of(headers: Iterable[tuple[bytes, bytes]], cookie: str) -> RequestCredential:
    """Return what a request shows. Raise `AuthenticationError` if that is nothing, or of another scheme.

    Args:
        headers: those of the request.
        cookie: the name of this gateway's cookie.
    """
    given = {name.lower(): value.decode("latin-1") for name, value in headers}
    authorization = given.get(b"authorization")
    if authorization is not None:
        scheme, _, text = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise AuthenticationError(
                "this gateway takes a token in the header `Authorization: Bearer TOKEN`, and no other scheme"
            )
        return RequestCredential(text.strip(), text.strip().startswith(PREFIX))
    for protocol in given.get(b"sec-websocket-protocol", "").split(","):
        if protocol.strip().startswith(_KEY_PROTOCOL + PREFIX):
            return RequestCredential(protocol.strip().removeprefix(_KEY_PROTOCOL), True)
    # Not by `http.cookies`, which takes none if one, perhaps of another program on this host, is malformed.
    kept = dict(part.strip().partition("=")[::2] for part in given.get(b"cookie", "").split(";"))
    for name in (HOST_COOKIE + cookie, cookie):
        if name in kept:
            return RequestCredential(kept[name], True, True)
    raise AuthenticationError(
        "this gateway needs a token: pass token=… to loom.connect or set LOOM_TOKEN "
        "(HTTP: the header `Authorization: Bearer TOKEN`)"
    )
