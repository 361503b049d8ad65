"""The web pages that may ask a gateway in a browser's name."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from loom.errors import OriginRefused

READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods of HTTP that change nothing."""

PAGE_HEADER = b"x-loom-page"
"""A header that another origin's page cannot send unless this one allows it, which it never does."""


class Origins:
    """Checks the origins of requests.

    Args:
        others: origins of web pages that may connect, such as ``https://host:8080``, besides the gateway's own.
    """

    def __init__(self, others: Iterable[str] = ()) -> None:
        self.others = frozenset(origin.lower().rstrip("/") for origin in others)

    def check(self, headers: Sequence[tuple[bytes, bytes]], own_only: bool = False) -> None:
        """Raise `OriginRefused` for what a foreign web page asks.

        Args:
            headers: those of the request.
            own_only: whether only the gateway's own page may ask, and has to name its origin as browsers do.
        """
        given = {name.lower(): value.decode("latin-1") for name, value in headers}
        origin = given.get(b"origin")
        if origin is None:  # not a browser
            if own_only:
                raise OriginRefused("a page that has signed in sends its origin")
            return
        own = urlsplit(origin).netloc.lower()
        allowed = not own_only and origin.lower() in self.others
        if not allowed and (not own or own != given.get(b"host", "").lower()):
            raise OriginRefused(
                f"a web page of {origin[:200]!r} may not connect; the gateway allows its own host and what "
                f"--allow-origin names"
            )

    def check_page(self, scope: MutableMapping[str, Any]) -> None:
        """Check that a request with a cookie was made by the gateway's own page: browsers send it for any page."""
        given = {name.lower(): value for name, value in scope["headers"]}
        if scope["type"] == "websocket":
            self.check(scope["headers"], own_only=True)
        elif scope["method"] not in READS:
            self.check(scope["headers"], own_only=True)
            if given.get(PAGE_HEADER) != b"1":
                raise OriginRefused("a page sends the header X-Loom-Page: 1 with what it asks for")
        elif given.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none"):
            raise OriginRefused("only the gateway's own page may ask with its sign-in")
