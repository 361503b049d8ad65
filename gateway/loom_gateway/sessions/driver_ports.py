"""Ports for drivers, none given twice.

A worker keeps trying to deliver its messages for a dead driver (see ``UNDELIVERABLE_AFTER`` in
`loom_gateway.workers.host`). It numbers the messages to an address from the first that it ever sent there. If
another driver got the same port, it would wait for numbers that never come, and its attach would fail (torchmonarch
0.7). The kernel chooses ports at random, and one of a hundred sessions met a used one. A driver of another gateway
on this machine would even end the worker: it refuses the numbers, and Monarch ends a process that is refused.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

TRIES = 64  # the number of ports to try at once before used ones may be given again

HELD = 256  # the number of ports that were given last and that the kernel gives to no other program


def _bind_any() -> socket.socket:
    sock = socket.socket()
    sock.bind(("", 0))
    return sock


class FreshPorts:
    """Free TCP ports of this machine. When hardly any new ones are left, all may be given again.

    It keeps a given port bound, without listening: a driver that asks for this very port can listen on it, before
    and after another one did; the kernel chooses it for nobody.

    Args:
        path: a file of the given ports for the next gateway, which has the same workers.
        bind: returns a socket that is bound to a port of the kernel's choice.
    """

    def __init__(self, path: str, bind: Callable[[], socket.socket] = _bind_any) -> None:
        self._bind = bind
        self._path = Path(path)
        given = self._path.read_text().split() if self._path.exists() else []
        self._given = {int(port) for port in given if port.isdecimal()}
        self._held: deque[socket.socket] = deque()

    def take(self) -> int:
        """Return a port that was not given before, on which a socket with ``SO_REUSEADDR`` can listen."""
        tried: list[socket.socket] = []  # a port that is bound here is not chosen again
        try:
            while (sock := self._bind()).getsockname()[1] in self._given:
                tried.append(sock)
                if len(tried) == TRIES:
                    self._given.clear()
                    self._path.unlink(missing_ok=True)
        finally:
            for one in tried:
                one.close()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.append(sock)
        if len(self._held) > HELD:
            self._held.popleft().close()
        port = int(sock.getsockname()[1])
        self._given.add(port)
        with self._path.open("a") as file:
            file.write(f"{port}\n")
        return port

    def close(self) -> None:
        """Let other programs have the ports."""
        while self._held:
            self._held.popleft().close()
