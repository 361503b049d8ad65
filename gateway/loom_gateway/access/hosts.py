"""`AllowedHosts`: the names by which a gateway answers that listens on a loopback address.

A web page may give its own name the address 127.0.0.1 (DNS rebinding): the browser then takes what answers there
for the page's own server. It still sends the page's name in the header ``Host``, which is refused here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from loom.errors import Denied
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
