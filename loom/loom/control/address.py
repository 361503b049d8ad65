"""Addresses of a cluster: the default port of a worker, and the weaver's address for threadlets, with its key."""

from __future__ import annotations

import os
import re
import socket
from typing import NamedTuple

from loom.errors import InvalidAddress
from loom.process.listen import address_towards

MONARCH_PORT = 26600  # the default port of a worker

ADDRESS_VARIABLE = "LOOM_WEAVER"  # the environment variable in which a threadlet finds the weaver's address

_ADDRESS = re.compile(
    r"tcp://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})/(?P<key>[A-Za-z0-9_.~%:-]{1,4096})"
)


class WeaverAddress(NamedTuple):
    """The host and port on which the weaver listens for threadlets, and the key that authenticates them."""

    host: str
    port: int
    key: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{self.key}"


def parse_weaver_address(text: str) -> WeaverAddress:
    """Parse ``tcp://HOST:PORT/KEY``; the `InvalidAddress` of another text does not show the key."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        shown = re.sub(r"^([^/]*//[^/]*/).+", r"\1…", text, flags=re.DOTALL)
        raise InvalidAddress(
            f"{shown!r} is not the address of a weaver: {ADDRESS_VARIABLE} has the form tcp://HOST:PORT/KEY"
        )
    return WeaverAddress(match["host"].strip("[]"), int(match["port"]), match["key"])


_held = ""  # the address that this process was given, outside of its environment


def hold_address(text: str) -> None:
    """Keep the weaver's address for this process and its forks.

    It has a key, so it stays out of the environment, which every child process inherits and which tools print.
    """
    global _held
    _held = text


def weaver_address() -> str:
    """Return the weaver's address in the environment, or the one that this process was given; "" if none."""
    return os.environ.get(ADDRESS_VARIABLE) or _held


def was_spawned() -> bool:
    """Return whether a session has spawned this process, which then ends only when something ends it."""
    return bool(_held)


def own_address() -> str:
    """Return this host's address on the route to the weaver, at which other hosts reach it too."""
    if not (text := weaver_address()):
        return socket.gethostbyname(socket.gethostname())
    weaver = parse_weaver_address(text)
    return address_towards(weaver.host, weaver.port)
