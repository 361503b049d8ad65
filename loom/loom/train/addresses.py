"""The addresses at which other hosts reach this one."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from loom.control.address import ADDRESS_VARIABLE
from loom.process import listen


def address_towards(url: str) -> str:
    """Return this host's address on the route to a URL's host."""
    parts = urlsplit(url)
    return listen.address_towards(parts.hostname or "", parts.port or 80)


def own_address() -> str:
    """Return this host's address on the route to the weaver, at which other hosts reach it too."""
    weaver = os.environ.get(ADDRESS_VARIABLE)
    return address_towards(weaver) if weaver else socket.gethostbyname(socket.gethostname())
