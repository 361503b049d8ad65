"""What the kernel queues: little towards a near peer, as much as it likes towards a far one."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest

from loom.wire import sockets
from loom.wire.sockets import NEAR, QUEUE, keep_queues_short, round_trip

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the round trip")

LIMITS = (socket.SO_SNDBUF, socket.SO_RCVBUF)


@pytest.fixture
def near() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        yield sock


def limits(sock: socket.socket) -> list[int]:
    return [sock.getsockopt(socket.SOL_SOCKET, limit) for limit in LIMITS]


def test_this_machine_is_near(near: socket.socket) -> None:
    seconds = round_trip(near)
    assert seconds is not None
    assert 0 < seconds < NEAR
    keep_queues_short(near)
    assert limits(near) == [2 * QUEUE, 2 * QUEUE]


def test_a_far_peer_gets_what_the_kernel_gives(near: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "NEAR", 0.0)
    before = limits(near)
    keep_queues_short(near)
    assert limits(near) == before


def test_what_is_no_tcp_connection_stays_as_it_is() -> None:
    one, other = socket.socketpair()
    with one, other:
        before = limits(one)
        assert round_trip(one) is None
        keep_queues_short(one)
        assert limits(one) == before


def test_another_system_does_not_tell_the_round_trip(near: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert round_trip(near) is None
