"""A receiver of webhooks on this machine, which remembers what came, and answers as a test says."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Hook(NamedTuple):
    """One request."""

    path: str
    headers: dict[str, str]
    body: Any


Answer = Callable[[Hook, socket.socket], bytes]
"""Returns the answer to a request; it may send some of it by itself."""


def status(code: int, *lines: str) -> Answer:
    head = "\r\n".join([f"HTTP/1.1 {code} Because", *lines, "", ""])
    return lambda hook, line: head.encode()


class WebhookReceiver:
    """Listens on a port of 127.0.0.1."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.answer: Answer = status(204)
        self.came = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, path: str = "/T0/secret") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def wait(self, count: int, timeout: float = 30.0) -> list[Hook]:
        """Wait until there are so many requests; return them."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.hooks) >= count, timeout), self.hooks
            return list(self.hooks)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError, ValueError):
            file = line.makefile("rb")
            path = file.readline().decode().split(" ")[1]
            headers: dict[str, str] = {}
            while row := file.readline().decode().strip():
                name, _, value = row.partition(": ")
                headers[name] = value
            hook = Hook(path, headers, json.loads(file.read(int(headers["Content-Length"]))))
            with self.came:
                self.hooks.append(hook)
                self.came.notify_all()
            line.sendall(self.answer(hook, line))


@contextlib.contextmanager
def receiving() -> Iterator[WebhookReceiver]:
    receiver = WebhookReceiver()
    try:
        yield receiver
    finally:
        receiver.close()
