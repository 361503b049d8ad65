"""The web pages that may ask a gateway in a browser's name.

`AllowedHosts`: the names by which a gateway answers that listens on a loopback address.

A web page may give its own name the address 127.0.0.1 (DNS rebinding): the browser then takes what answers there
for the page's own server. It still sends the page's name in the header ``Host``, which is refused here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from loom.errors import Denied, OriginRefused
from loom.process.listen import is_loopback


class AllowedHosts:
    """The names by which a gateway may be asked.

    Args:
        address: the address it listens on. On one that is not a loopback address it answers to every name, unless
            ``names`` are given: what reaches it has come through a network, whose names it does not know.
        names: names besides ``localhost`` and IP addresses, which no page can take over.
        trusts_proxy: whether a proxy is known to be in front, which checks names itself.
    """

    def __init__(self, address: str = "", names: Sequence[str] = (), trusts_proxy: bool = False) -> None:
        self._names = {name.lower().rstrip(".") for name in (*names, "localhost")}
        self._checks = bool(names) or (is_loopback(address) and not trusts_proxy)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise `Denied` if a request's header ``Host`` has a name that is not allowed."""
        if not self._checks:
            return
        given = next((value for name, value in headers if name.lower() == b"host"), None)
        if given is None:  # not a browser
            return
        name = _name(given.decode("latin-1"))
        if name not in self._names and not _is_address(name):
            raise Denied(
                f"this gateway does not answer to the host {name[:200]!r}: connect to localhost or 127.0.0.1, or "
                f"start the gateway with --allow-host for the name by which a proxy or a forward asks for it",
                code="host_refused",
            )


def _name(host: str) -> str:
    """Return the name or address in a header ``Host``, without the port."""
    host = host.strip().lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    return name.rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


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
