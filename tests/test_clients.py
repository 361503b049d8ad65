"""A client that watches and does not take what it is sent is put out, and nobody waits for it."""

from __future__ import annotations

import queue
import socket

from loom.errors import WatcherTooSlow
from loom.wire.frames import decode_frame
from loom.wire.handshake import Hello, error_from_refusal
from loom.wire.messages import Kind, Message
from loom.wire.stream import LENGTH
from loom_gateway.driver.clients import WATCHER_ROOM, Clients
from loom_gateway.driver.connection import ClientConnection

BOUND = 30.0


def test_a_client_that_watches_and_takes_nothing_is_put_out() -> None:
    taken: queue.Queue[Message] = queue.Queue()
    clients = Clients(taken.put, taken.put, lambda unsent: None, taken.put, lambda: 1)
    near, far = socket.socketpair()
    far.settimeout(BOUND)
    connection = ClientConnection(None, near)  # type: ignore[arg-type]  # nobody runs it: it is only written to
    client, _ = clients.admit(connection, Hello(mode="watch"))

    for _ in range(WATCHER_ROOM // (1 << 20) + 2):
        clients.send(Message(Kind.EVENT, 0, ["something"], [bytes(1 << 20)]))

    assert client not in clients.all()
    head = far.recv(LENGTH.size, socket.MSG_WAITALL)
    (message,) = decode_frame(far.recv(*LENGTH.unpack(head), socket.MSG_WAITALL)).messages
    assert isinstance(error_from_refusal(message), WatcherTooSlow)
    assert client.left.wait(BOUND)
    far.close()
