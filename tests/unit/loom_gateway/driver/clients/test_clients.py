"""A client that watches and does not take what it is sent is disconnected, and nobody waits for it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from loom.errors import LimitReached, SessionRestarted, SessionTakenOver, TooLarge, WatcherTooSlow
from loom.wire.frames import decode_frame, encode_frame
from loom.wire.handshake import Hello, error_from_refusal
from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Kind, Message
from loom.wire.stream import Stream
from loom_gateway.driver.clients.client import PACE, Client
from loom_gateway.driver.clients.connection import ClientConnection
from loom_gateway.driver.clients.registry import (
    CALLER_ROOM,
    MAX_GUESTS,
    MAX_WATCHERS,
    WATCHER_ROOM,
    Clients,
)
from loom_gateway.driver.clients.unread_results import WATCHER_IDS

BOUND = 30.0


class Operations:
    """Those of a session: takes what is to be started."""

    next_id = 1

    def __init__(self, start: Callable[[Message], object] = lambda message: None) -> None:
        self.start = start
        self.start_beside = lambda mode, message: start(message)
        self.unread = SimpleNamespace(of_client=lambda first_id, tells: None)

    def client_left(self, unsent: Sequence[Message]) -> None:
        raise AssertionError("no client is let go of here")

    def unclaimed(self, message: Message) -> None:
        raise AssertionError("no client is let go of here")


def test_a_client_that_watches_and_takes_nothing_is_put_out() -> None:
    taken: queue.Queue[Message] = queue.Queue()
    clients = Clients()
    near, far = socket.socketpair()
    far.settimeout(BOUND)
    connection = ClientConnection(None, None, None, near)  # type: ignore[arg-type]  # nobody runs it: it is only written to
    client, _ = clients.admit(connection, Hello(mode="watch"), Operations(taken.put))

    for _ in range(WATCHER_ROOM // (1 << 20) + 2):
        clients.send(Message(Kind.EVENT, 0, ["something"], [bytes(1 << 20)]))

    assert client not in clients.all()
    head = far.recv(LENGTH.size, socket.MSG_WAITALL)
    (message,) = decode_frame(far.recv(*LENGTH.unpack(head), socket.MSG_WAITALL)).messages
    assert isinstance(error_from_refusal(message), WatcherTooSlow)
    assert client.left.wait(BOUND)
    near.close()
    far.close()


def test_clients_that_call_share_the_room_for_what_they_do_not_take() -> None:
    clients, ends, callers = Clients(), [], []
    for _ in range(3):  # nothing waits for the last
        near, far = socket.socketpair()
        ends += [near, far]
        connection = ClientConnection(None, None, None, near)  # type: ignore[arg-type]  # it is only written to
        callers.append(clients.admit(connection, Hello(mode="call"), Operations())[0])
    piece, half = bytes(CALLER_ROOM // 16), 8

    def answer(client: Client, number: int) -> None:
        clients.send(Message(Kind.RESULT, client.number * WATCHER_IDS + number, [], [piece]))

    for number in range(half + 3):  # more than half, while nothing waits for the other
        answer(callers[0], number)
    assert callers[0] in clients.all()
    for number in range(half - 1):
        answer(callers[1], number)
    for number in range(half + 3, half + 5):  # all of the room, and one
        answer(callers[0], number)

    assert callers[0] not in clients.all()
    assert callers[1] in clients.all()
    assert callers[0].left.wait(BOUND)
    for number in range(half - 1, half + 3):  # now alone
        answer(callers[1], number)
    assert callers[1] in clients.all()
    for end in ends:
        end.close()


def test_all_that_has_come_is_looked_at_for_what_is_taken_back() -> None:
    """Also behind a frame of which a read has brought the beginning only."""
    near, far = socket.socketpair()
    laptop = Stream()
    started: list[int] = []

    def frame(message: Message) -> bytes:
        laptop.put(message)
        return laptop.next_frame() or b""

    def call(ident: int) -> Message:
        return Message(Kind.CALL, ident, (1, "add"), [bytes(100)])

    def start(message: Message) -> None:
        if not started:
            calls = [frame(call(ident)) for ident in range(PACE + 1, 1000)]
            far.sendall(b"".join([*calls, frame(Message(Kind.CANCEL, 1000, [PACE + 1]))]))
            far.shutdown(socket.SHUT_WR)
        started.append(message.id)

    clients = Clients()
    connection = ClientConnection(None, None, None, near)  # type: ignore[arg-type]
    client, _ = clients.admit(connection, Hello(), Operations(start))
    far.sendall(b"".join(frame(call(ident)) for ident in range(1, PACE + 1)))

    client.take_turn()
    connection._receive(client, connection._frames())

    assert started == [ident for ident in range(1, 1000) if ident != PACE + 1]
    near.close()
    far.close()


def test_answers_may_come_from_any_thread_while_others_are_being_sent() -> None:
    """What waits to be sent is looked at for every large answer, while the writer thread takes from it."""
    clients = Clients()
    near, far = socket.socketpair()
    connection = ClientConnection(None, None, None, near)  # type: ignore[arg-type]
    client, _ = clients.admit(connection, Hello(), Operations())
    client.sender.attach(connection)
    raised: list[BaseException] = []

    def answer(number: int) -> None:
        try:
            for ident in range(1, 400):
                size = (256 << 10) if ident % 4 == 0 else 100
                clients.send(Message(Kind.RESULT, number * 1000 + ident, [0.0], [bytes(size)]))
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    def take() -> None:
        while far.recv(1 << 20):
            # Not the last one: it may not have left yet, and nobody acknowledges what has not come.
            client.stream.receive(b"".join(encode_frame(0, max(client.stream.sent - 1, 0), [])))
            client.sender.received()

    taker = threading.Thread(target=take)
    answering = [threading.Thread(target=answer, args=(number,)) for number in range(3)]
    for thread in [taker, *answering]:
        thread.start()
    for thread in answering:
        thread.join(BOUND)
    client.sender.drain(BOUND)
    near.shutdown(socket.SHUT_RDWR)
    taker.join(BOUND)

    assert not raised
    near.close()
    far.close()


@pytest.mark.guarantees("strangers", "A client that watches sends 64 KiB at most, and a session has 32 of them")
def test_watching_clients_are_bounded_in_number_and_in_what_they_send() -> None:
    clients = Clients(max_message=1 << 34)
    pairs = [socket.socketpair() for _ in range(MAX_WATCHERS + 1)]
    connections = [ClientConnection(None, None, None, near) for near, _ in pairs]  # type: ignore[arg-type]
    for connection in connections[:MAX_WATCHERS]:
        client, _ = clients.admit(connection, Hello(mode="watch"), Operations())
    laptop = Stream()
    laptop.put(Message(Kind.RUN, 1, ["name"], [bytes(2 << 20)]))
    frames = [frame[LENGTH.size :] for frame in iter(laptop.next_frame, None)]

    with pytest.raises(TooLarge):
        list(map(client.stream.receive, frames))
    with pytest.raises(LimitReached, match=str(MAX_WATCHERS)):
        clients.admit(connections[-1], Hello(mode="watch"), Operations())
    clients.disconnected(client, connections[MAX_WATCHERS - 1])
    assert clients.admit(connections[-1], Hello(mode="watch"), Operations())[1]  # one has left
    assert clients.admit(connections[-1], Hello(), Operations())[0].max_message == 1 << 34
    for near, far in pairs:
        near.close()
        far.close()


@pytest.mark.guarantees("strangers", "Guests who watch a session do not keep its user or other guests out")
def test_guests_who_watch_keep_nobody_else_out() -> None:
    clients = Clients()
    pairs = []

    def watch(guest: str | None) -> None:
        pairs.append(socket.socketpair())
        clients.admit(ClientConnection(None, None, None, pairs[-1][0]), Hello(mode="watch"), Operations(), guest)  # type: ignore[arg-type]

    for _ in range(MAX_GUESTS):
        watch("bob")
    with pytest.raises(LimitReached, match=f"{MAX_GUESTS} of your clients"):
        watch("bob")
    for number in range(MAX_WATCHERS - MAX_GUESTS):
        watch(f"guest {number}")
    with pytest.raises(LimitReached, match="shared with"):
        watch("carol")
    for _ in range(MAX_WATCHERS):
        watch(None)

    for near, far in pairs:
        near.close()
        far.close()


def test_a_client_of_a_driver_that_has_died_is_told_so_and_one_that_was_taken_over_that() -> None:
    clients = Clients()
    operations: Any = Operations()
    operations.client_left = lambda unsent, requests: None
    clients.restarted = SessionRestarted("its driver has died")
    pairs = [socket.socketpair() for _ in range(2)]
    try:
        connections = [ClientConnection(None, None, None, near) for near, _ in pairs]  # type: ignore[arg-type]
        first, _ = clients.admit(connections[0], Hello(), operations)
        clients.admit(connections[1], Hello(take_over=True), operations)

        with pytest.raises(SessionTakenOver):
            clients.admit(connections[0], Hello(stream=first.name), operations)
        with pytest.raises(SessionRestarted, match="its driver has died"):
            clients.admit(connections[0], Hello(stream="of before"), operations)
    finally:
        for each in (one for pair in pairs for one in pair):
            each.close()
