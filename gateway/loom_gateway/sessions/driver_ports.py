"""Ports for drivers, none given twice.

A worker keeps trying to deliver its messages for a dead driver (see ``UNDELIVERABLE_AFTER`` in
`loom_gateway.workers.host`). It numbers the messages to an address from the first that it ever sent there. If
another driver got the same port, it would wait for numbers that never come, and its attach would fail (torchmonarch
0.7). The kernel chooses ports at random, and one of a hundred sessions met a used one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

TRIES = 64  # the number of ports to try at once before used ones may be given again


def _bind_any() -> socket.socket:
    sock = socket.socket()
    sock.bind(("", 0))
    return sock


class FreshPorts:
    """Free TCP ports of this machine. When hardly any new ones are left, all may be given again.

    Args:
        path: a file of the given ports for the next gateway, which has the same workers.
        bind: returns a socket that is bound to a port of the kernel's choice.
    """

    def __init__(self, path: str, bind: Callable[[], socket.socket] = _bind_any) -> None:
        self._bind = bind
        self._path = Path(path)
        given = self._path.read_text().split() if self._path.exists() else []
        self._given = {int(port) for port in given if port.isdecimal()}

    def take(self) -> int:
        """Return a port that is free and was not given before."""
        with ExitStack() as held:  # a port that is held here is not chosen again
            for _ in range(TRIES):
                port = int(held.enter_context(self._bind()).getsockname()[1])
                if port not in self._given:
                    break
            else:
                self._given.clear()
                self._path.unlink(missing_ok=True)
        self._given.add(port)
        with self._path.open("a") as file:
            file.write(f"{port}\n")
        return port
