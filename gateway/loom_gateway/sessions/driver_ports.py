"""Ports for drivers, none given twice.

A worker goes on trying to deliver what it had for a driver that is gone (see ``UNDELIVERABLE_AFTER`` in
`loom_gateway.workers.host`), and numbers its messages to an address from the first that it ever sent there. So to
another driver that got the same port it would never say anything that this one takes (torchmonarch 0.7): the new
driver's attach fails. The kernel gives out ports at random, and one of a hundred sessions met one that had been
used.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

TRIES = 64
"""Ports asked for at once before used ones are given again."""


def _bind_any() -> socket.socket:
    sock = socket.socket()
    sock.bind(("", 0))
    return sock


class FreshPorts:
    """Free TCP ports of this machine. When hardly any is left that was not given, all may be given again.

    Args:
        bind: binds a socket to a port that the kernel picks.
        path: a file of the ports that were given, for the next gateway, whose workers are the same; None: there is
            no next one.
    """

    def __init__(self, bind: Callable[[], socket.socket] = _bind_any, path: str | None = None) -> None:
        self._bind = bind
        self._path = None if path is None else Path(path)
        given = self._path.read_text().split() if self._path is not None and self._path.exists() else []
        self._given = {int(port) for port in given if port.isdecimal()}

    def take(self) -> int:
        """A port that nobody listens on and that was not given before."""
        with ExitStack() as held:  # what is held is not picked again
            for _ in range(TRIES):
                port = int(held.enter_context(self._bind()).getsockname()[1])
                if port not in self._given:
                    break
            else:
                self._given.clear()
                if self._path is not None:
                    self._path.unlink()
        self._given.add(port)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{port}\n")
        return port
