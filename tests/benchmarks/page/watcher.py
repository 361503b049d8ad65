"""A second watcher of what the page shows: a client without a page, with the page's subscription."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from tests.benchmarks.caller_process import CallerError

__all__ = ["Watcher"]

BOUND = 10.0
"""Seconds that the thread may take to end."""


SNAPSHOT = b'{"type": "snapshot"'
"""How the message with the snapshot begins."""


class Watcher:
    """A WebSocket that gets what a page gets, and throws it away; a context manager.

    Args:
        url: of the gateway.
        token: of the user.
        subscription: the message with which the page has subscribed; None if it has not.
    """

    def __init__(self, url: str, token: str, subscription: dict[str, Any] | None) -> None:
        self.received = 0
        """Bytes of messages."""
        self._there = False
        self._socket = connect(
            f"{url}/ws/v1/weaver",
            additional_headers={"Authorization": f"Bearer {token}"},
            subprotocols=[Subprotocol("loom.page")],
            max_size=None,
            proxy=None,
        )
        self._thread = threading.Thread(target=self._read, name="watcher", daemon=True)
        if subscription is not None:
            self._socket.send(json.dumps(subscription))
        self._thread.start()

    @property
    def there(self) -> bool:
        """Whether the snapshot has come, for which thousands of replicas are packed.

        Raises:
            CallerError: the gateway has closed the socket.
        """
        if not self._thread.is_alive():
            raise CallerError("the gateway closed the socket of a second watcher")
        return self._there

    def _read(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                message = self._socket.recv(decode=False)
                self.received += len(message)
                self._there = self._there or message.startswith(SNAPSHOT)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._thread.join(BOUND)
