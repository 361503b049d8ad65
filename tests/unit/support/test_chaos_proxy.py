"""The proxy that attacks: it does what its schedule says, and what it does not say it leaves alone."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.network.chaos_proxy import CUTS, Action, ChaosProxy, Schedule

BOUND = 30.0

HELLO = b"hello"


class Server:
    """Takes connections, and gives those that say HELLO: who dials a port's owner of before says something else."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._accepted: queue.Queue[socket.socket] = queue.Queue()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.settimeout(BOUND)
                self._accepted.put(sock)

    def greeted(self) -> socket.socket:
        while True:
            sock = self._accepted.get(timeout=BOUND)
            if exactly(sock, len(HELLO)) == HELLO:
                return sock
            sock.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(BOUND)
        while not self._accepted.empty():
            self._accepted.get().close()


@dataclass
class Attacked:
    """A connection through the proxy, before anything has happened to it, and its two ends."""

    proxy: ChaosProxy
    server: Server
    client: socket.socket
    upstream: socket.socket


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return data


def until_reset(sock: socket.socket) -> bytes:
    data = b""
    try:
        while piece := sock.recv(100):
            data += piece
    except ConnectionResetError:
        return data
    raise AssertionError("closed in good form, not reset")


@pytest.fixture
def attacked() -> Iterator[Attacked]:
    server = Server()
    with ChaosProxy(server.port) as proxy, socket.create_connection(("127.0.0.1", proxy.port), BOUND) as client:
        client.sendall(HELLO)
        with server.greeted() as upstream:
            upstream.sendall(HELLO)
            assert exactly(client, len(HELLO)) == HELLO
            yield Attacked(proxy, server, client, upstream)
    server.close()


class Once(Schedule):
    """One action after so many bytes."""

    def __init__(self, after: int, action: Action) -> None:
        super().__init__(seed=0, cuts=0, stall=0.05, delay=0.05)
        self._what = [(after, action)]

    def next(self) -> tuple[int, Action] | None:
        return self._what.pop() if self._what else None


def attack(attacked: Attacked, after: int, action: Action) -> None:
    attacked.proxy.attack(Once(after, action))
    attacked.client.sendall(b"0123456789")


def test_nothing_happens_before_the_attack_and_after_it(attacked: Attacked) -> None:
    data = bytes(range(256)) * 4096
    sender = threading.Thread(target=attacked.client.sendall, args=(data,))
    sender.start()
    assert exactly(attacked.upstream, len(data)) == data
    sender.join()
    assert not attacked.proxy.done
    assert attacked.proxy.forwarded == len(data) + 2 * len(HELLO)


def test_a_reset_comes_after_the_piece(attacked: Attacked) -> None:
    attack(attacked, 4, Action.RESET)
    with pytest.raises(ConnectionResetError):
        attacked.client.recv(1)
    until_reset(attacked.upstream)


def test_a_connection_is_closed_in_good_form_after_the_piece(attacked: Attacked) -> None:
    attack(attacked, 4, Action.FINISH)
    assert exactly(attacked.upstream, 11) == b"0123456789"
    assert attacked.client.recv(1) == b""


def test_what_is_truncated_arrives_in_part_at_most(attacked: Attacked) -> None:
    attack(attacked, 4, Action.TRUNCATE)
    assert b"0123".startswith(until_reset(attacked.upstream))  # a reset takes what has not been read
    with pytest.raises(ConnectionResetError):
        attacked.client.recv(1)


@pytest.mark.parametrize("action", [Action.STALL, Action.DELAY])
def test_what_is_late_arrives_whole(attacked: Attacked, action: Action) -> None:
    attack(attacked, 4, action)
    attacked.client.sendall(b"abc")
    assert exactly(attacked.upstream, 13) == b"0123456789abc"
    attacked.upstream.sendall(b"def")
    assert exactly(attacked.client, 3) == b"def"


def test_what_a_client_said_first_is_said_again(attacked: Attacked) -> None:
    attack(attacked, 4, Action.DUPLICATE)
    with attacked.server.greeted():
        pass
    assert exactly(attacked.upstream, 10) == b"0123456789"
    assert attacked.proxy.links == 1


def test_a_client_is_turned_away_where_the_server_is_gone() -> None:
    server = Server()
    server.close()
    with ChaosProxy(server.port) as proxy, socket.create_connection(("127.0.0.1", proxy.port), BOUND) as client:
        assert client.recv(1) == b""


def drawn(seed: int) -> list[tuple[int, Action]]:
    return list(iter(Schedule(seed, cuts=200, gap=(3, 9)).next, None))  # type: ignore[arg-type]


def test_a_schedule_is_that_of_its_seed() -> None:
    one = drawn(1)
    assert one == drawn(1) != drawn(2)
    assert sum(action in CUTS for _, action in one) == 200
    assert {action for _, action in one} == set(Action)
    assert {gap for gap, _ in one} == set(range(3, 10))


def test_every_action_of_a_schedule_is_done_and_counted() -> None:
    """A client that comes back after every cut, as Loom's does."""
    server = Server()
    expected = drawn(3)
    with ChaosProxy(server.port) as proxy:
        proxy.attack(Schedule(3, cuts=200, gap=(3, 9), stall=0.001, delay=0.0))
        while not proxy.calm.is_set():
            with socket.create_connection(("127.0.0.1", proxy.port), BOUND) as client:
                with contextlib.suppress(ConnectionError):
                    while not proxy.calm.is_set():
                        client.sendall(b"x")
    server.close()
    assert proxy.cuts == 200
    assert sum(proxy.done.values()) == len(expected)
    assert all(proxy.done[action] == sum(other is action for _, other in expected) for action in Action)
