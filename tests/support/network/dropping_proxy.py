"""A proxy before a gateway's WebSocket that drops or damages messages when told so, and answers all pings."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve

UP, DOWN = "up", "down"


class DroppingProxy:
    """The proxy before the gateway at a URL. ``dropped`` counts the messages that it has dropped, by direction."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._drop: dict[str, float] = {UP: 0, DOWN: 0}  # messages still to drop
        self._damage = {UP: 0, DOWN: 0}  # messages still to damage
        self._forever: set[tuple[str, int]] = set()  # directions and connections of which all is dropped
        self.dropped = {UP: 0, DOWN: 0}
        self.connections = 0
        self.url = ""

    def drop(self, direction: str, messages: int) -> None:
        """Drop so many of the next messages of a direction, on whatever connection."""
        self._drop[direction] = messages

    def damage(self, direction: str, messages: int) -> None:
        """Pass on the first half only of so many of the next messages of a direction, on whatever connection."""
        self._damage[direction] = messages

    def drop_all(self, direction: str) -> None:
        """Drop all messages of a direction on the connections that there are now."""
        self._forever |= {(direction, number) for number in range(1, self.connections + 1)}

    def _relay(self, client: ServerConnection) -> None:
        self.connections += 1
        number = self.connections
        assert client.request is not None
        headers = {"Authorization": client.request.headers["Authorization"]}
        gateway = connect(
            self._gateway + client.request.path, additional_headers=headers, max_size=None, ping_interval=None
        )
        down = threading.Thread(target=self._pass_on, args=(gateway, client, DOWN, number), daemon=True)
        down.start()
        self._pass_on(client, gateway, UP, number)
        down.join()

    def _pass_on(self, source: Any, sink: Any, direction: str, number: int) -> None:
        with contextlib.suppress(ConnectionClosed):
            for message in source:
                if (direction, number) in self._forever:
                    self.dropped[direction] += 1
                elif self._drop[direction] > 0:
                    self._drop[direction] -= 1
                    self.dropped[direction] += 1
                elif self._damage[direction] > 0:
                    self._damage[direction] -= 1
                    sink.send(message[: len(message) // 2])
                else:
                    sink.send(message)
        sink.close()


@contextmanager
def dropping(gateway: str) -> Iterator[DroppingProxy]:
    """Run a proxy before the gateway at a ``ws://`` URL."""
    proxy = DroppingProxy(gateway)
    with serve(proxy._relay, "127.0.0.1", 0, max_size=None, ping_interval=None) as server:
        port = server.socket.getsockname()[1]
        proxy.url = f"ws://127.0.0.1:{port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield proxy
