"""No two drivers of a gateway listen on the same port: the workers would not answer the second."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom_gateway.driver.monarch.root_client import _is_free
from loom_gateway.sessions.manager import TRIES, FreshPorts


class Bound:
    """Not a socket: what is asked of one that is bound. Others on this machine could take a real one's port."""

    def __init__(self, port: int) -> None:
        self._port = port

    def getsockname(self) -> tuple[str, int]:
        return "", self._port

    def setsockopt(self, *option: int) -> None: ...

    def close(self) -> None: ...


class Kernel:
    """Picks one of a few ports after the other."""

    def __init__(self, count: int) -> None:
        self._next = 0
        self._count = count

    def bind(self) -> Any:
        self._next += 1
        return Bound(self._next % self._count + 1)


def test_no_port_is_given_twice(tmp_path: Path) -> None:
    ports = FreshPorts(str(tmp_path / "ports"), Kernel(10).bind)
    assert len({ports.take() for _ in range(10)}) == 10


def test_a_port_that_was_given_is_free_to_be_listened_on(tmp_path: Path) -> None:
    port = FreshPorts(str(tmp_path / "ports")).take()
    assert _is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not _is_free("127.0.0.1", port)


def test_a_port_that_was_given_is_chosen_for_nobody_before_and_after_a_driver_listens(tmp_path: Path) -> None:
    ports = FreshPorts(str(tmp_path / "ports"))
    port = ports.take()
    for _ in range(2):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass  # as a driver and its worker do
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    ports.close()
    with socket.socket() as other:
        other.bind(("", port))


def test_of_many_ports_the_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loom_gateway.sessions.manager.HELD", 2)
    ports = FreshPorts(str(tmp_path / "ports"))
    free = []
    for port in [ports.take() for _ in range(3)]:
        with socket.socket() as other:
            free.append(_bindable(other, port))
    assert free == [True, False, False]
    ports.close()


def _bindable(sock: socket.socket, port: int) -> bool:
    try:
        sock.bind(("", port))
    except OSError:
        return False
    return True


def test_when_none_is_left_they_are_given_again(tmp_path: Path) -> None:
    ports = FreshPorts(str(tmp_path / "ports"), Kernel(TRIES).bind)
    taken = [ports.take() for _ in range(TRIES)]
    assert len(set(taken)) == TRIES
    assert ports.take() in taken


@pytest.mark.timeout(120)
def test_a_driver_listens_on_the_port_that_it_was_given(cluster: loom.LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        job.hosts.initialized.get(timeout=60)
        given = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # one of an earlier session is just ending
                line = process.cmdline()
                if "loom_gateway.driver" in line:
                    connections = process.net_connections("tcp")
                    listens = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
                    given[int(line[line.index("--port") + 1])] = listens
        assert any(port in listens for port, listens in given.items())
