"""A page's end of the WebSocket ``/ws/v1/weaver``."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from tests.support.gateways import BOUND
from tests.support.page_frames import Frame, read_frame

Message = dict[str, Any]

ANSWERS = frozenset(("accepted", "acknowledgement", "done", "error", "pong", "subscribed"))


class PageSocket:
    """The messages of a socket, each of which is looked at once or kept for later."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self._kept: list[Message] = []

    def send(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def next(self, wanted: Callable[[Message], Any], seconds: float = BOUND) -> Message:
        """The first message that is as wanted and was not returned yet; those before it are kept."""
        until = time.monotonic() + seconds
        for place in itertools.count():
            if place == len(self._kept):
                self._kept.append(_read(self.socket.recv(max(0.0, until - time.monotonic()))))
            if wanted(self._kept[place]):
                return self._kept.pop(place)
        raise AssertionError

    def of_type(self, *types: str) -> Message:
        return self.next(lambda message: message["type"] in types)

    def ask(self, **message: Any) -> Message:
        """Send a message with an id; return the first answer."""
        self.send(**message)
        return self.next(lambda one: one["type"] in ANSWERS and one["id"] == message.get("id"))

    def answers(self, **message: Any) -> list[Message]:
        """Send a message with an id; return all answers, of which ``done`` or an error is the last."""
        found = [self.ask(**message)]
        while found[-1]["type"] not in ("done", "error", "pong"):
            found.append(self.next(lambda one: one["type"] in ANSWERS and one["id"] == message.get("id")))
        return found

    def delta(self, name: str, wanted: Callable[[Any], Any] = bool) -> Any:
        """The first value of that name, in a delta, that is as wanted."""
        found = self.next(lambda one: one["type"] == "delta" and name in one and wanted(one[name]))
        return found[name]

    def frame(self, wanted: Callable[[Frame], Any] = bool) -> Frame:
        """The first binary frame that is as wanted."""
        found: Frame = self.next(lambda one: one["type"] == "frame" and wanted(one["frame"]))["frame"]
        return found

    def subscribe(self, **wanted: Any) -> Message:
        """Subscribe; return the answer."""
        return self.ask(type="subscribe", id="subscribe", **wanted)


def _read(received: str | bytes) -> Message:
    if isinstance(received, bytes):
        return {"type": "frame", "frame": read_frame(received)}
    message: Message = json.loads(received)
    return message


@contextmanager
def page_socket(url: str, token: str, query: str = "", page: bool = True) -> Iterator[PageSocket]:
    """A socket of a page, or of another program; it is closed in the end."""
    headers = {"Authorization": f"Bearer {token}"}
    protocols = [Subprotocol("loom.page")] if page else None
    with connect(
        f"{url}/ws/v1/weaver{query}", additional_headers=headers, subprotocols=protocols, max_size=None, proxy=None
    ) as socket:
        yield PageSocket(socket)
